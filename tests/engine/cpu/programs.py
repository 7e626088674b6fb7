"""C++ programs that test headers of the compiled layers."""

from __future__ import annotations

import subprocess
from pathlib import Path

from inflight.engine.cpu import library
from inflight.engine.cpu.library import find_target


def compile_program(folder: Path, text: str, *flags: str) -> Path:
    """Compile a C++ program, which includes the headers by name."""
    (folder / "program.cpp").write_text(text)
    headers = ("-std=c++17", "-pthread", "-O1", "-I", str(library._SOURCES))
    command = [library._find_compiler(), *headers, *find_target("bfloat16").here, *flags, "program.cpp"]
    subprocess.run([*command, "-o", "program"], cwd=folder, check=True, timeout=600)
    return folder / "program"


def exit_status(program: Path, *arguments: str) -> int:
    return subprocess.run([program, *arguments], timeout=120, check=False).returncode

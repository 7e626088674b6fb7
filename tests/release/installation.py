"""Wheels that are built in tests, and environments in which they are installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_SOURCES = ("backend", "model_repository", "benchmarks", "client")
_FILES = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")
_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


def copy_sources(folder: Path) -> Path:
    """Copy the files of the checkout that a wheel is built from, without compiled layers; return the folder."""
    for name in _SOURCES:
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "prebuilt", "*.so")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
    for name in _FILES:
        shutil.copy(ROOT / name, folder)
    return folder


def build_wheel(source: Path, folder: Path) -> Path:
    """Build the wheel of a folder or a source distribution, with the tests' setuptools; return its path."""
    options = ("-q", "--no-deps", "--no-build-isolation", "--no-index")
    subprocess.run([*_PIP, "wheel", *options, "-w", folder, source], check=True, timeout=300)
    (wheel,) = folder.glob("*.whl")
    return wheel


class Installation:
    """An environment with a wheel and the tests' dependencies, whose PATH has only its own programs."""

    def __init__(self, wheel: Path, folder: Path) -> None:
        venv.create(folder / "venv", symlinks=True)
        self.bin, self.cache = folder / "venv" / "bin", folder / "cache"
        python = str(self.bin / "python")
        install = [*_PIP, "--python", python, "install", "-q", "--no-deps", "--no-index"]
        subprocess.run([*install, wheel], check=True, timeout=600)
        self.packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "venv")}))
        (self.packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))

    def environment(self, **variables: str) -> Mapping[str, str]:
        """Return the environment variables of its programs."""
        return {"PATH": str(self.bin), "XDG_CACHE_HOME": str(self.cache), "HOME": "/", **variables}

    def run(self, *arguments: str, **variables: str) -> str:
        """Run the environment's Python and return its output."""
        done = subprocess.run(
            [self.bin / "python", *arguments],
            capture_output=True,
            text=True,
            timeout=600,
            env=self.environment(**variables),
            cwd=os.sep,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

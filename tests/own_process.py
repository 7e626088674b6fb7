"""Tests that run in a process of their own, because they check properties of the whole process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path


def run_checks(path: Path, timeout_s: float, **environment: str) -> None:
    """Run the tests in the files `check_*.py` at `path` with a separate pytest; all must pass.

    Args:
        path: A file or a folder.
        timeout_s: Most seconds for all of them.
        environment: Further environment variables of the process.
    """
    options = [
        "-q",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        "-o",
        "addopts=",
        "-o",
        "python_files=check_*.py",
    ]
    command = [sys.executable, "-m", "pytest", *options, str(path)]
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert re.search(r"[1-9]\d* passed", done.stdout) and "skipped" not in done.stdout, done.stdout[-500:]

"""A separate environment for a load generator, whose packages conflict with the server's.

`.venv-NAME` in the checkout is made on first use, with the packages that `NAME.txt` in this folder pins. A
stamp file in it records that it is complete, with a digest of the pins. Runs on the main thread.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from inflight.server.errors import ServeError

_ROOT = Path(__file__).resolve().parents[2]
_PINS = Path(__file__).resolve().parent
_STAMP = ".inflight-complete"
_PYTHONS = ("python3.11", "python3.12")  # AIPerf needs 3.11 or later; the pinned wheels exist for these two


def find_program(name: str, root: Path = _ROOT) -> Path | None:
    """Return the program NAME in its environment.

    Returns None if the environment is missing, incomplete or has other pins.
    """
    stamp = _folder(name, root) / _STAMP
    try:
        is_complete = stamp.read_text() == _digest(name)
    except OSError:
        return None
    return _folder(name, root) / "bin" / name if is_complete else None


def require_program(name: str, root: Path = _ROOT) -> Path:
    """Return the program like `find_program`.

    First make the environment if necessary, which takes a minute or two.

    Raises ServeError if the environment cannot be made.
    """
    if (program := find_program(name, root)) is not None:
        return program
    folder = _folder(name, root)
    print(f"bench: installing {name} into {folder.name} (a minute or two, once)", file=sys.stderr, flush=True)
    python = _find_python()
    _run([python, "-m", "venv", "--clear", str(folder)])
    pins = _PINS / f"{name}.txt"
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    _run([*pip, "--no-deps", "-r", str(pins)])
    (folder / _STAMP).write_text(_digest(name))
    return folder / "bin" / name


def _folder(name: str, root: Path) -> Path:
    return root / f".venv-{name}"


def _digest(name: str) -> str:
    return hashlib.sha256((_PINS / f"{name}.txt").read_bytes()).hexdigest()


def _find_python() -> str:
    for name in _PYTHONS:
        if (found := shutil.which(name)) and not subprocess.call(
            [found, "-c", ""], stderr=subprocess.DEVNULL
        ):
            return found
    if (3, 11) <= sys.version_info[:2] <= (3, 12):
        return sys.executable
    raise ServeError("no Python 3.11 or 3.12 on PATH, which the load generator needs")


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ServeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr.strip()[-1000:]}")

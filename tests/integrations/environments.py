"""Environments of their own for programs of other projects, and their processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import venv
from pathlib import Path

import pytest

from tests.integrations.clients import Client


def install(client: Client, folder: Path) -> Path:
    """Install a client in `folder`; return the folder of its environment's programs."""
    return (install_npm if client.is_npm else install_python)(folder, client.packages)


def install_python(folder: Path, packages: tuple[str, ...]) -> Path:
    """Make an environment with packages of Python below `folder`; return the folder of its programs."""
    venv.create(folder / "venv", with_pip=True)
    programs = folder / "venv/bin"
    subprocess.run([programs / "python", "-m", "pip", "install", "--quiet", *packages], check=True)
    return programs


def install_npm(folder: Path, packages: tuple[str, ...]) -> Path:
    """Install npm's packages in `folder`; return the folder of their programs."""
    npm = shutil.which("npm")
    if npm is None:  # it is no package of Python's, so that scripts/test cannot install it
        pytest.skip("no npm on PATH")
    command = [npm, "install", "--no-fund", "--no-audit", "--silent", *packages]
    subprocess.run(command, cwd=folder, check=True)
    return folder / "node_modules/.bin"


def run(command: list[Path | str], folder: Path, **variables: str) -> str:
    """Run a program in `folder`, which is also its home; return what it prints, after checking its exit status."""
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment(folder, **variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def environment(folder: Path, **variables: str) -> dict[str, str]:
    """Return the variables of a program whose home is `folder`."""
    return {**os.environ, "HOME": str(folder), **variables}

"""Scripts install their requirements in separate environments, never beside a server that may be running."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from inflight.version import package_version

ROOT = Path(__file__).resolve().parents[2]
# Prints which interpreter runs, and where its environment is.
PYTHON = """#!/bin/sh
case "$1 $2" in
  "-c import sys; print(sys.prefix)") dirname "$(dirname "$0")" ;;
  "-c "*) ;;
  *) echo "$(basename "$(dirname "$(dirname "$0")")") $*" ;;
esac
"""
PIP = "#!/bin/sh\nexit 1\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Copy the scripts and the files that they read."""
    for name in ("scripts", "client"):
        shutil.copytree(
            ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.egg-info", "__pycache__")
        )
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def make_environment(checkout: Path, name: str, *purposes: str) -> None:
    """Make a stand-in for an environment in which everything for `purposes` is installed."""
    folder = checkout / name / "bin"
    folder.mkdir(parents=True)
    for program, text in (("python", PYTHON), ("pip", PIP), ("perf_analyzer", PIP)):
        (folder / program).write_text(text)
        (folder / program).chmod(0o755)
    script = '. "$0/scripts/lib.sh"; fingerprint'
    stamp = subprocess.run(["bash", "-c", script, str(checkout)], capture_output=True, text=True, check=True)
    for purpose in purposes:
        (checkout / name / f".inflight-{purpose}").write_text(stamp.stdout.rstrip("\n"))


def perf_analyzer(checkout: Path) -> list[str]:
    command = [checkout / "scripts" / "perf_analyzer", "-m", "some_model"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert "installing" not in done.stderr
    return done.stdout.split()


def test_perf_analyzer_is_not_installed_into_the_servers_environment(checkout: Path):
    make_environment(checkout, ".venv", "serve")
    make_environment(checkout, ".venv-client", "client")
    assert perf_analyzer(checkout)[0] == ".venv-client"
    assert not (checkout / ".venv" / ".inflight-test").exists()


def test_perf_analyzer_of_the_tests_environment_is_used_if_present(checkout: Path):
    make_environment(checkout, ".venv", "serve", "test")
    assert perf_analyzer(checkout) == [
        ".venv",
        "-m",
        "benchmarks.measuring.perf_analyzer",
        "-m",
        "some_model",
    ]


@pytest.mark.parametrize("script", ["serve", "doctor", "bench"])
def test_the_version_is_printed_before_anything_is_installed(checkout: Path, script: str):
    (checkout / "backend").symlink_to(ROOT / "backend")
    command = [checkout / "scripts" / script, "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"inflight {package_version()}\n", "")
    assert not (checkout / ".venv").exists()

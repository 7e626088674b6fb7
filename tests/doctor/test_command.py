"""The command itself: its exit status, JSON, plain lines and colours, and where nothing is installed."""

from __future__ import annotations

import ast
import io
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from inflight.doctor import __main__ as command
from inflight.doctor.finding import INSTALL, Finding, Level, red
from inflight.doctor.output import write_text

ROOT = Path(__file__).resolve().parents[2]


def plant(monkeypatch: pytest.MonkeyPatch, *levels: Level) -> None:
    findings = [
        Finding(f"{level.value} thing", level, "is [so]", "" if level is Level.GREEN else "do it")
        for level in levels
    ]
    monkeypatch.setattr(command, "_checks", lambda given: [("all", lambda: findings)])


@pytest.mark.parametrize(
    ("levels", "status"),
    [([Level.GREEN], 0), ([Level.GREEN, Level.YELLOW], 0), ([Level.RED, Level.GREEN], 1)],
)
def test_the_exit_status_is_0_without_red_findings(
    levels: list[Level], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    plant(monkeypatch, *levels)
    assert command.main(["--json"]) == status
    written = json.loads(capsys.readouterr().out)
    assert [found["level"] for found in written["findings"]] == [level.value for level in levels]
    assert written["status"] == ("red" if status else levels[-1].value)
    assert command.main([]) == status
    text = capsys.readouterr().out
    assert "\x1b" not in text and ("mend: do it" in text) is (levels != [Level.GREEN])


def test_a_path_that_the_system_refuses_is_a_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    # As in a folder that this user may not search, which root may.
    path = tmp_path / ("n" * 300) / "model"
    assert command.main(["--model", str(path)]) == 1
    assert "File name too long" in capsys.readouterr().out


def test_an_empty_name_of_a_model_is_wrong_usage(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        command.main(["--model", ""])
    assert ended.value.code == 2 and "--model got '', expected a folder" in capsys.readouterr().err


def test_findings_of_several_lines_are_indented():
    finding, text = Finding("a thing", Level.RED, "two faults:\n  one\n  other", "do it"), io.StringIO()
    write_text([finding], text)
    lines = text.getvalue().splitlines()
    margin = " " * lines[0].index("two faults:")
    assert lines[1:4] == [f"{margin}one", f"{margin}other", f"{margin}mend: do it"]


def test_findings_are_coloured_on_a_terminal(monkeypatch: pytest.MonkeyPatch):
    plant(monkeypatch, Level.YELLOW)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        assert command.main([]) == 0
        terminal.flush()
        text = os.read(ours, 65536).decode()
    os.close(ours)
    assert "\x1b[33m● yellow" in text and "is [so]" in text and "→ do it" in text


def test_missing_packages_are_reported():
    program = (
        "import runpy, sys; sys.path.insert(0, sys.argv.pop(1)); "
        "runpy.run_module('inflight.doctor', run_name='__main__')"
    )
    arguments = [
        str(ROOT / "backend"),
        "--json",
        "--model",
        str(ROOT / "model_repository/tensorrt_llm/1/demo_model"),
    ]
    done = subprocess.run(
        [sys.executable, "-S", "-E", "-c", program, *arguments], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (1, "")
    found = {each["name"]: each for each in json.loads(done.stdout)["findings"]}
    # Installed in place, the package can be imported from its folder, but its dependencies are missing.
    for name in ("torch", "packages", "checkpoint"):
        assert found[name]["level"] == "red" and "not installed" in found[name]["says"], found[name]
        assert "scripts/serve" in found[name]["mend"]
    for name in ("Python", "processors", "memory", "/dev/shm", "CPU layers, float32"):
        assert "cannot be examined" not in found[name]["says"] and found[name]["level"] in ("green", "yellow")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the doctor of a checkout without .venv."""
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    for name in ("doctor", "lib.sh"):
        (scripts / name).write_bytes((ROOT / "scripts" / name).read_bytes())
    (scripts / "doctor").chmod(0o755)
    (tmp_path / "backend").symlink_to(ROOT / "backend")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return scripts / "doctor"


def test_the_script_runs_without_an_environment(script: Path, tmp_path: Path):
    """The script runs with any Python and installs nothing."""
    done = subprocess.run([script], capture_output=True, text=True, timeout=60)
    assert done.returncode in (0, 1) and not done.stderr
    assert "Python  " in done.stdout and not (tmp_path / ".venv").exists()


def test_no_venv_examines_the_active_environment(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The environment's `python` is the first one on PATH, whatever other versions are there."""
    active = tmp_path / "active"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", active], check=True, timeout=60)
    monkeypatch.setenv("PATH", str(active / "bin"), prepend=os.pathsep)
    for name in ("python3", "python3.10", "python3.11", "python3.12"):
        (active / "bin" / name).unlink(missing_ok=True)
    (active / "bin" / "python").unlink(missing_ok=True)
    (active / "bin" / "python").symlink_to(sys.executable)
    done = subprocess.run([script, "--no-venv", "--json"], capture_output=True, text=True, timeout=60)
    found = {each["name"]: each for each in json.loads(done.stdout)["findings"]}
    assert str(active) in found["Python"]["says"] and not done.stderr


@pytest.mark.parametrize("version", [(2, 7, 18), (3, 9, 18)])
def test_an_old_python_is_refused_in_a_sentence(version: tuple[int, int, int]):
    program = (
        f"import sys; sys.version_info = {version}; sys.path.insert(0, sys.argv[1]); import inflight.doctor"
    )
    command = [sys.executable, "-S", "-E", "-c", program, str(ROOT / "backend")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith(
        f"Python {version[0]}.{version[1]} runs this, which is too old: install Python 3.10"
    )


def test_old_pythons_can_parse_what_prints_the_sentence():
    for package in ("inflight", "inflight/doctor"):
        text = (ROOT / "backend" / package / "__init__.py").read_text(encoding="ascii")
        ast.parse(text, feature_version=(3, 4))


def test_mends_name_the_commands_of_the_package_if_it_runs(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["inflight doctor"])
    assert red("port", "is taken", "scripts/serve --http-port 0").mend == "inflight serve --http-port 0"
    assert ".venv" not in red("packages", "not installed", INSTALL).mend
    monkeypatch.setattr(sys, "argv", ["scripts/doctor"])
    assert red("packages", "not installed", INSTALL).mend == INSTALL

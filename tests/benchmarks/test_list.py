"""`scripts/bench` itself."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import benchmarks
from inflight import bench_command

_SCRIPT = Path(__file__).resolve().parents[2] / "scripts/bench"
_PROGRAMS = Path(benchmarks.__file__).parent


NAMES = sorted(
    path.stem
    for path in _PROGRAMS.glob("*.py")
    if "__main__" in path.read_text() and not path.stem.endswith("_program")
)
NAMES_SHOWN = {"genai_perf": "genai-perf"}


def _bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([_SCRIPT, *arguments], capture_output=True, text=True)


@pytest.mark.smoke
@pytest.mark.parametrize("arguments", [(), ("--help",)])
def test_the_benchmarks_are_listed_with_their_purposes(arguments):
    done = _bench(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("\n\nscripts/bench NAME --help lists a benchmark's options.\n")
    for name in ("offline", "serve", "compare", "accuracy", "ranks"):
        purpose = ast.get_docstring(ast.parse((_PROGRAMS / f"{name}.py").read_text())).splitlines()[0]
        assert any(line.split(maxsplit=1) == [name, purpose] for line in done.stdout.splitlines())
    assert "ranks_program" not in done.stdout and "long_context" not in done.stdout


@pytest.mark.smoke
@pytest.mark.parametrize("name", NAMES)
def test_every_benchmark_has_help(name, monkeypatch, capsys):
    """Smoke test of the benchmarks that have no other test."""
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"benchmarks.{name}").main()
    assert ended.value.code == 0 and "usage: " in capsys.readouterr().out


@pytest.mark.smoke
def test_help_before_the_packages_are_installed_says_when_the_options_are_listed(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "benchmarks.offline", raising=False)
    monkeypatch.setitem(sys.modules, "benchmarks.measuring.options", None)  # importing it fails
    assert bench_command.main(["offline", "--help"]) == 1
    out, err = capsys.readouterr()
    assert out.count("\n") == 1 and "the options are listed when the packages of the benchmarks" in err


def said_by(name, arguments, monkeypatch, capsys):
    """Return the first line that a benchmark writes about a wrong command line."""
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"benchmarks.{name}").main()
    written = capsys.readouterr().err
    assert ended.value.code == 2 and written.count("\n") == 2, written
    return written.partition("\n")[0]


@pytest.mark.smoke
@pytest.mark.parametrize("name", NAMES)
def test_every_benchmark_answers_an_unknown_option_with_one_line(name, monkeypatch, capsys):
    said = said_by(name, ["--versio"], monkeypatch, capsys)
    shown = NAMES_SHOWN.get(name, name)
    assert said.removeprefix(f"scripts/bench {shown}: error: ") == (
        "unrecognized arguments: --versio (did you mean --version?)"
    )


@pytest.mark.smoke
@pytest.mark.parametrize(
    "name", ["offline", "serve", "compare", "aiperf", "genai_perf", "startup", "decode_share"]
)
def test_a_benchmark_without_its_model_shows_an_example(name, monkeypatch, capsys):
    shown = NAMES_SHOWN.get(name, name)
    assert said_by(name, [], monkeypatch, capsys).removeprefix(f"scripts/bench {shown}: error: ") == (
        f"the following arguments are required: --model, as in scripts/bench {shown} --model DIR"
    )


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("offline", ["--model", "x", "--rounds", "0"], "--rounds: expected a whole number from 1, got '0'"),
        ("sampling", ["--rows", "ten"], "--rows: expected a whole number from 1, got 'ten'"),
        ("idle", ["--seconds", "-1"], "--seconds: expected a number above 0, got '-1'"),
        ("loop", ["--send-us", "x"], "--send-us: expected a number, got 'x'"),
        (
            "profile",
            ["--out", "/proc/x"],
            "--out: expected a folder that can be written, got '/proc/x': no file",
        ),
        (
            "soak",
            ["--csv", "/proc/x/y"],
            "--csv: expected a file that can be written, got '/proc/x/y': there is no",
        ),
    ],
)
def test_a_wrong_value_is_answered_with_what_was_expected(name, given, said, monkeypatch, capsys):
    assert f"argument {said}" in said_by(name, given, monkeypatch, capsys)


@pytest.mark.parametrize("arguments", [("offlin",), ("ranks_program",), ("../bench/offline",)])
def test_an_unknown_benchmark_is_answered_with_the_list(arguments):
    done = _bench(*arguments)
    assert done.returncode == 2 and not done.stdout
    assert "  offline " in done.stderr and "No module" not in done.stderr
    is_near = arguments != ("ranks_program",)
    hint = "did you mean offline?" if is_near else "expected a name of the list above"
    assert done.stderr.endswith(f": there is no benchmark {arguments[0]}; {hint}\n")

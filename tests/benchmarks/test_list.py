"""`scripts/bench` itself."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import benchmarks

_SCRIPT = Path(__file__).resolve().parents[2] / "scripts/bench"
_PROGRAMS = Path(benchmarks.__file__).parent


def _bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([_SCRIPT, *arguments], capture_output=True, text=True)


@pytest.mark.smoke
def test_help_lists_the_benchmarks_with_their_purposes():
    done = _bench("--help")
    assert done.returncode == 0
    for name in ("offline", "serve", "compare", "accuracy", "ranks"):
        purpose = ast.get_docstring(ast.parse((_PROGRAMS / f"{name}.py").read_text())).splitlines()[0]
        assert any(line.split(maxsplit=1) == [name, purpose] for line in done.stdout.splitlines())
    assert "ranks_program" not in done.stdout and "long_context" not in done.stdout


@pytest.mark.smoke
@pytest.mark.parametrize(
    "name",
    sorted(
        path.stem
        for path in _PROGRAMS.glob("*.py")
        if "__main__" in path.read_text() and not path.stem.endswith("_program")
    ),
)
def test_every_benchmark_has_help(name, monkeypatch, capsys):
    """Smoke test of the benchmarks that have no other test."""
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"benchmarks.{name}").main()
    assert ended.value.code == 0 and "usage: " in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [(), ("offlin",), ("ranks_program",), ("../bench/offline",)])
def test_an_unknown_benchmark_is_answered_with_the_list(arguments):
    done = _bench(*arguments)
    assert done.returncode == 2 and not done.stdout
    assert "  offline " in done.stderr and "No module" not in done.stderr
    if arguments:
        assert f"there is no benchmark {arguments[0]}" in done.stderr

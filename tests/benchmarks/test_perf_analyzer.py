"""Runs of perf_analyzer, and reading of its export."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired

import pytest

from benchmarks.measuring import perf_analyzer
from inflight.server.errors import ServeError

EXPERIMENTS = [{"experiment": {"mode": "concurrency", "value": 1}, "requests": [{"timestamp": 3}]}]
WHOLE = json.dumps({"experiments": EXPERIMENTS, "version": "2.50.0"})


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list of the texts that the next runs write; each run takes the first."""
    texts: list[str] = []

    def run(arguments: list[str], *_: object) -> CompletedProcess[str]:
        Path(arguments[arguments.index("--profile-export-file") + 1]).write_text(texts.pop(0))
        return CompletedProcess(arguments, 0, "", "")

    monkeypatch.setattr(perf_analyzer, "run", run)
    return texts


@pytest.mark.smoke
@pytest.mark.parametrize(
    "cut", [[], [""], [WHOLE[:-9], WHOLE[:20]]], ids=["none", "empty", "two that end early"]
)
def test_an_incomplete_export_makes_perf_analyzer_run_again(exports: list[str], cut: list[str]) -> None:
    exports += [*cut, WHOLE, "not read"]
    assert perf_analyzer.export(["-m", "tensorrt_llm"]) == EXPERIMENTS
    assert exports == ["not read"]


def test_three_incomplete_exports_are_an_error(exports: list[str]) -> None:
    exports += [WHOLE[:20], "", WHOLE[:-9], WHOLE]
    with pytest.raises(ServeError, match=r"3 times; the last time, its export was not JSON, .*version"):
        perf_analyzer.export(["-m", "tensorrt_llm"])


def test_a_response_that_ends_inside_a_character_is_read(exports: list[str]) -> None:
    exports.append('{"experiments": [{"text_output": "\x01"}]}')
    assert perf_analyzer.export([]) == [{"text_output": "\x01"}]


def test_the_output_of_a_failed_run_is_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = CompletedProcess([], 99, "", "cannot connect\nusage: perf_analyzer")
    monkeypatch.setattr(perf_analyzer, "run", lambda *_: failed)
    with pytest.raises(ServeError, match="ended with 99:\ncannot connect"):
        perf_analyzer.export([])


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Replace the program by one that never ends; return a file to which each run adds a line."""
    runs, program = tmp_path / "runs", tmp_path / "program"
    program.write_text(f"#!/bin/sh\necho >> {shlex.quote(str(runs))}\nexec sleep 3600\n")
    program.chmod(0o755)
    monkeypatch.setattr(perf_analyzer, "find", lambda: program)
    monkeypatch.setattr(perf_analyzer, "_CHECK_S", 0.2)
    return runs


def test_a_run_that_never_ends_is_repeated_when_the_server_is_idle(stuck: Path) -> None:
    with pytest.raises(ServeError, match="failed 3 times; the last time, it did not end although the server"):
        perf_analyzer.export([], is_idle=lambda: True)
    assert stuck.read_text() == "\n" * 3


def test_a_run_goes_on_while_the_server_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    idle = iter([True, False, True, False, False])
    program = "import time; time.sleep(0.9); print('done')"
    monkeypatch.setattr(perf_analyzer, "find", lambda: sys.executable)
    monkeypatch.setattr(perf_analyzer, "_CHECK_S", 0.2)
    ended = perf_analyzer.run(["-c", program], is_idle=lambda: next(idle, False))
    assert (ended.returncode, ended.stdout) == (0, "done\n")


def test_a_run_that_takes_too_long_is_ended(stuck: Path) -> None:
    with pytest.raises(TimeoutExpired):
        perf_analyzer.export([], timeout=0.5)
    assert stuck.read_text() == "\n"

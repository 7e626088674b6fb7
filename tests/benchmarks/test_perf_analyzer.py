"""Reading of perf_analyzer's export."""

from __future__ import annotations

import json
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from benchmarks.measuring import perf_analyzer
from inflight.server.errors import ServeError

EXPERIMENTS = [{"experiment": {"mode": "concurrency", "value": 1}, "requests": [{"timestamp": 3}]}]
WHOLE = json.dumps({"experiments": EXPERIMENTS, "version": "2.50.0"})


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list of the texts that the next runs write; each run takes the first."""
    texts: list[str] = []

    def run(arguments: list[str], timeout: float | None) -> CompletedProcess[str]:
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
    with pytest.raises(ServeError, match=r"not JSON 3 times; the last ends with .*version"):
        perf_analyzer.export(["-m", "tensorrt_llm"])


def test_a_response_that_ends_inside_a_character_is_read(exports: list[str]) -> None:
    exports.append('{"experiments": [{"text_output": "\x01"}]}')
    assert perf_analyzer.export([]) == [{"text_output": "\x01"}]


def test_the_output_of_a_failed_run_is_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = CompletedProcess([], 99, "", "cannot connect\nusage: perf_analyzer")
    monkeypatch.setattr(perf_analyzer, "run", lambda arguments, timeout: failed)
    with pytest.raises(ServeError, match="ended with 99:\ncannot connect"):
        perf_analyzer.export([])

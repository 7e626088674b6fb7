"""What is written for perf_analyzer, and what is read from what it exports."""

from __future__ import annotations

import json
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace

import pytest

from inflight.bench.analyzer import analyze, read_profile, write_input
from inflight.bench.measuring.workload import BenchRequest
from inflight.server import perf_analyzer
from inflight.server.errors import ServeError

FIRST, SECOND = BenchRequest((5, 6, 7), 3), BenchRequest((8, 9), 2)


def record(request: BenchRequest, sent: int, responses: list[tuple[int, int]], text: str = "") -> dict:
    """As perf_analyzer writes one; responses are (time, tokens)."""
    return {
        "timestamp": sent,
        "request_inputs": {
            "streaming": True,
            "request_output_len": request.num_output_tokens,
            "input_ids": list(request.prompt),
            "end_id": -1,
        },
        "response_timestamps": [time for time, _ in responses],
        "response_outputs": [{"sequence_length": count, "text_output": text} for _, count in responses],
    }


def profile(*records: dict) -> str:
    experiment = {"experiment": {"mode": "concurrency", "value": 2}, "requests": list(records)}
    return json.dumps({"experiments": [experiment], "version": "2.50.0"})


def test_the_input_has_every_request_once_with_its_lengths(tmp_path):
    path = tmp_path / "input.json"
    write_input(path, [FIRST, SECOND])
    first, second = json.loads(path.read_text())["data"]
    assert first["input_ids"] == {"content": [5, 6, 7], "shape": [3]}
    assert (second["request_output_len"], second["streaming"], second["end_id"]) == ([2], [True], [-1])


def test_times_are_those_of_responses_with_tokens():
    text = profile(
        record(SECOND, 100, [(150, 1), (160, 1)]), record(FIRST, 110, [(170, 2), (190, 1), (191, 0)])
    )
    second, first = (answer.timeline for answer in read_profile(text, [FIRST, SECOND]))
    assert (second.num_prompt_tokens, second.sent_ns, second.responses_ns) == (2, 100, (150, 160))
    assert (first.num_prompt_tokens, first.num_output_tokens, first.responses_ns) == (3, 3, (170, 190))


def test_text_that_is_cut_within_a_character_is_read_all_the_same():
    text = profile(record(FIRST, 0, [(1, 3)], text="\x01")).replace("\\u0001", "\x01")
    assert len(read_profile(text, [FIRST])) == 1


@pytest.mark.parametrize(
    "records",
    [
        [record(FIRST, 0, [(1, 3)])],
        [record(FIRST, 0, [(1, 3)]), record(FIRST, 0, [(1, 3)])],
        [record(FIRST, 0, [(1, 3)]), record(SECOND, 0, [(1, 2)]), record(SECOND, 0, [(1, 2)])],
    ],
    ids=["one is missing", "one in the place of another", "one too many"],
)
def test_requests_that_did_not_go_exactly_once_are_noticed(records):
    with pytest.raises(ServeError, match="was to send 2 requests once"):
        read_profile(profile(*records), [FIRST, SECOND])


def test_tokens_that_are_missing_are_noticed():
    with pytest.raises(ServeError, match="a request for 3 tokens was given 2"):
        read_profile(profile(record(FIRST, 0, [(1, 2)])), [FIRST])


@pytest.mark.parametrize(("num_cut", "is_answered"), [(0, True), (2, True), (3, False)])
def test_requests_are_sent_again_where_the_export_is_cut(
    num_cut: int, is_answered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = profile(record(FIRST, 0, [(1, 3)]))
    exports = iter(["", whole[:-9], whole[:20]][:num_cut] + [whole])

    def run(arguments: list[str], timeout: float) -> CompletedProcess[str]:
        Path(arguments[arguments.index("--profile-export-file") + 1]).write_text(next(exports))
        return CompletedProcess(arguments, 0, "", "")

    monkeypatch.setattr(perf_analyzer, "run", run)
    server = SimpleNamespace(grpc="127.0.0.1:1")
    if is_answered:
        assert [answer.times_ns for answer in analyze(server, [FIRST], 1)] == [(1,)]
    else:
        with pytest.raises(ServeError, match="is no JSON"):
            analyze(server, [FIRST], 1)

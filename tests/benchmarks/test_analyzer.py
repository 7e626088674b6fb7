"""The input file written for perf_analyzer, and the figures read from its export."""

from __future__ import annotations

import json

import pytest

from benchmarks.analyzer import read_experiments, write_input
from benchmarks.measuring.workload import BenchRequest
from inflight.server.errors import ServeError

FIRST, SECOND = BenchRequest((5, 6, 7), 3), BenchRequest((8, 9), 2)


def record(request: BenchRequest, sent: int, responses: list[tuple[int, int]]) -> dict:
    """Make a record as perf_analyzer writes it; responses are (time, tokens)."""
    return {
        "timestamp": sent,
        "request_inputs": {
            "streaming": True,
            "request_output_len": request.num_output_tokens,
            "input_ids": list(request.prompt),
            "end_id": -1,
        },
        "response_timestamps": [time for time, _ in responses],
        "response_outputs": [{"sequence_length": count} for _, count in responses],
    }


def experiments(*records: dict) -> list[dict]:
    return [{"experiment": {"mode": "concurrency", "value": 2}, "requests": list(records)}]


def test_the_input_has_every_request_once_with_its_lengths(tmp_path):
    path = tmp_path / "input.json"
    write_input(path, [FIRST, SECOND])
    first, second = json.loads(path.read_text())["data"]
    assert first["input_ids"] == {"content": [5, 6, 7], "shape": [3]}
    assert (second["request_output_len"], second["streaming"], second["end_id"]) == ([2], [True], [-1])


@pytest.mark.smoke
def test_only_responses_with_tokens_have_times():
    exported = experiments(
        record(SECOND, 100, [(150, 1), (160, 1)]), record(FIRST, 110, [(170, 2), (190, 1), (191, 0)])
    )
    second, first = (answer.timeline for answer in read_experiments(exported, [FIRST, SECOND]))
    assert (second.num_prompt_tokens, second.sent_ns, second.responses_ns) == (2, 100, (150, 160))
    assert (first.num_prompt_tokens, first.num_output_tokens, first.responses_ns) == (3, 3, (170, 190))


@pytest.mark.parametrize(
    "records",
    [
        [record(FIRST, 0, [(1, 3)])],
        [record(FIRST, 0, [(1, 3)]), record(FIRST, 0, [(1, 3)])],
        [record(FIRST, 0, [(1, 3)]), record(SECOND, 0, [(1, 2)]), record(SECOND, 0, [(1, 2)])],
    ],
    ids=["one is missing", "one in the place of another", "one too many"],
)
def test_requests_not_sent_exactly_once_are_an_error(records):
    with pytest.raises(ServeError, match="was to send 2 requests once"):
        read_experiments(experiments(*records), [FIRST, SECOND])


def test_missing_tokens_are_an_error():
    with pytest.raises(ServeError, match="a request for 3 tokens was given 2"):
        read_experiments(experiments(record(FIRST, 0, [(1, 2)])), [FIRST])

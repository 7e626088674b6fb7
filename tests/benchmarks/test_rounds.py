"""Measuring engines in turn."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.measuring.report import Resources, Timeline
from benchmarks.measuring.rounds import run_rounds
from benchmarks.measuring.workload import BenchRequest

from .factories import SETUP

MS = 1_000_000
REQUESTS = [BenchRequest((1,) * 10, 2)] * 3


class FakeProbe:
    def __init__(self) -> None:
        self._speed = 0.0

    def gb_per_s(self) -> float:
        self._speed += 1
        return self._speed


class FakeEngine:
    """Takes given milliseconds per run, and a byte of memory more each time."""

    def __init__(self, name: str, calls: list[tuple[str, int, int]], *runs_ms: int) -> None:
        self.name = name
        self._calls, self._runs_ms, self._num_runs = calls, iter((1, *runs_ms)), 0

    def run(self, requests, concurrency):
        self._calls.append((self.name, len(requests), concurrency))
        self._num_runs += 1
        end_ns = next(self._runs_ms) * MS
        return [Timeline(10, 2, 0, (end_ns // 2, end_ns)) for _ in requests]

    def resources(self):
        return Resources(1.0, self._num_runs)


def test_engines_take_turns_after_the_warm_up():
    calls = []
    engines = [FakeEngine("a", calls, 5, 5), FakeEngine("b", calls, 5, 5)]
    run_rounds(engines, REQUESTS, replace(SETUP, rounds=2, concurrency=3), FakeProbe())
    assert calls == [("a", 3, 3), ("b", 3, 3)] * 3


def test_lone_requests_warm_up_with_one_request():
    calls = []
    run_rounds([FakeEngine("a", calls, 5)], REQUESTS, replace(SETUP, rounds=1, concurrency=1), FakeProbe())
    assert calls == [("a", 1, 1), ("a", 3, 1)]


@pytest.mark.smoke
def test_medians_exclude_the_warm_up_and_memory_is_the_highest(capsys):
    engine = FakeEngine("a", [], 100, 400, 200)
    (figures,) = run_rounds([engine], REQUESTS, replace(SETUP, rounds=3, concurrency=3), FakeProbe())
    assert figures.output_tokens_per_s == 6 / 0.2
    assert figures.resources.peak_rss_bytes == 4
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["round"], line["output_tokens_per_s"]) for line in lines] == [(1, 60), (2, 15), (3, 30)]


def test_memory_bandwidth_is_measured_right_before_and_after_each_run(capsys):
    run_rounds([FakeEngine("a", [], 5, 5)], REQUESTS, replace(SETUP, rounds=2, concurrency=3), FakeProbe())
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["memory_gb_per_s"] for line in lines] == [
        {"before": 1, "after": 2},
        {"before": 3, "after": 4},
    ]


def test_a_single_round_of_a_single_engine_prints_nothing(capsys):
    run_rounds([FakeEngine("a", [], 5)], REQUESTS, replace(SETUP, rounds=1, concurrency=3), FakeProbe())
    assert not capsys.readouterr().out

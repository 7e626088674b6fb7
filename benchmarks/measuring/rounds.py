"""Measure engines alternately (A B A B), with the same requests each time, together with the memory bandwidth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from benchmarks.measuring.bandwidth import Probe
from benchmarks.measuring.report import (
    Bandwidth,
    Figures,
    Resources,
    Timeline,
    medians,
    summarize,
    to_line,
)
from benchmarks.measuring.setup import Setup
from benchmarks.measuring.workload import BenchRequest, warm_up


class BenchedEngine(Protocol):
    """A loaded engine, in this process or in a server.

    Attributes:
        name: Name of its figures.
    """

    name: str

    def run(self, requests: Sequence[BenchRequest], concurrency: int) -> list[Timeline]:
        """Send all requests, `concurrency` at a time, and wait until all have ended; return their timelines."""
        ...

    def resources(self) -> Resources:
        """Return the engine's load time, and its peak memory so far."""
        ...


def run_rounds(
    engines: Sequence[BenchedEngine], requests: Sequence[BenchRequest], setup: Setup, probe: Probe
) -> list[Figures]:
    """Warm up all engines, measure each `setup.rounds` times, and return each engine's medians and peak memory."""
    for engine in engines:
        engine.run(warm_up(requests, setup.concurrency), setup.concurrency)
    rounds: list[list[Figures]] = [[] for _ in engines]
    for number in range(setup.rounds):
        for engine, figures in zip(engines, rounds):
            figures.append(_measure(engine, requests, setup, probe))
            if setup.rounds * len(engines) > 1:
                print(to_line(engine.name, figures[-1], setup, round=number + 1), flush=True)
    return [medians(figures) for figures in rounds]


def _measure(engine: BenchedEngine, requests: Sequence[BenchRequest], setup: Setup, probe: Probe) -> Figures:
    before = probe.gb_per_s()
    timelines = engine.run(requests, setup.concurrency)
    bandwidth = Bandwidth(before, probe.gb_per_s())
    return summarize(timelines, setup.shape, setup.concurrency == 1, bandwidth, engine.resources())

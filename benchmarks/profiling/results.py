"""Results of `profile`, and their output as JSON and Markdown tables."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.measuring.report import Percentiles, Timeline
from benchmarks.measuring.setup import Setup
from benchmarks.profiling.stopwatch import Iteration, Stage
from inflight.core.report.stats import IterationCounts

_DECIMALS = 4


@dataclass(frozen=True, slots=True)
class IterationCost:
    """Stages of an iteration with a fixed number of generation rows and no context chunks.

    Attributes:
        rows: Number of rows.
        iterations: Number of measured iterations.
        stages_ms: Median milliseconds by stage.
    """

    rows: int
    iterations: int
    stages_ms: tuple[float, ...]

    @classmethod
    def of(cls, rows: int, iterations: Sequence[Iteration]) -> IterationCost:
        """Return the cost of those iterations that have `rows` generation rows and no context chunks."""
        wanted = [each for each in iterations if each.num_generation == rows and not each.num_chunks]
        stages_ms = (1e-6 * statistics.median(each.stages_ns[stage] for each in wanted) for stage in Stage)
        return cls(rows, len(wanted), tuple(stages_ms))

    @property
    def total_ms(self) -> float:
        """Return the milliseconds of all stages."""
        return sum(self.stages_ms)

    @property
    def outside_ms(self) -> float:
        """Return the milliseconds of all stages except the forward pass."""
        return sum(self.stages_ms[stage] for stage in Stage if stage is not Stage.FORWARD)

    @property
    def share_outside(self) -> float:
        """Return the fraction of an iteration outside of the forward pass."""
        return self.outside_ms / self.total_ms


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """Figures of the workload with a number of requests in flight.

    Attributes:
        concurrency: Number of requests in flight.
        requests: Number of requests sent.
        output_tokens_per_s: Output tokens per second, from the first request sent to the last response.
        ttft_ms: Time to first token.
        itl_ms: Gaps between the responses of a request.
    """

    concurrency: int
    requests: int
    output_tokens_per_s: float
    ttft_ms: Percentiles
    itl_ms: Percentiles

    @classmethod
    def of(cls, concurrency: int, timelines: Sequence[Timeline]) -> LoadPoint:
        """Compute the figures from the times of all requests."""
        num_tokens = sum(timeline.num_output_tokens for timeline in timelines)
        return cls(
            concurrency,
            len(timelines),
            num_tokens / duration_s(timelines),
            Percentiles.of([timeline.ttft_ms for timeline in timelines]),
            Percentiles.of([gap for timeline in timelines for gap in timeline.gaps_ms]),
        )


@dataclass(frozen=True, slots=True)
class CacheSample:
    """State of the KV cache after an iteration.

    Attributes:
        time_s: Seconds since the first sample.
        used_blocks: Number of blocks that running requests hold.
        running, waiting: Numbers of running and waiting requests.
    """

    time_s: float
    used_blocks: int
    running: int
    waiting: int

    @classmethod
    def of(cls, stats: IterationCounts, since_ns: int) -> CacheSample:
        """Make a sample from an iteration's statistics. Every request must have one sequence."""
        waiting = stats.num_waiting_requests
        return cls(1e-9 * since_ns, stats.num_used_blocks, stats.num_active_requests - waiting, waiting)


@dataclass(frozen=True, slots=True)
class CacheRun:
    """One run of the workload in a KV cache that is too small for all of it.

    Attributes:
        requests_per_s: Rate of arrival; None: all requests at once.
        blocks: Number of blocks in the cache.
        samples: Samples in order of time.
    """

    requests_per_s: float | None
    blocks: int
    samples: tuple[CacheSample, ...]


@dataclass(frozen=True, slots=True)
class Profile:
    """All results of `profile`."""

    iterations: tuple[IterationCost, ...]
    load: tuple[LoadPoint, ...]
    cache: tuple[CacheRun, ...]
    setup: Setup


def duration_s(timelines: Sequence[Timeline]) -> float:
    """Return the seconds from the first request sent to the last response."""
    first_ns = min(timeline.sent_ns for timeline in timelines)
    return 1e-9 * (max(timeline.responses_ns[-1] for timeline in timelines) - first_ns)


def to_json(profile: Profile) -> str:
    """Return the profile as one JSON object."""
    stages = [stage.name.lower() for stage in Stage]
    iterations = [
        asdict(cost) | {"stages_ms": dict(zip(stages, cost.stages_ms)), "share_outside": cost.share_outside}
        for cost in profile.iterations
    ]
    return json.dumps(_rounded({"bench": "profile", **asdict(profile), "iterations": iterations}))


def to_markdown(profile: Profile) -> str:
    """Return a table of the iterations, and a table of the load."""
    return "\n\n".join((_iteration_table(profile.iterations), _load_table(profile.load)))


def _iteration_table(costs: Sequence[IterationCost]) -> str:
    outside = [stage for stage in Stage if stage is not Stage.FORWARD]
    header = ["rows", "iteration", "forward", *(stage.name.lower() for stage in outside), "outside"]
    rows = [
        [
            str(cost.rows),
            f"{cost.total_ms:.1f} ms",
            f"{cost.stages_ms[Stage.FORWARD]:.1f} ms",
            *(f"{cost.stages_ms[stage]:.2f}" for stage in outside),
            f"{cost.outside_ms:.2f} ms, {cost.share_outside:.1%}",
        ]
        for cost in costs
    ]
    return _table(header, rows)


def _load_table(points: Sequence[LoadPoint]) -> str:
    header = ["in flight", "output tokens/s", "TTFT p50", "p99", "ITL p50", "p99"]
    rows = [
        [str(point.concurrency), f"{point.output_tokens_per_s:.0f}"]
        + [
            f"{value:.{1 if value < 100 else 0}f} ms"
            for each in (point.ttft_ms, point.itl_ms)
            for value in (each.p50, each.p99)
        ]
        for point in points
    ]
    return _table(header, rows)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return round(value, _DECIMALS) if isinstance(value, float) else value

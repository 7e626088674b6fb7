"""What the batcher observed since it started, as counters and histograms: what Prometheus will be told.

Written by the scheduler on the loop thread, in bulk where rows are many; `snapshot` makes a frozen copy for a
thread that publishes. Everything only grows. Times in seconds, as Prometheus wants them. Pure.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from inflight.core.request.stop import FinishReason

SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
    120.0,
)  # fmt: skip
TOKENS = (1, 10, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)

_NS = 1e-9


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """A histogram at one moment.

    Attributes:
        bounds: Upper bounds of the buckets, ascending; a last one without a bound follows.
        counts: Observations per bucket, len(bounds) + 1 of them; not cumulative.
        total: Sum of all observed values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def num_observations(self) -> int:
        """Over all buckets."""
        return sum(self.counts)


class Histogram:
    """Counts of observed values by bucket; a value equal to a bound belongs to it, as in Prometheus."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Count `value`, `count` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._total += value * count

    def snapshot(self) -> HistogramSnapshot:
        """A frozen copy."""
        return HistogramSnapshot(self._bounds, tuple(self._counts), self._total)


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """ServiceMetrics at one moment; the same names."""

    time_to_first_token: HistogramSnapshot
    inter_token_latency: HistogramSnapshot
    queue_time: HistogramSnapshot
    end_to_end: HistogramSnapshot
    prompt_tokens: HistogramSnapshot
    output_tokens: HistogramSnapshot
    cancel_to_free: HistogramSnapshot
    finished: dict[FinishReason, int]
    failed: dict[str, int]
    num_preemptions: int
    num_hit_tokens: int
    num_missed_tokens: int


@dataclass(slots=True)
class ServiceMetrics:
    """The counters.

    Attributes:
        time_to_first_token: Seconds from arrival to a request's first token.
        inter_token_latency: Seconds between the iterations that gave a sequence tokens.
        queue_time: Seconds from arrival to a request's first iteration.
        end_to_end: Seconds from arrival to the final response.
        prompt_tokens: Prompt tokens of ended requests.
        output_tokens: Generated tokens of ended sequences; of a beam search, steps.
        cancel_to_free: Seconds from a front end's stop to the moment slots and blocks were free.
        finished: Ended sequences by reason.
        failed: Requests that ended with an error, refused ones included, by its Triton code.
        num_preemptions: Pauses.
        num_hit_tokens, num_missed_tokens: Tokens of full blocks that admissions found in the KV cache, or looked
            for in vain; of prompts, and of what had been generated before a pause.
    """

    time_to_first_token: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    inter_token_latency: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    queue_time: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    end_to_end: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    prompt_tokens: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    output_tokens: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    cancel_to_free: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    finished: dict[FinishReason, int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    num_preemptions: int = 0
    num_hit_tokens: int = 0
    num_missed_tokens: int = 0

    def snapshot(self) -> MetricsSnapshot:
        """A frozen copy."""
        return MetricsSnapshot(
            time_to_first_token=self.time_to_first_token.snapshot(),
            inter_token_latency=self.inter_token_latency.snapshot(),
            queue_time=self.queue_time.snapshot(),
            end_to_end=self.end_to_end.snapshot(),
            prompt_tokens=self.prompt_tokens.snapshot(),
            output_tokens=self.output_tokens.snapshot(),
            cancel_to_free=self.cancel_to_free.snapshot(),
            finished=dict(self.finished),
            failed=dict(self.failed),
            num_preemptions=self.num_preemptions,
            num_hit_tokens=self.num_hit_tokens,
            num_missed_tokens=self.num_missed_tokens,
        )


def seconds(duration_ns: int) -> float:
    """Nanoseconds as seconds."""
    return duration_ns * _NS

"""Reports of past iterations, kept until they are fetched, and present metrics; for this process or another one.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from inflight.core.kv.kv_events import KvEvent
from inflight.core.report.metrics import MetricsSnapshot
from inflight.core.report.stats import IterationCounts, KeptIteration, MemoryUsage, RequestCountsOfIteration


class ReportKind(Enum):
    """A kind of report: statistics of iterations, statistics of their requests, events of the KV cache, or
    the present statistics and metrics."""

    ITERATIONS = "iterations"
    REQUESTS = "requests"
    KV_EVENTS = "kv_events"
    METRICS = "metrics"


@dataclass(frozen=True, slots=True)
class Reports:
    """The reports since the last fetch, oldest first; only reports of the requested kind.

    Attributes:
        iterations: Statistics of iterations.
        requests: Statistics of every request, by iteration.
        kv_events: Changes to the content of KV blocks.
        metrics: The present statistics and metrics; None if the loop does not report them in time.
        memory: Current memory of the engine's process; only set with `iterations` and `metrics`.
    """

    iterations: tuple[KeptIteration, ...] = ()
    requests: tuple[RequestCountsOfIteration, ...] = ()
    kv_events: tuple[KvEvent, ...] = ()
    metrics: tuple[IterationCounts, MetricsSnapshot] | None = None
    memory: MemoryUsage = field(default_factory=MemoryUsage)

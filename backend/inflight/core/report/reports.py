"""What is kept of past iterations until somebody fetches it, in this process or in another. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from inflight.core.kv.kv_events import KvEvent
from inflight.core.report.stats import KeptIteration, MemoryUsage, RequestStatsPerIteration


class ReportKind(Enum):
    """What can be fetched: the statistics of iterations, those of their requests, and events of the KV cache."""

    ITERATIONS = "iterations"
    REQUESTS = "requests"
    KV_EVENTS = "kv_events"


@dataclass(frozen=True, slots=True)
class Reports:
    """What was kept since it was fetched last, oldest first; of the kind asked for alone.

    Attributes:
        iterations: Statistics of iterations.
        requests: Statistics of every request, by iteration.
        kv_events: What has happened to the content of KV blocks.
        memory: What the engine's process holds now, with `iterations`.
    """

    iterations: tuple[KeptIteration, ...] = ()
    requests: tuple[RequestStatsPerIteration, ...] = ()
    kv_events: tuple[KvEvent, ...] = ()
    memory: MemoryUsage = field(default_factory=MemoryUsage)

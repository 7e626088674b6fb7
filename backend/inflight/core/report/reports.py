"""Reports of past iterations, kept until they are fetched, by this process or another one. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from inflight.core.kv.kv_events import KvEvent
from inflight.core.report.stats import KeptIteration, MemoryUsage, RequestCountsOfIteration


class ReportKind(Enum):
    """A kind of report: statistics of iterations, statistics of their requests, or events of the KV cache."""

    ITERATIONS = "iterations"
    REQUESTS = "requests"
    KV_EVENTS = "kv_events"


@dataclass(frozen=True, slots=True)
class Reports:
    """The reports since the last fetch, oldest first; only reports of the requested kind.

    Attributes:
        iterations: Statistics of iterations.
        requests: Statistics of every request, by iteration.
        kv_events: Changes to the content of KV blocks.
        memory: Current memory of the engine's process; only set with `iterations`.
    """

    iterations: tuple[KeptIteration, ...] = ()
    requests: tuple[RequestCountsOfIteration, ...] = ()
    kv_events: tuple[KvEvent, ...] = ()
    memory: MemoryUsage = field(default_factory=MemoryUsage)

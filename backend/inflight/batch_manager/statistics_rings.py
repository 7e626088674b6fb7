"""The statistics of the last iterations, kept until somebody fetches them.

Owns two rings of frozen values: one of iterations and one of what every request did in them. The loop thread adds;
any thread reads, and makes JSON on its own time. Does not know what the numbers mean.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

from inflight.core.report.stats import IterationStats, MemoryUsage, RequestStats, RequestStatsPerIteration

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class KeptIteration:
    """One iteration's statistics, and when they were taken in seconds since the epoch."""

    stats: IterationStats
    wall_clock_s: float

    def executor_fields(self, memory: MemoryUsage | None = None) -> dict[str, object]:
        """The Executor's `IterationStats`; memory, if it is given, is that of now."""
        return self.stats.executor_fields(self.wall_clock_s, memory)


class StatisticsRings:
    """As the Executor keeps them: so many, and the oldest give way.

    Args:
        max_iterations: Iterations to keep; 0 keeps none.
        max_request_iterations: Iterations to keep the statistics of every request of; 0 keeps none.
        clock_s: Seconds since the epoch; injected by tests.
    """

    def __init__(
        self,
        max_iterations: int = 1000,
        max_request_iterations: int = 0,
        clock_s: Callable[[], float] = time.time,
    ) -> None:
        self._iterations: _Ring[KeptIteration] = _Ring(max_iterations)
        self._requests: _Ring[RequestStatsPerIteration] = _Ring(max_request_iterations)
        self._clock_s = clock_s
        self._lock = threading.Lock()

    @property
    def is_on(self) -> bool:
        """Whether anything is kept."""
        return self._iterations.size > 0 or self.wants_requests

    @property
    def wants_requests(self) -> bool:
        """Whether statistics of every request are kept: making them takes time with every request."""
        return self._requests.size > 0

    def add(self, stats: IterationStats, request_stats: tuple[RequestStats, ...] = ()) -> None:
        """Keep one iteration's. On the loop thread."""
        kept = KeptIteration(stats, self._clock_s())
        with self._lock:
            self._iterations.add(kept)
            if self.wants_requests:
                self._requests.add(RequestStatsPerIteration(stats.iteration, request_stats))

    def latest(self) -> list[KeptIteration]:
        """Those kept since the last call, oldest first: the Executor's `getLatestIterationStats`."""
        with self._lock:
            return self._iterations.take_new()

    def latest_requests(self) -> list[RequestStatsPerIteration]:
        """The same of requests: the Executor's `getLatestRequestStats`."""
        with self._lock:
            return self._requests.take_new()

    def peek(self, count: int) -> list[KeptIteration]:
        """The last `count`, oldest first; for `latest` they are as new as before."""
        with self._lock:
            return self._iterations.last(count)

    def peek_requests(self, count: int) -> list[RequestStatsPerIteration]:
        """The same of requests."""
        with self._lock:
            return self._requests.last(count)


class _Ring(Generic[_T]):
    """The last `size` of what was added, and which of it nobody has taken yet. Not for two threads at once."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._kept: deque[_T] = deque(maxlen=size)
        self._num_new = 0

    def add(self, value: _T) -> None:
        self._kept.append(value)
        self._num_new = min(self._num_new + 1, self.size)

    def take_new(self) -> list[_T]:
        values = self.last(self._num_new)
        self._num_new = 0
        return values

    def last(self, count: int) -> list[_T]:
        first = max(0, len(self._kept) - max(0, count))
        return list(islice(self._kept, first, None))

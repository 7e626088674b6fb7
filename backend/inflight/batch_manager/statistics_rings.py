"""The statistics of the last iterations. The loop adds entries; any thread reads them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Generic, TypeVar

from inflight.core.report.stats import (
    IterationCounts,
    KeptIteration,
    RequestCounts,
    RequestCountsOfIteration,
    kv_changes,
)

_T = TypeVar("_T")


class StatisticsRings:
    """The statistics of recent iterations, and of every request in them, as kept for the Executor API.

    Only the loop thread may add. Any thread may read; converting to JSON is left to the thread that reads.

    Args:
        max_iterations: Number of iterations to keep; 0 keeps none.
        max_request_iterations: Number of iterations whose statistics of every request are kept; 0 keeps none.
        clock_s: Seconds since the epoch; injected by tests.
        block_bytes: Size of a KV block on this rank's device; 0: unknown.
    """

    def __init__(
        self,
        max_iterations: int = 1000,
        max_request_iterations: int = 0,
        clock_s: Callable[[], float] = time.time,
        block_bytes: int = 0,
    ) -> None:
        self._iterations: _Ring[KeptIteration] = _Ring(max_iterations)
        self._requests: _Ring[RequestCountsOfIteration] = _Ring(max_request_iterations)
        self._last: IterationCounts | None = None
        self._clock_s = clock_s
        self._block_bytes = block_bytes
        self._lock = threading.Lock()

    @property
    def is_on(self) -> bool:
        """Whether any statistics are kept."""
        return self._iterations.size > 0 or self.wants_requests

    @property
    def wants_requests(self) -> bool:
        """Whether statistics of every request are kept; they take time in proportion to the number of requests."""
        return self._requests.size > 0

    def add(self, stats: IterationCounts, request_stats: tuple[RequestCounts, ...] = ()) -> None:
        """Add the statistics of one iteration. Loop thread."""
        entry = KeptIteration(stats, self._clock_s(), kv_changes(stats, self._last, self._block_bytes))
        self._last = stats
        with self._lock:
            self._iterations.add(entry)
            if self.wants_requests:
                self._requests.add(RequestCountsOfIteration(stats.iteration, request_stats))

    def latest(self) -> list[KeptIteration]:
        """Return the statistics since the last call, oldest first, as the Executor's `getLatestIterationStats`."""
        with self._lock:
            return self._iterations.new_values()

    def latest_requests(self) -> list[RequestCountsOfIteration]:
        """Return the request statistics since the last call, oldest first, as the Executor's
        `getLatestRequestStats`."""
        with self._lock:
            return self._requests.new_values()

    def peek(self, count: int) -> list[KeptIteration]:
        """Return the last `count` statistics, oldest first; `latest` will still return them."""
        with self._lock:
            return self._iterations.last(count)

    def peek_requests(self, count: int) -> list[RequestCountsOfIteration]:
        """Return the last `count` request statistics, oldest first; `latest_requests` will still return them."""
        with self._lock:
            return self._requests.last(count)


class _Ring(Generic[_T]):
    """The last `size` values, and how many of them were added since `new_values`. Not thread-safe."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._kept: deque[_T] = deque(maxlen=size)
        self._num_new = 0

    def add(self, value: _T) -> None:
        self._kept.append(value)
        self._num_new = min(self._num_new + 1, self.size)

    def new_values(self) -> list[_T]:
        values = self.last(self._num_new)
        self._num_new = 0
        return values

    def last(self, count: int) -> list[_T]:
        first = max(0, len(self._kept) - max(0, count))
        return list(islice(self._kept, first, None))

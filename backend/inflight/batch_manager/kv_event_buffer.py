"""A queue of KV cache events between the loop and the threads that fetch them.

The buffer keeps a bounded number of events until they are fetched; if there are too many, the oldest are dropped.
Only the loop thread may add events. Any thread may fetch them, or wait for them. Specification: the Executor's
`KVCacheEventManager`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable

from inflight.core.kv.kv_events import KvEvent


class KvEventBuffer:
    """A bounded queue of events.

    Args:
        max_events: Maximum number of events to keep.
    """

    def __init__(self, max_events: int) -> None:
        self._events: deque[KvEvent] = deque(maxlen=max_events)
        self._changed = threading.Condition()
        self._is_closed = False

    def add(self, events: Iterable[KvEvent]) -> None:
        """Add events, and wake waiting threads. Loop thread."""
        with self._changed:
            self._events.extend(events)
            self._changed.notify_all()

    def take(self, timeout_s: float | None = None) -> list[KvEvent]:
        """Wait for events and take all of them, oldest first.

        Args:
            timeout_s: How long to wait in seconds; None: until there are events.

        Returns:
            The events; empty if the time is up or the loop has ended.
        """
        with self._changed:
            self._changed.wait_for(lambda: bool(self._events) or self._is_closed, timeout_s)
            events = list(self._events)
            self._events.clear()
            return events

    def close(self) -> None:
        """Wake all waiting threads; later calls of `take` do not wait. Remaining events can still be taken."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

"""Events of the KV cache between the loop, which makes them, and whoever fetches them.

The buffer owns the events that nobody has fetched yet; where they are too many, the oldest are dropped. The loop
thread adds; any thread fetches, and may wait for them. Specification: the Executor's `KVCacheEventManager`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable

from inflight.core.kv.kv_events import KvEvent


class KvEventBuffer:
    """A queue of events with a bound.

    Args:
        max_events: Most events that are kept.
    """

    def __init__(self, max_events: int) -> None:
        self._events: deque[KvEvent] = deque(maxlen=max_events)
        self._changed = threading.Condition()
        self._is_closed = False

    def add(self, events: Iterable[KvEvent]) -> None:
        """Add events, and wake whoever waits for them. Loop thread."""
        with self._changed:
            self._events.extend(events)
            self._changed.notify_all()

    def take(self, timeout_s: float | None = None) -> list[KvEvent]:
        """Wait for events and take all there are, oldest first.

        Args:
            timeout_s: How long to wait; None: until there are some.

        Returns:
            The events; none if the time is up or the loop has ended.
        """
        with self._changed:
            self._changed.wait_for(lambda: bool(self._events) or self._is_closed, timeout_s)
            events = list(self._events)
            self._events.clear()
            return events

    def close(self) -> None:
        """Let nobody wait any more. What is here can still be taken."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

"""Notices clients that cancelled or went away, by asking Triton about one after the other.

Owns how often and how hard it asks: pb_utils gives no notice, a question is a round trip that competes with the
responses, so rounds start at most once a period and asking takes at most a share of this thread's time. With
nothing in flight the thread sleeps. Does not know what cancelling does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from inflight.triton.in_flight import InFlight, InFlightRequest

_SHARE = 0.2
# Sleeping is only worth it, and only accurate enough, for about a millisecond.
_SHORTEST_PAUSE_S = 0.001


class CancellationWatch:
    """Asks in rotation and cancels whose client is gone."""

    def __init__(
        self,
        in_flight: InFlight,
        period_s: float,
        pause: Callable[[float], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        in_flight: The requests to ask about.
        period_s: Shortest time between the starts of two rounds.
        pause: Waits that many seconds, less when this is to end.
        clock: Monotonic seconds.
        """
        self._in_flight = in_flight
        self._period_s = period_s
        self._pause = pause
        self._clock = clock

    def run(self) -> None:
        """Rounds until the registry is closed."""
        while entries := self._in_flight.wait_for_requests():
            self.round(entries)

    def round(self, entries: Sequence[InFlightRequest]) -> None:
        """Ask about each once; takes a period at least, and as long as it needs to keep to its share."""
        started = self._clock()
        asking = 0.0
        for entry in entries:
            before = self._clock()
            if entry.stream.is_cancelled():
                self._in_flight.cancel(entry)
            asking += self._clock() - before
            owed = asking / _SHARE - (self._clock() - started)
            if owed >= _SHORTEST_PAUSE_S:
                self._pause(owed)
        self._pause(max(0.0, self._period_s - (self._clock() - started)))


class CancellationWatcher:
    """The thread of a CancellationWatch, from construction to `close`."""

    def __init__(self, in_flight: InFlight, period_s: float) -> None:
        self._closing = threading.Event()
        watch = CancellationWatch(in_flight, period_s, self._closing.wait)
        self._thread = threading.Thread(target=watch.run, name="inflight-cancellation", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; the registry must be closed before."""
        self._closing.set()
        self._thread.join()

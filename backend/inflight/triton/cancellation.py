"""Notices clients that cancelled or went away, by asking Triton about one after the other.

Owns how often and how hard it asks: pb_utils gives no notice, and a question is a round trip that competes with
the responses. So rounds start at most once a period, and asking takes a small share of this thread's time, or most
of it where a round would take too long otherwise. Questions come in bursts: each passes through four
threads, which are quick about the next one if the model has not been on their processors in between. With nothing
in flight the thread sleeps. Does not know what cancelling does.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from inflight.serving.background import give_way
from inflight.serving.in_flight import InFlight, InFlightRequest

_log = logging.getLogger(__name__)
_SHARE = 0.15
_LARGEST_SHARE = 0.8
_BURST = 32
_LONGEST_ROUND_S = 0.15
# Sleeping is only worth it, and only accurate enough, for about a millisecond.
_SHORTEST_PAUSE_S = 0.001


class CancellationWatch:
    """Asks about the requests in flight in rotation, and cancels those whose client is gone.

    Args:
        in_flight: The requests to ask about.
        period_s: Shortest time between the starts of two rounds.
        pause: Waits that many seconds, less when this is to end.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        in_flight: InFlight,
        period_s: float,
        pause: Callable[[float], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._in_flight = in_flight
        self._period_s = period_s
        self._pause = pause
        self._clock = clock

    def run(self) -> None:
        """Ask round after round until the registry admits no more."""
        give_way()
        while entries := self._in_flight.wait_for_requests():
            self.round(entries)

    def round(self, entries: Sequence[InFlightRequest]) -> None:
        """Ask about each request once; takes a period at least, and as long as it needs to keep to its share."""
        started = self._clock()
        asking = 0.0
        for position, entry in enumerate(entries, start=1):
            before = self._clock()
            if entry.stream.is_cancelled():
                _log.debug("request %s: its client is gone", entry)
                self._in_flight.cancel(entry)
            asking += self._clock() - before
            if position % _BURST and position < len(entries):
                continue
            ahead = _due(asking, position / len(entries)) - (self._clock() - started)
            if ahead >= _SHORTEST_PAUSE_S:
                self._pause(ahead)
        self._pause(max(0.0, self._period_s - (self._clock() - started)))


class CancellationWatcher:
    """Runs a CancellationWatch on a thread of its own, from construction to `close`."""

    def __init__(self, in_flight: InFlight, period_s: float) -> None:
        self._closing = threading.Event()
        watch = CancellationWatch(in_flight, period_s, self._closing.wait)
        self._thread = threading.Thread(target=watch.run, name="inflight-cancellation", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; the registry must have stopped admitting before."""
        self._closing.set()
        self._thread.join()


def _due(asking: float, progress: float) -> float:
    """Seconds that this much of a round ought to have taken when `asking` seconds went into questions."""
    return max(min(asking / _SHARE, progress * _LONGEST_ROUND_S), asking / _LARGEST_SHARE)

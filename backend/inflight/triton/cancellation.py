"""Detect clients that cancelled or disconnected, by asking Triton about each request in turn.

pb_utils sends no notification of a cancellation, and each question is a round trip that competes with
responses. This module owns the rate of questions. A round over all requests starts at most once per period.
Questions take a small share of this thread's time, or most of it if a round would otherwise take too long.
They come in bursts: each passes through four threads, which handle the next question quickly if the model has
not used their processors in between. The thread sleeps while nothing is in flight. Does not know what
cancelling does.
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
# Shorter pauses are neither accurate nor worth the cost of sleeping.
_SHORTEST_PAUSE_S = 0.001


class CancellationWatch:
    """Asks Triton about each request in flight in turn, and cancels those whose clients are gone.

    Args:
        in_flight: The requests to ask about.
        period_s: Least number of seconds between the starts of two rounds.
        pause: Sleeps for the given number of seconds, or less if the watch is being closed.
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
        """Run round after round until the registry stops admitting requests."""
        give_way()
        while entries := self._in_flight.wait_for_requests():
            self.round(entries)

    def round(self, entries: Sequence[InFlightRequest]) -> None:
        """Ask about each request once; takes a period, or longer if the share of time demands it."""
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
    """Return the seconds that this part of a round should take, given `asking` seconds of questions."""
    return max(min(asking / _SHARE, progress * _LONGEST_ROUND_S), asking / _LARGEST_SHARE)

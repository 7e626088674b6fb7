"""Detect clients that cancelled or disconnected, by asking Triton about each request in turn.

pb_utils sends no notification of a cancellation, so this module polls `is_cancelled`. Each poll is a round
trip to tritonserver that competes with responses; this module limits their rate. A round polls every request
once and starts at most once per period. Polling takes a small share of this thread's time, or most of its
time if a round would otherwise take too long. Polls are made in bursts: each passes through four threads,
and the next poll is quick while these threads are still on their processors. The thread sleeps while no
request is in flight.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from inflight.serving.background import lower_priority
from inflight.serving.in_flight import InFlight, InFlightRequest

_log = logging.getLogger(__name__)
_SHARE = 0.15
_LARGEST_SHARE = 0.8
_BURST = 32
_LONGEST_ROUND_S = 0.15
# Shorter pauses are neither accurate nor worth the cost of sleeping.
_SHORTEST_PAUSE_S = 0.001


class CancellationWatch:
    """Polls each request in flight in turn, and cancels the requests whose clients are gone.

    Args:
        in_flight: The requests in flight.
        period_s: Least number of seconds between the starts of two rounds.
        pause: Function that sleeps for the given number of seconds, or less if the watch is being closed.
        clock: Monotonic clock, in seconds.
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
        lower_priority()
        while entries := self._in_flight.wait_for_requests():
            self.round(entries)

    def round(self, entries: Sequence[InFlightRequest]) -> None:
        """Poll each request once. Takes one period, or longer to keep within the share of time for polling."""
        started = self._clock()
        asking = 0.0
        for position, entry in enumerate(entries, start=1):
            before = self._clock()
            if entry.stream.is_cancelled():
                _log.debug("request %s: its client is gone", entry, extra=entry.log_extra)
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
        """End the thread. The registry must have stopped admitting requests before this call."""
        self._closing.set()
        self._thread.join()


def _due(asking: float, progress: float) -> float:
    """Return how many seconds the round should have taken so far.

    Args:
        asking: Seconds spent in polls of this round so far.
        progress: Fraction of the round's requests that have been polled.
    """
    return max(min(asking / _SHARE, progress * _LONGEST_ROUND_S), asking / _LARGEST_SHARE)

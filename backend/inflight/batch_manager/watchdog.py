"""The watchdog of the loop: it detects an iteration that does not end, on another thread."""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Run:
    """One iteration; `next_report_s` is the duration in seconds at which the log is written next."""

    iteration: int
    describe: Callable[[], str]
    begun_s: float
    next_report_s: float
    is_reported: bool = False


class Watchdog:
    """Detects an iteration that does not end, and logs the stacks of all threads.

    Owns one daemon thread, which sleeps until an iteration begins and, while iterations run, wakes at most twice
    per timeout. Per iteration the loop thread reads the clock and sets a few attributes; it takes no lock
    except to wake a sleeping thread. The watchdog is independent of requests and devices: the caller of `begin`
    passes a function that describes the iteration. The watchdog cannot run while a native call hangs without
    releasing the GIL.

    Args:
        timeout_s: Duration in seconds after which an iteration is stuck; > 0. The log is written at most half a
            timeout late, and again each time that the duration has doubled.
        hang_timeout_s: Duration in seconds after which an iteration is not expected to end any more; None:
            no limit.
        on_hang: Called once, with a line about an iteration longer than `hang_timeout_s`, on the watchdog's
            thread, at most half a timeout late.
        log: Called with each message, which has several lines.
        clock: Monotonic clock, in seconds.
        wait: Waits for an event for some seconds (None: without limit), and returns whether it is set.
        start: Whether to start the thread; if not, call `check`.
    """

    def __init__(
        self,
        timeout_s: float,
        log: Callable[[str], None] = _log.error,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[threading.Event, float | None], bool] = threading.Event.wait,
        start: bool = True,
        hang_timeout_s: float | None = None,
        on_hang: Callable[[str], None] = lambda line: None,
    ) -> None:
        if not timeout_s > 0:
            raise ValueError(f"timeout_s is {timeout_s}, expected more than 0")
        self._timeout_s = timeout_s
        self._hang_timeout_s = math.inf if hang_timeout_s is None else hang_timeout_s
        self._on_hang = on_hang
        self._period_s = min(timeout_s, self._hang_timeout_s) / 2
        self._log = log
        self._clock = clock
        self._wait = wait
        self._run: _Run | None = None
        self._is_needed = threading.Event()  # cleared by the thread before it sleeps without timeout
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        if start:
            self._thread.start()

    def begin(self, iteration: int, describe: Callable[[], str]) -> None:
        """Record the beginning of an iteration. Loop thread.

        Args:
            iteration: The iteration's number.
            describe: Returns a description of the iteration; called on other threads, and only while it is stuck.
        """
        self._run = _Run(iteration, describe, self._clock(), self._timeout_s)
        # The run is set before the event is checked, as the thread clears the event and then checks for a run
        # again.
        if not self._is_needed.is_set():
            self._is_needed.set()

    def end(self) -> None:
        """Record the end of the iteration, successful or not. Loop thread."""
        run, self._run = self._run, None
        if run is not None and run.is_reported:
            self._log(f"iteration {run.iteration} has ended after {self._clock() - run.begun_s:.1f} s")

    def stuck(self) -> str | None:
        """Return a line about the stuck iteration, with its duration; None if no iteration is stuck. Any
        thread."""
        run = self._run
        if run is None or (seconds := self._clock() - run.begun_s) < self._timeout_s:
            return None
        return _headline(run, seconds)

    def close(self) -> None:
        """End the thread. Idempotent; must not be called on the watchdog's own thread."""
        self._is_closed.set()
        self._is_needed.set()
        if self._thread.is_alive():
            self._thread.join()

    # ---------------------------------------------------------------- the thread

    def _watch(self) -> None:
        while not self._is_closed.is_set():
            if self.check():
                self._wait(self._is_closed, self._period_s)
            else:
                self._wait(self._is_needed, None)

    def check(self) -> bool:
        """Log a stuck iteration if due; return whether to check again soon. If not, the next check is after
        `begin`."""
        if (run := self._run) is None:
            self._is_needed.clear()
            # An iteration that began before this line is found here; a later one sets the event.
            return self._run is not None or self._is_closed.is_set()
        seconds = self._clock() - run.begun_s
        if seconds >= run.next_report_s:
            while run.next_report_s <= seconds:
                run.next_report_s *= 2
            run.is_reported = True
            self._log(f"{_headline(run, seconds)}\n{all_stacks(besides=threading.get_ident())}")
        if seconds >= self._hang_timeout_s:
            self._hang_timeout_s = math.inf  # once
            self._on_hang(_headline(run, seconds))
        return True


def _headline(run: _Run, seconds: float) -> str:
    try:
        described = run.describe()
    except Exception as error:  # the loop may change the described state at any moment
        described = f"cannot be described: {type(error).__name__}: {error}"
    return f"iteration {run.iteration} has been running for {seconds:.1f} s: {described}"


def all_stacks(besides: int | None = None) -> str:
    """Return the Python stacks and names of all threads except `besides`, innermost call last."""
    # The only way to see other threads' stacks; documented in spite of its name.
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, '?')} ({ident}):\n{''.join(traceback.format_stack(frame)).rstrip()}"
        for ident, frame in frames.items()
        if ident != besides
    )

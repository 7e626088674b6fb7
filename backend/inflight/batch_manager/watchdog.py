"""Notices an iteration that does not end, and says in the log what every thread is doing.

Owns one daemon thread, which sleeps until an iteration begins and, while iterations run, wakes at most twice in a
timeout. The loop thread pays a clock read and a few attributes for each iteration, and takes no lock but to wake a
thread that sleeps. Knows neither requests nor a device: whoever begins an iteration can describe it.

Running the watchdog takes the interpreter: a native call that hangs without releasing the GIL silences it.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable

_log = logging.getLogger(__name__)


class _Run:
    """One iteration; `next_report_s` is how long it runs until the log is told (again)."""

    __slots__ = ("begun_s", "describe", "is_reported", "iteration", "next_report_s")

    def __init__(self, iteration: int, describe: Callable[[], str], begun_s: float, timeout_s: float) -> None:
        self.iteration = iteration
        self.describe = describe
        self.begun_s = begun_s
        self.next_report_s = timeout_s
        self.is_reported = False


class Watchdog:
    """Watches one loop.

    Args:
        timeout_s: An iteration that takes longer is stuck, > 0. It is told at most half of it late, and again each
            time that its duration has doubled.
        log: Takes each message, of many lines.
        clock: Seconds, monotonic.
        wait: Waits for an event for so many seconds (None: without end), and returns whether it is set.
        start: Whether to start the thread; without it, call `check`.
    """

    def __init__(
        self,
        timeout_s: float,
        log: Callable[[str], None] = _log.error,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[threading.Event, float | None], bool] = threading.Event.wait,
        start: bool = True,
    ) -> None:
        if not timeout_s > 0:
            raise ValueError(f"timeout_s is {timeout_s}, expected more than 0")
        self._timeout_s = timeout_s
        self._log = log
        self._clock = clock
        self._wait = wait
        self._run: _Run | None = None
        self._is_needed = threading.Event()  # cleared by the thread before it sleeps without a timeout
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        if start:
            self._thread.start()

    def begin(self, iteration: int, describe: Callable[[], str]) -> None:
        """An iteration's work begins. Loop thread.

        Args:
            iteration: Its number.
            describe: Says what is in it; called by other threads, and only while it is stuck.
        """
        self._run = _Run(iteration, describe, self._clock(), self._timeout_s)
        # In this order: the thread clears the event before it looks for a run for the last time.
        if not self._is_needed.is_set():
            self._is_needed.set()

    def end(self) -> None:
        """It has ended, well or badly. Loop thread."""
        run, self._run = self._run, None
        if run is not None and run.is_reported:
            self._log(
                f"iteration {run.iteration} has ended after all, after {self._clock() - run.begun_s:.1f} s"
            )

    def stuck(self) -> str | None:
        """What is stuck, and since when, in one line; None if nothing is. Any thread."""
        run = self._run
        if run is None or (seconds := self._clock() - run.begun_s) < self._timeout_s:
            return None
        return _headline(run, seconds)

    def close(self) -> None:
        """End the thread. Idempotent; not called on the watchdog's own thread."""
        self._is_closed.set()
        self._is_needed.set()
        if self._thread.is_alive():
            self._thread.join()

    # ---------------------------------------------------------------- the thread

    def _watch(self) -> None:
        while not self._is_closed.is_set():
            if self.check():
                self._wait(self._is_closed, self._timeout_s / 2)
            else:
                self._wait(self._is_needed, None)

    def check(self) -> bool:
        """Tell the log if that is due. Returns whether to look again soon; else the next `begin` wakes up."""
        if (run := self._run) is None:
            self._is_needed.clear()
            # One that begins before this line is seen here; a later one sets the event.
            return self._run is not None or self._is_closed.is_set()
        seconds = self._clock() - run.begun_s
        if seconds >= run.next_report_s:
            while run.next_report_s <= seconds:
                run.next_report_s *= 2
            run.is_reported = True
            self._log(f"{_headline(run, seconds)}\n{all_stacks(besides=threading.get_ident())}")
        return True


def _headline(run: _Run, seconds: float) -> str:
    try:
        described = run.describe()
    except Exception as error:  # it reads what another thread owns
        described = f"cannot be described: {type(error).__name__}: {error}"
    return f"iteration {run.iteration} has been running for {seconds:.1f} s: {described}"


def all_stacks(besides: int | None = None) -> str:
    """The Python stacks of all threads but `besides`, with the threads' names, innermost call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, '?')} ({ident}):\n{''.join(traceback.format_stack(frame)).rstrip()}"
        for ident, frame in sys._current_frames().items()
        if ident != besides
    )

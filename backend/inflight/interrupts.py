"""Ends a program without a traceback if it is interrupted (Ctrl-C) before it handles signals.

Standard library only.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Generator
from types import FrameType

INTERRUPTED = 130
"""The exit status after an interrupt."""


def run(main: Callable[[], int]) -> int:
    """Return what `main` returns, or INTERRUPTED. Main thread only."""
    received = note_interrupts()
    try:
        return main()
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception:
        if received:  # a library has made another error of the interrupt
            return INTERRUPTED
        raise


def note_interrupts() -> list[int]:
    """Return a list to which every SIGINT is added from now on, beside raising KeyboardInterrupt.

    The exception alone can be lost: Python ignores what is raised in a callback of its garbage collector, and
    would print a traceback, which is left out from now on.
    """
    received: list[int] = []
    report, earlier = sys.unraisablehook, signal.getsignal(signal.SIGINT)

    def report_others(ignored: sys.UnraisableHookArgs) -> None:
        if not issubclass(ignored.exc_type, KeyboardInterrupt):
            report(ignored)

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if callable(earlier):
            earlier(number, frame)
        raise KeyboardInterrupt

    sys.unraisablehook = report_others
    signal.signal(signal.SIGINT, note)
    return received


@contextlib.contextmanager
def deferred() -> Generator[None]:
    """Hold an interrupt back until the end of the with block, which must be short."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

"""Ends a program without a traceback if it is interrupted (Ctrl-C) before it handles signals.

`python -m inflight.interrupts MODULE ARGUMENT...` runs a module as `python -m MODULE ARGUMENT...` does, and ends
quietly if the module is interrupted, also while it imports other modules. Standard library only.
"""

from __future__ import annotations

import contextlib
import runpy
import signal
import sys
from collections.abc import Callable, Generator
from types import FrameType

INTERRUPTED = 130
"""The exit status after an interrupt."""

_AGAIN_S = 0.01
_SIGNALS = {signal.SIGINT, signal.SIGALRM}
"""The signals that raise KeyboardInterrupt."""


def run(main: Callable[[], int]) -> int:
    """Return what `main` returns, or INTERRUPTED. Main thread only.

    Also handles an interrupt that is held back since before this program's start, as `scripts/lib.sh` does.
    """
    received = note_interrupts()
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        status = main()
    except KeyboardInterrupt:
        return INTERRUPTED
    except (Exception, SystemExit) as error:
        is_end = isinstance(error, SystemExit) and not error.code
        if received and not is_end:  # a library has made another error of the interrupt
            return INTERRUPTED
        raise
    return INTERRUPTED if received and status else status


def note_interrupts() -> list[int]:
    """Return a list to which every SIGINT is added from now on, beside raising KeyboardInterrupt.

    The exception can be lost: Python ignores what is raised in a callback of its garbage collector or of an
    import, and would print a traceback. From now on it prints none, and the exception is raised again in a moment.
    """
    received: list[int] = []
    report, earlier = sys.unraisablehook, signal.getsignal(signal.SIGINT)

    def report_others(ignored: sys.UnraisableHookArgs) -> None:
        if not issubclass(ignored.exc_type, KeyboardInterrupt):
            report(ignored)
        elif signal.getsignal(signal.SIGINT) is note:  # otherwise the program handles signals itself by now
            signal.signal(signal.SIGALRM, note)
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)

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
    """Hold an interrupt back until the end of the with block, which must be short.

    Also for imports of libraries in C++, such as torch, which abort if a part of them is interrupted.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run_module() -> int:
    """Run the module that the command line names, with the rest of the command line; return 0."""
    module = sys.argv.pop(1)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(run(_run_module))

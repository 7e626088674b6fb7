"""Processes whose parents have ended: those of a server come to the launcher, which waits for them when they end.

Otherwise they would come to the machine's first process. In a container that may be the launcher itself, or a
process that never waits for children, and each orphan would stay a zombie. Any thread may call `claim`, the main
thread alone the others.
"""

import contextlib
import ctypes
import os
import subprocess
import threading
import weakref

from inflight.processes import STATE, ProcessId, stat_fields

_PR_SET_CHILD_SUBREAPER = 36
_own: "weakref.WeakSet[subprocess.Popen[bytes]]" = weakref.WeakSet()
_lock = threading.Lock()


def adopt() -> None:
    """Take over, from now on, whatever processes below this one lose their parents."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def claim(process: "subprocess.Popen[bytes]") -> None:
    """Note a process whose exit status its starter waits for: `reap` leaves it alone."""
    with _lock:
        _own.add(process)


def reap() -> None:
    """Wait for those that have ended."""
    with _lock:
        own = {process.pid for process in _own}
    this = ProcessId.of(os.getpid())
    assert this is not None, "this process runs"
    for child in this.children():
        fields = stat_fields(child.pid)
        if child.pid not in own and fields is not None and fields[STATE] == "Z":
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child.pid, os.WNOHANG)

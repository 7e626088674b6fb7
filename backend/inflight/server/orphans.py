"""Adopt the server's processes whose parents have ended, and reap them when they end.

Otherwise these orphans would become children of the init process. In a container, the init process may be
the launcher itself, or a program that never waits for children, so that each orphan would stay a zombie. Any
thread may call `claim`; only the main thread may call the other functions.
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
    """Make this process the parent of all descendants whose parents end from now on."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def claim(process: "subprocess.Popen[bytes]") -> None:
    """Exclude a process from `reap`, because its starter waits for its exit status."""
    with _lock:
        _own.add(process)


def reap() -> None:
    """Wait for the ended children that were not claimed."""
    with _lock:
        own = {process.pid for process in _own}
    this = ProcessId.of(os.getpid())
    assert this is not None, "this process has no entry in /proc"
    for child in this.children():
        fields = stat_fields(child.pid)
        if child.pid not in own and fields is not None and fields[STATE] == "Z":
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child.pid, os.WNOHANG)

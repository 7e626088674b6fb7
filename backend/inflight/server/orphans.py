"""Adopt the server's processes whose parents have ended, and wait for them when they end.

Otherwise they would become children of the machine's first process. In a container that may be the launcher
itself, or a process that never waits for children, and each orphan would stay a zombie. Any thread may call
`claim`; only the main thread may call the other functions.
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
    """Become the parent of all descendants that lose their parents from now on."""
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

"""Processes whose parents have ended: those of a server come to the launcher, which waits for them when they end.

Otherwise they would come to the machine's first process. In a container that may be this one, or one that waits
for nobody: then each would stay behind as a zombie. Main thread.
"""

import contextlib
import ctypes
import os
import subprocess
import weakref

from inflight.processes import STATE, ProcessId, stat_fields

_PR_SET_CHILD_SUBREAPER = 36
_own: "weakref.WeakSet[subprocess.Popen[bytes]]" = weakref.WeakSet()


def adopt() -> None:
    """Take over, from now on, whatever processes below this one lose their parents."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def is_own(process: "subprocess.Popen[bytes]") -> None:
    """Leave a process to whoever has started it here, and wants to know its exit status."""
    _own.add(process)


def reap() -> None:
    """Wait for those that have ended."""
    own = {process.pid for process in list(_own)}
    this = ProcessId.of(os.getpid())
    assert this is not None, "this process runs"
    for child in this.children():
        fields = stat_fields(child.pid)
        if child.pid not in own and fields is not None and fields[STATE] == "Z":
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child.pid, os.WNOHANG)

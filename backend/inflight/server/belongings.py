"""The processes that belong to one running server: tritonserver, its stubs, mpirun and the ranks on this machine.

mpirun gives every rank a process group of its own, and whoever loses its parent gets another; so they are known by
the server's folder, which the environment that they inherit names. Knows nothing of what they do. Any thread.
"""

import os
import signal
from pathlib import Path

from inflight.processes import ProcessId

MARK = "XDG_RUNTIME_DIR"
"""The variable of a server's environment that names its folder. The engine's socket goes there too."""

_END_S = 10.0  # one that hangs in a device driver cannot be ended, nor waited for


def find(folder: Path) -> list[ProcessId]:
    """Those that run."""
    mark = os.fsencode(f"{MARK}={folder}")
    running = [ProcessId.of(int(entry.name)) for entry in Path("/proc").glob("[0-9]*")]
    return [process for process in running if process is not None and mark in _environment(process.pid)]


def end_all(folder: Path) -> None:
    """Kill them, and whatever they start meanwhile; returns when they are gone."""
    while processes := find(folder):
        for process in processes:
            process.signal(signal.SIGKILL)
        if not all(process.wait(_END_S) for process in processes):
            return


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has ended meanwhile, or is another user's
        return []

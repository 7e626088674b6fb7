"""The processes that belong to one running server: tritonserver, its stubs, mpirun and the ranks on this machine.

mpirun gives every rank a process group of its own, and whoever loses its parent gets another; so they are known by
the server's folder, which the environment that they inherit names. Knows nothing of what they do. Any thread.
"""

import contextlib
import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path

MARK = "XDG_RUNTIME_DIR"
"""The variable of a server's environment that names its folder. The engine's socket goes there too."""

_END_S = 10.0  # one that hangs in a device driver cannot be ended, nor waited for


def find(folder: Path) -> list[int]:
    """Process ids of those that run."""
    mark = os.fsencode(f"{MARK}={folder}")
    return [int(entry.name) for entry in Path("/proc").glob("[0-9]*") if mark in _environment(entry)]


def end_all(folder: Path) -> None:
    """Kill them, and whatever they start meanwhile; returns when they are gone."""
    while processes := find(folder):
        with contextlib.ExitStack() as held:
            ends = [end for pid in processes for end in held.enter_context(_opened(pid))]
            for end in ends:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    signal.pidfd_send_signal(end, signal.SIGKILL)
            if not all(_wait(end, _END_S) for end in ends):
                return


def wait_for_end(pid: int, timeout: float | None = None) -> bool:
    """Whether process `pid`, which need not be a child, has ended within `timeout` seconds."""
    with _opened(pid) as ends:
        return all(_wait(end, timeout) for end in ends)


@contextlib.contextmanager
def _opened(pid: int) -> Iterator[list[int]]:
    """A descriptor of this process and no later one, readable once it has ended; none if it has already."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        yield []
        return
    try:
        yield [descriptor]
    finally:
        os.close(descriptor)


def _wait(descriptor: int, timeout: float | None) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if timeout is None else timeout * 1000))


def _environment(process: Path) -> list[bytes]:
    try:
        return (process / "environ").read_bytes().split(b"\0")
    except OSError:  # it has ended meanwhile, or is another user's
        return []

"""Identify processes by number and start time, so that a later process with the same number is a different one.

Imports only the standard library, because programs use it that run beside the server, or before anything is
installed. Linux only; any thread.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import select
import signal
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
"""The kernel's folder about processes."""

STATE, PARENT, MINOR_FAULTS, MAJOR_FAULTS = 0, 1, 7, 9
"""Indices of `stat_fields`."""
_START_TIME = 19
_STOPPED = "T"  # the state of a process; that of a process in a debugger is "t"


_MAX_DESCRIPTORS = 65_536


def raise_descriptor_limit() -> None:
    """Raise this process's limit of file descriptors, which its children inherit, to the hard limit.

    The new limit is capped, because some systems allow a thousand million, and programs that close every
    possible descriptor would take very long.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def exempt_from_collection() -> None:
    """Exempt all existing objects from garbage collection. Called after the model is loaded.

    Otherwise a full collection would visit all objects of torch and transformers, which stops all threads of
    an engine, and so all streams, for 0.2 s.
    """
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def without_collection() -> Generator[None, None, None]:
    """Make no garbage collection in this context.

    For the import of torch, which makes a million objects that all stay: collections would take a sixth of the
    time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


LOOK_S = 10.0
"""Seconds between two looks of a `StopDetector`."""


class StopDetector:
    """Detects that a process was stopped by a signal (SIGSTOP) and was not continued for `LOOK_S` seconds."""

    def __init__(self) -> None:
        self._was_stopped = False

    def look(self, pid: int) -> bool:
        """Return whether the process is stopped now, and was stopped at the look before. Call it every `LOOK_S`
        seconds."""
        fields = stat_fields(pid)
        was_stopped, self._was_stopped = self._was_stopped, fields is not None and fields[STATE] == _STOPPED
        return was_stopped and self._was_stopped


@dataclass(frozen=True, slots=True)
class ProcessId:
    """The identity of a process on this machine, running or not. `str` returns a text that `parse` accepts."""

    pid: int
    start_time: int

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """Return the running process with this number; None if there is none."""
        fields = stat_fields(pid)
        return None if fields is None else cls(pid, int(fields[_START_TIME]))

    @classmethod
    def parse(cls, text: str) -> ProcessId:
        """Return the process whose `str` is `text`."""
        pid, start_time = text.split("-")
        return cls(int(pid), int(start_time))

    def __str__(self) -> str:
        return f"{self.pid}-{self.start_time}"

    def children(self) -> list[ProcessId]:
        """Return the running processes that this process started."""
        stats = ((pid, stat_fields(pid)) for pid in all_pids())
        return [
            ProcessId(pid, int(fields[_START_TIME]))
            for pid, fields in stats
            if fields is not None and int(fields[PARENT]) == self.pid
        ]

    def signal(self, number: int) -> None:
        """Send a signal; do nothing if the process has ended."""
        with self.open_pidfd() as descriptor:
            if descriptor is not None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, number)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the process to end, at most `timeout_s` seconds; return whether it has ended.

        The process need not be a child of this process.
        """
        with self.open_pidfd() as descriptor:
            if descriptor is None:
                return True
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))

    @contextlib.contextmanager
    def open_pidfd(self) -> Generator[int | None, None, None]:
        """Open a pidfd of the process, which is readable once the process has ended.

        Yields None if the process has already ended.
        """
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            yield None
            return
        try:
            yield descriptor if ProcessId.of(self.pid) == self else None
        finally:
            os.close(descriptor)


def this_parent() -> ProcessId:
    """Return this process's parent, which for Triton's stub is tritonserver."""
    while True:
        number = os.getppid()
        if (parent := ProcessId.of(number)) is not None:
            return parent
        # It has just ended, and there is another one now.
        assert number, "the parent is outside of this namespace of processes"


def all_pids() -> list[int]:
    """Return the numbers of all processes of this machine."""
    return [int(entry.name) for entry in PROC.glob("[0-9]*")]


def words_of(pid: int, file: str) -> list[bytes]:
    """Return what a process's file in /proc has, divided at NUL bytes; [b""] if it cannot be read.

    The files `cmdline` and `environ` are empty once the process has ended, and another user's cannot be read.
    """
    try:
        return (PROC / str(pid) / file).read_bytes().split(b"\0")
    except OSError:
        return [b""]


def stat_fields(pid: int) -> list[str] | None:
    """Return a process's fields in /proc/PID/stat after the name; None if there is no such process."""
    try:
        # The name is in brackets and may contain any characters.
        return (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None

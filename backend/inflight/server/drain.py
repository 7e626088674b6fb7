"""Detect whether a server that is shutting down still works on requests.

The embedded tritonserver keeps running while any client holds a gRPC stream open, even if there are no
requests on it. So the launcher must find out in another way when the last request is done. Engines are
notified of the shutdown, and report when they have answered all requests (`EngineDrain`). In a repository
without an engine, models count as idle when they use no processor time (`IdleWatch`).
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from inflight.endpoint.client import drain_engine

# Fraction of processor time up to which stubs count as idle; it allows for the kernel's coarse accounting.
_RESTING_SHARE = 0.01
_RESOLUTION_S = 0.02


class EngineDrain:
    """Notifies a server's engines that the server shuts down, and records when they have answered all requests.

    Triton does not notify a model of its shutdown while requests are in flight, and after the exit timeout
    it would drop them without an answer. An engine that this class notifies ends its requests with
    UNAVAILABLE in time. The constructor starts one thread per engine.

    Args:
        sockets: Paths of the engines' sockets.
        timeout_s: How long requests may continue, in seconds.
    """

    def __init__(self, sockets: Sequence[Path], timeout_s: float) -> None:
        self._done_at: list[float] = []
        self._count = len(sockets)
        for socket in sockets:
            threading.Thread(target=self._drain, args=(str(socket), timeout_s), daemon=True).start()

    def seconds(self) -> float:
        """Return the seconds since all engines have answered all of their requests; 0 before that."""
        return time.monotonic() - max(self._done_at) if len(self._done_at) == self._count else 0.0

    def _drain(self, path: str, timeout_s: float) -> None:
        drain_engine(path, timeout_s)  # an engine that cannot be reached has no requests in flight
        self._done_at.append(time.monotonic())


class IdleWatch:
    """Measures for how long the watched processes have been idle.

    Args:
        processor_time: Function that returns the processor time that the processes have used so far, in
            seconds.
        now: Monotonic clock, in seconds.
    """

    def __init__(
        self, processor_time: Callable[[], float], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._processor_time = processor_time
        self._now = now
        self._restart(now())

    def seconds(self) -> float:
        """Return the seconds since the last activity, or since construction if there was none."""
        now = self._now()
        if self._is_busy(now):
            self._restart(now)
        return now - self._since

    def _is_busy(self, now: float) -> bool:
        used = self._processor_time() - self._used_before
        return used > _RESOLUTION_S + _RESTING_SHARE * (now - self._since)

    def _restart(self, now: float) -> None:
        self._since = now
        self._used_before = self._processor_time()


def stubs_processor_time(group: int) -> float:
    """Return the processor time of a process group without its leader, in seconds."""
    return sum(_time_in_group(pid, group) for pid in psutil.pids() if pid != group)


def _time_in_group(pid: int, group: int) -> float:
    try:
        used = psutil.Process(pid).cpu_times() if os.getpgid(pid) == group else None
    except (OSError, psutil.Error):  # the process has ended meanwhile
        return 0.0
    return 0.0 if used is None else used.user + used.system

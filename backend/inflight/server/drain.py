"""Detect whether a server that was told to end still works on requests.

The embedded tritonserver keeps a model loaded, and so keeps running, while any client holds a gRPC stream
open, with or without requests on it. So the launcher has to find out by other means that the last request is
done. Engines are told to end, and report when they have answered all requests (`EngineDrain`). Models of a
repository without an engine count as idle when they use no processor time (`IdleWatch`).
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from inflight.endpoint.client import drain_engine

# Share of processor time that idle stubs use, with a margin for the resolution of the kernel's accounting.
_RESTING_SHARE = 0.01
_RESOLUTION_S = 0.02


class EngineDrain:
    """Tells a server's engines that the server ends, and records when they have answered all requests.

    Triton does not tell a model that it ends while requests are in flight; after the exit timeout they would
    be dropped without an answer. An engine that is told ends its requests with UNAVAILABLE in time.
    Construction starts one thread per engine.

    Args:
        sockets: The engines' endpoints.
        timeout_s: Most seconds that their requests may go on.
    """

    def __init__(self, sockets: Sequence[Path], timeout_s: float) -> None:
        self._done_at: list[float] = []
        self._count = len(sockets)
        for socket in sockets:
            threading.Thread(target=self._drain, args=(str(socket), timeout_s), daemon=True).start()

    def seconds(self) -> float:
        """Return the seconds since the last engine has answered all requests; 0 before that."""
        return time.monotonic() - max(self._done_at) if len(self._done_at) == self._count else 0.0

    def _drain(self, path: str, timeout_s: float) -> None:
        drain_engine(path, timeout_s)  # an engine that cannot be reached has nothing in flight
        self._done_at.append(time.monotonic())


class IdleWatch:
    """Measures for how long the watched processes have been idle.

    Args:
        processor_time: Returns the processor time that the watched processes have used so far, in seconds.
        now: Returns monotonic seconds.
    """

    def __init__(
        self, processor_time: Callable[[], float], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._processor_time = processor_time
        self._now = now
        self._restart(now())

    def seconds(self) -> float:
        """Return the seconds since the last activity, or since the watch began."""
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
    except (OSError, psutil.Error):  # it has ended meanwhile
        return 0.0
    return 0.0 if used is None else used.user + used.system

"""Detect whether a starting server is ready, whether it makes progress, and when to give up.

A server makes progress if it writes a line to its log, or its processes read files or fill memory. Loading a
large checkpoint takes many minutes, but reads files and fills memory all the time; a server that hangs does
neither, even if it uses processor time. Runs on the thread that waits for the server.
"""

import http.client
import time
from collections.abc import Callable, Collection, Sequence

import psutil

from inflight.processes import MAJOR_FAULTS, MINOR_FAULTS, ProcessId, stat_fields
from inflight.server.log import ServerLog

_REPORT_EVERY_S = 30.0
_SAMPLE_EVERY_S = 5.0
_MIN_BYTES = 4_000_000  # progress per sample; readiness checks alone read far less
_PAGE_BYTES = 4096
_ANSWER_S = 5.0
_FORGOTTEN_S = 15.0  # normally tritonserver reports a loaded model at once


def is_ready(address: str, http_port: int, metrics_port: int, models: Sequence[str]) -> bool:
    """Return whether the server, all of its models and the metrics page are ready, as checked over HTTP."""
    paths = ["/v2/health/ready", *(f"/v2/models/{model}/ready" for model in models)]
    asked = [*((http_port, path) for path in paths), (metrics_port, "/metrics")]
    return all(_answers(address, port, path) for port, path in asked)


def _answers(address: str, port: int, path: str) -> bool:
    connection = http.client.HTTPConnection(address, port, timeout=_ANSWER_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        response.read()
        return response.status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


class Startup:
    """Progress of one starting server.

    Args:
        models: Names of the models that must be ready.
        log: The server's log.
        num_bytes: Function that returns how many bytes the server's processes have read, plus how many bytes
            of memory they have filled.
        stall_timeout_s: Largest number of seconds without progress; None: no limit.
        report: Called from time to time with a line about the progress; None: not called.
        now: Monotonic clock, in seconds.
        initialized: Function that returns the models whose processes have loaded them.
    """

    def __init__(
        self,
        models: Sequence[str],
        log: ServerLog,
        num_bytes: Callable[[], int],
        stall_timeout_s: float | None,
        report: Callable[[str], None] | None = None,
        now: Callable[[], float] = time.monotonic,
        initialized: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self._models = models
        self._find_initialized = initialized
        self._log = log
        self._count_bytes = num_bytes
        self._stall_timeout_s = stall_timeout_s
        self._report = report
        self._now = now
        self._begun_s = self._last_progress_s = self._reported_s = self._sampled_s = now()
        self._num_lines = self._num_bytes = 0

    def check(self) -> str | None:
        """Return an error message if the server has made no progress for too long; None otherwise."""
        now = self._now()
        if self._has_progress(now):
            self._last_progress_s = now
        if self._report is not None and now - self._reported_s >= _REPORT_EVERY_S:
            self._reported_s = now
            self._report(f"not ready yet: {self._state(now)}")
        if self._stall_timeout_s is None or now - self._last_progress_s < self._stall_timeout_s:
            return None
        return (
            f"not ready, and no progress in {self._stall_timeout_s:g} s (--ready-timeout): {self._state(now)}"
        )

    def forgotten(self) -> str | None:
        """Return an error message if tritonserver does not notice that a process has loaded its model; else None.

        tritonserver has then abandoned this process (see `log.was_starved`), and both wait for each other.
        """
        if self._now() - self._last_progress_s < _FORGOTTEN_S:
            return None
        models = set(self._find_initialized()).difference(self._log.loaded_models)
        return f"tritonserver does not notice the loaded {', '.join(sorted(models))}" if models else None

    def _has_progress(self, now: float) -> bool:
        num_lines, self._num_lines = self._num_lines, self._log.num_lines
        if self._num_lines != num_lines:
            return True
        if now - self._sampled_s < _SAMPLE_EVERY_S:
            return False
        self._sampled_s = now
        num_bytes, self._num_bytes = self._num_bytes, self._count_bytes()
        return abs(self._num_bytes - num_bytes) >= _MIN_BYTES

    def _state(self, now: float) -> str:
        missing = [model for model in self._models if model not in self._log.loaded_models]
        what = f"{', '.join(missing)} to be loaded" if missing else "it to answer, with all models loaded"
        waited_s, idle_s = now - self._begun_s, now - self._last_progress_s
        return f"waiting for {what}, for {waited_s:.0f} s; the last progress was {idle_s:.0f} s ago"


def num_bytes(processes: Sequence[ProcessId]) -> int:
    """Return how many bytes these processes have read, plus how many bytes of memory they have filled."""
    return sum(_bytes_read(process.pid) + _PAGE_BYTES * _page_faults(process.pid) for process in processes)


def _bytes_read(pid: int) -> int:
    try:
        return psutil.Process(pid).io_counters().read_chars
    except psutil.Error:  # the process has ended, or belongs to another user
        return 0


def _page_faults(pid: int) -> int:
    fields = stat_fields(pid)
    return int(fields[MINOR_FAULTS]) + int(fields[MAJOR_FAULTS]) if fields else 0

"""Supervision of an engine that runs in its own processes: heartbeats and statistics.

`Supervision` is the engine's side. It has one thread per supervisor, which sends heartbeats and the latest
statistics, so that a slow supervisor delays only its own thread. An engine ends when it has no supervisors.
`EngineWatch` is the supervisor's side; its connection is not used for requests.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from inflight.core.report.metrics import MetricsSnapshot
from inflight.core.report.stats import IterationCounts, MemoryUsage
from inflight.endpoint.frames import (
    BadFrame,
    Beat,
    EngineProcesses,
    FromEngine,
    Leaving,
    Retire,
    Statistics,
    Supervise,
    Supervised,
    decode_from_engine,
    encode,
    read_frame,
)
from inflight.endpoint.path import connect
from inflight.errors import Unavailable
from inflight.file_names import native

Send = Callable[[Sequence[bytes]], None]

_BEATS_PER_TIMEOUT = 5


class Supervision:
    """The supervisors of the engine in this process.

    Args:
        server: The engine's tritonserver, `ProcessId` as text.
        job: The command that the engine was started with.
        awaits_successor: Whether another process, which does not exist yet, will take over the engine.
        processes: The engine's processes, which are sent to supervisors.
        timeout_s: Seconds without a message after which a supervisor considers the engine lost.
        measure_memory: Function that returns this process's memory use.

    Attributes:
        server: The argument of the same name.
    """

    def __init__(
        self,
        server: str,
        job: str,
        awaits_successor: bool,
        processes: EngineProcesses,
        timeout_s: float,
        measure_memory: Callable[[], MemoryUsage],
    ) -> None:
        self.server = server
        self._job = job
        self._processes = processes
        self._period_s = timeout_s / _BEATS_PER_TIMEOUT
        self._measure_memory = measure_memory
        self._changed = threading.Condition()
        # This and all below are guarded by the condition's lock.
        self._num_supervisors_awaited = 2 if awaits_successor else 1
        self._supervisors: set[SupervisorConnection] = set()
        self._notice_s: float | None = None
        self._is_abandoned = False

    @property
    def awaited_job(self) -> str:
        """The job that the engine waits for another process to take over; "" if it waits for none."""
        with self._changed:
            is_awaited = self._num_supervisors_awaited == 1 and self._supervisors
            return self._job if is_awaited and self._notice_s is None else ""

    def put(self, stats: IterationCounts, metrics: MetricsSnapshot) -> None:
        """Send these statistics to all supervisors, replacing statistics that are not sent yet. Never blocks."""
        news = partial(Statistics, stats, metrics, time.time())
        with self._changed:
            for supervisor in self._supervisors:
                supervisor.news = news
            self._changed.notify_all()

    def attach(self, send: Send) -> SupervisorConnection:
        """Add a supervisor of this engine, and return its connection.

        `send` sends a frame to the supervisor, and raises OSError if the connection has ended.
        """
        with self._changed:
            self._num_supervisors_awaited = max(0, self._num_supervisors_awaited - 1)
            supervisor = SupervisorConnection(self, send)
            self._supervisors.add(supervisor)
        supervisor.thread.start()
        return supervisor

    def retire(self, notice_s: float) -> None:
        """End the engine within `notice_s` seconds, after notifying its supervisors that this is not a failure."""
        with self._changed:
            if self._notice_s is None:
                self._notice_s = notice_s
            self._changed.notify_all()

    def wait_for_end(self) -> float | None:
        """Wait until the engine must end.

        Returns how many seconds its requests may continue; None if it ends because it has no supervisors.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_abandoned or self._notice_s is not None)
            return self._notice_s

    # ---------------------------------------------------------------- called by a supervisor's thread and reader

    def detach(self, supervisor: SupervisorConnection) -> None:
        """Remove a supervisor whose connection has ended."""
        with self._changed:
            self._supervisors.discard(supervisor)
            self._is_abandoned = not self._supervisors
            self._changed.notify_all()

    def run(self, supervisor: SupervisorConnection) -> None:
        """Send heartbeats and statistics to one supervisor until it or the engine ends.

        Runs on the supervisor's thread.
        """
        with contextlib.suppress(OSError):
            supervisor.send([encode(Supervised(self._processes))])
            while True:
                with self._changed:
                    self._changed.wait_for(
                        lambda: supervisor.news or self._is_over(supervisor), self._period_s
                    )
                    news, supervisor.news = supervisor.news, None
                    is_over = self._is_over(supervisor)
                if news is not None:
                    supervisor.send([encode(news(self._measure_memory()))])
                elif is_over:
                    break
                else:
                    supervisor.send([encode(Beat())])
            supervisor.send([encode(Leaving())])

    def _is_over(self, supervisor: SupervisorConnection) -> bool:
        return self._notice_s is not None or supervisor not in self._supervisors


class SupervisorConnection:
    """One supervisor, on the engine's side.

    Attributes:
        send: Function that sends a frame to the supervisor.
        thread: The thread that sends.
        news: Function that makes the next Statistics; None: there are no new ones. Guarded by the
            supervision's lock.
    """

    def __init__(self, supervision: Supervision, send: Send) -> None:
        self.send = send
        self.news: Callable[[MemoryUsage], Statistics] | None = None
        self.thread = threading.Thread(
            target=supervision.run, args=(self,), name="endpoint-supervision", daemon=True
        )


_STOPPED = 1.5
"""If a wait takes this many times its timeout, this process was suspended."""


class EngineWatch:
    """Supervises the engine at `path` from construction until `run` returns.

    Args:
        path: Path of the engine's socket.
        timeout_s: Seconds without a message after which the engine is considered lost.

    Attributes:
        processes: The engine's processes.

    Raises:
        Unavailable: No engine listens at `path`, or it has no supervision.
    """

    def __init__(self, path: str, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self.processes = self._introduce(path)
        except (OSError, BadFrame) as error:
            self._socket.close()
            raise Unavailable(f"the engine at {path} cannot be supervised: {error}") from error

    def _introduce(self, path: str) -> EngineProcesses:
        self._socket.settimeout(self._timeout_s)
        connect(self._socket, path)
        self._socket.sendall(encode(Supervise()))
        frame = self._next()
        if not isinstance(frame, Supervised):
            raise BadFrame(f"it sent {type(frame).__name__}, expected Supervised")
        return frame.processes

    def run(self, on_statistics: Callable[[Statistics], None]) -> str:
        """Pass statistics to `on_statistics` until the engine ends.

        Returns why it ended, or "" if it was asked to end.

        Runs on one thread; `close`, on another thread, makes it return.
        """
        try:
            while (frame := self._next()) is not None:
                if isinstance(frame, Leaving):
                    return ""
                if isinstance(frame, Statistics):
                    on_statistics(frame)
        except TimeoutError:
            return f"rank 0 has been silent for {self._timeout_s:g} s"
        except (OSError, BadFrame) as error:
            return f"the connection to rank 0 broke: {error}"
        finally:
            self._socket.close()
        return "the process of rank 0 has ended"

    def has_left(self) -> bool:
        """Return whether the engine has ended or was asked to end. Must not be called while `run` is running."""
        self._socket.settimeout(0.0)
        try:
            while (frame := self._next()) is not None:
                if isinstance(frame, Leaving):
                    return True
        except BlockingIOError:
            return False
        except (OSError, BadFrame):
            pass
        return True

    def retire(self, notice_s: float) -> None:
        """Ask the engine to end; its requests may continue for `notice_s` seconds. Any thread."""
        with contextlib.suppress(OSError):
            self._socket.sendall(encode(Retire(notice_s)))

    def close(self) -> None:
        """Stop supervising: `run` returns. Idempotent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _next(self) -> FromEngine | None:
        begun_s = time.monotonic()
        try:
            body = read_frame(self._socket)
        except TimeoutError:
            if time.monotonic() - begun_s < _STOPPED * self._timeout_s:
                raise
            # This process was suspended, perhaps together with the engine: wait again.
            body = read_frame(self._socket)
        return None if body is None else decode_from_engine(body)


def awaits_successor(path: str, server: str, job: str, timeout_s: float) -> bool:
    """Return whether the engine at `path` was started with `job` and waits for a process of `server`."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout_s)
        try:
            hello = connect(connection, path)
        except (OSError, BadFrame):
            return False
    return (hello.server, hello.job) == (server, job)


def is_served(path: str) -> bool:
    """Return whether a process listens at `path`."""
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(native(path))
            return True
        except OSError:
            return False

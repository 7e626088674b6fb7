"""An engine in a process of its own, as its supervisors see it: alive or not, and what it has observed.

Owns, on the engine's side, one thread for each supervisor, which sends a sign of life or the newest statistics. An
engine without supervisors is of no use to anybody: it ends. What is sent waits for a supervisor that does not take
it, in that thread; the loop, which brings statistics, waits for nobody.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence

from inflight.core.report.metrics import MetricsSnapshot
from inflight.core.report.stats import IterationStats, MemoryUsage
from inflight.endpoint.frames import (
    BadFrame,
    Beat,
    EngineProcesses,
    FromEngine,
    Hello,
    Leaving,
    Retire,
    Statistics,
    Supervise,
    Supervised,
    decode_from_engine,
    encode,
    read_frame,
)
from inflight.endpoint.path import peer_is_this_user
from inflight.errors import Unavailable
from inflight.file_names import native

Send = Callable[[Sequence[bytes]], None]

_BEATS_PER_TIMEOUT = 5


class Supervision:
    """Of one engine.

    Args:
        server: The tritonserver that it works for, `ProcessId` as text.
        job: What it was started with.
        awaits_heir: Whether it was started for a process to come, which will take it over.
        processes: For supervisors.
        timeout_s: Silence after which a supervisor takes it for lost.
        measure_memory: What this process holds.

    Attributes:
        server: As above.
    """

    def __init__(
        self,
        server: str,
        job: str,
        awaits_heir: bool,
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
        # This and all below: under the condition's lock.
        self._num_supervisors_awaited = 2 if awaits_heir else 1
        self._supervisors: set[Supervisor] = set()
        self._notice_s: float | None = None
        self._is_abandoned = False

    @property
    def awaited_job(self) -> str:
        """What it was started with, "" if nobody is to take it over."""
        with self._changed:
            is_awaited = self._num_supervisors_awaited == 1 and self._supervisors
            return self._job if is_awaited and self._notice_s is None else ""

    def put(self, stats: IterationStats, metrics: MetricsSnapshot) -> None:
        """Tell supervisors, instead of what they have not been told yet. Never waits."""
        news = _News(stats, metrics, time.time())
        with self._changed:
            for supervisor in self._supervisors:
                supervisor.news = news
            self._changed.notify_all()

    def attach(self, send: Send) -> Supervisor:
        """Somebody supervises the engine from now on; `send` raises OSError once it is gone."""
        with self._changed:
            self._num_supervisors_awaited = max(0, self._num_supervisors_awaited - 1)
            supervisor = Supervisor(self, send)
            self._supervisors.add(supervisor)
        supervisor.thread.start()
        return supervisor

    def retire(self, notice_s: float) -> None:
        """The engine is to end within `notice_s` seconds; its supervisors are told that this is in order."""
        with self._changed:
            if self._notice_s is None:
                self._notice_s = notice_s
            self._changed.notify_all()

    def wait_for_end(self) -> float | None:
        """Until the engine is retired: how long requests may still go on; None once its supervisors are lost."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_abandoned or self._notice_s is not None)
            return self._notice_s

    # ---------------------------------------------------------------- for a supervisor's thread and its reader

    def detach(self, supervisor: Supervisor) -> None:
        """It is gone."""
        with self._changed:
            self._supervisors.discard(supervisor)
            self._is_abandoned = not self._supervisors
            self._changed.notify_all()

    def run(self, supervisor: Supervisor) -> None:
        """What its thread does."""
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
                    supervisor.send([encode(news.frame(self._measure_memory()))])
                elif is_over:
                    break
                else:
                    supervisor.send([encode(Beat())])
            supervisor.send([encode(Leaving())])

    def _is_over(self, supervisor: Supervisor) -> bool:
        return self._notice_s is not None or supervisor not in self._supervisors


class Supervisor:
    """One of them.

    Attributes:
        send: The way to it.
        thread: Sends.
        news: What it is to be told next. Under the supervision's lock.
    """

    def __init__(self, supervision: Supervision, send: Send) -> None:
        self.send = send
        self.news: _News | None = None
        self.thread = threading.Thread(
            target=supervision.run, args=(self,), name="endpoint-supervision", daemon=True
        )


class _News:
    def __init__(self, stats: IterationStats, metrics: MetricsSnapshot, wall_clock_s: float) -> None:
        self._stats, self._metrics, self._wall_clock_s = stats, metrics, wall_clock_s

    def frame(self, memory: MemoryUsage) -> Statistics:
        return Statistics(self._stats, self._metrics, self._wall_clock_s, memory)


_STOPPED = 1.5  # a wait that takes so many times as long


class EngineWatch:
    """Supervises the engine at `path` from construction to the end of `run`.

    Args:
        path: Its socket.
        timeout_s: Silence after which it is lost.

    Attributes:
        processes: What it consists of.

    Raises:
        Unavailable: There is no engine to be reached, or none that can be supervised.
    """

    processes: EngineProcesses

    def __init__(self, path: str, timeout_s: float) -> None:
        self._path = path
        self._timeout_s = timeout_s
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self.processes = self._introduce()
        except (OSError, BadFrame) as error:
            self._socket.close()
            raise Unavailable(f"the engine at {path} cannot be supervised: {error}") from error

    def _introduce(self) -> EngineProcesses:
        self._socket.settimeout(self._timeout_s)
        self._socket.connect(native(self._path))
        if not peer_is_this_user(self._socket):
            raise BadFrame("it belongs to another user")
        self._socket.sendall(encode(Supervise()))
        frame = self._next()
        while isinstance(frame, Hello):
            frame = self._next()
        if not isinstance(frame, Supervised):
            raise BadFrame("it is nobody's to supervise")
        return frame.processes

    def run(self, on_statistics: Callable[[Statistics], None]) -> str:
        """Until the engine ends: why it did, "" if that is in order. Statistics are handed on as they come.

        One thread; `close`, on another, ends it in order.
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
        """Whether the engine has been told to end, by somebody else, or is gone; for when `run` does not run."""
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
        """Have it end in order, its requests within `notice_s` seconds. Any thread."""
        with contextlib.suppress(OSError):
            self._socket.sendall(encode(Retire(notice_s)))

    def close(self) -> None:
        """Supervise it no longer: `run` returns. Idempotent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _next(self) -> FromEngine | None:
        begun_s = time.monotonic()
        try:
            body = read_frame(self._socket)
        except TimeoutError:
            if time.monotonic() - begun_s < _STOPPED * self._timeout_s:
                raise
            body = read_frame(self._socket)  # this process was stopped, and the engine perhaps with it
        return None if body is None else decode_from_engine(body)


def awaits_heir(path: str, server: str, job: str, timeout_s: float) -> bool:
    """Whether the engine at `path` was started with `job` for a process of `server`'s to come."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout_s)
        try:
            connection.connect(native(path))
            if not peer_is_this_user(connection):
                return False
            body = read_frame(connection)
            frame = decode_from_engine(body) if body is not None else None
        except (OSError, BadFrame):
            return False
    return isinstance(frame, Hello) and (frame.server, frame.job) == (server, job)


def is_served(path: str) -> bool:
    """Whether somebody listens there."""
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(native(path))
            return True
        except OSError:
            return False

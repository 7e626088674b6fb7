"""A supervisor's side of the endpoint: whether an engine in other processes lives, and what it has observed.

Owns one connection that carries no requests. The engine ends when its last supervisor is gone.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable

from inflight.endpoint.frames import (
    BadFrame,
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

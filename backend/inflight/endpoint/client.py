"""A front end's side of the endpoint: an EngineClient whose engine is in another process.

Owns one connection, made when it is first needed and again after it broke. When a connection ends, every
request in flight on it gets one final Unavailable. Any thread may call; responses arrive on the reader thread.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import socket
import threading
from dataclasses import replace

from inflight.core.description import EngineDescription
from inflight.core.ports import SendResponseCallback
from inflight.core.request import Request
from inflight.core.response import Response
from inflight.core.stop import StopReason
from inflight.endpoint.frames import (
    Answer,
    BadFrame,
    Hello,
    Stop,
    Submit,
    decode_from_engine,
    encode,
    read_frame,
)
from inflight.errors import Unavailable

_log = logging.getLogger(__name__)
_HELLO_TIMEOUT_S = 5.0


class SocketEngineClient:
    """An `EngineClient` over the Unix socket at `path`."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self._connection: _Connection | None = None
        self._closed = False

    def describe(self) -> EngineDescription:
        """What the engine says of itself; raises Unavailable while it cannot be reached."""
        return self._connected().description

    def submit(self, request: Request, on_response: SendResponseCallback) -> int:
        """Send `request` on; raises Unavailable while the engine cannot be reached."""
        request_id = next(self._ids)
        self._connected().submit(replace(request, request_id=request_id), on_response)
        return request_id

    def stop(self, request_id: int, reason: StopReason) -> None:
        """End a request early; unknown ids are ignored."""
        connection = self._connection
        if connection is not None:
            connection.stop(request_id, reason)

    def close(self) -> None:
        """End the connection; requests in flight are answered with Unavailable. Idempotent."""
        with self._lock:
            self._closed = True
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _connected(self) -> _Connection:
        with self._lock:
            if self._closed:
                raise Unavailable("the server is shutting down")
            if self._connection is None or self._connection.ended:
                self._connection = _Connection(self._path)
            return self._connection


class _Connection:
    """One life of the socket: from a Hello to its end."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()  # of the table of callbacks
        self._send_lock = threading.Lock()
        self._callbacks: dict[int, SendResponseCallback] = {}
        self.ended = False
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self.description = self._greet()
        except (OSError, BadFrame) as error:
            self._socket.close()
            raise Unavailable(
                f"the engine cannot be reached at {path} ({error}): is the model that holds it loaded and ready?"
            ) from error
        self._reader = threading.Thread(target=self._read, name="endpoint-client", daemon=True)
        self._reader.start()

    def _greet(self) -> EngineDescription:
        self._socket.settimeout(_HELLO_TIMEOUT_S)
        self._socket.connect(self._path)
        body = read_frame(self._socket)
        frame = decode_from_engine(body) if body is not None else None
        if not isinstance(frame, Hello):
            raise BadFrame("the engine did not introduce itself")
        self._socket.settimeout(None)
        return frame.description

    def submit(self, request: Request, on_response: SendResponseCallback) -> None:
        with self._lock:
            if self.ended:
                raise self._lost()
            self._callbacks[request.request_id] = on_response
        self._send(encode(Submit(request)))

    def stop(self, request_id: int, reason: StopReason) -> None:
        if request_id in self._callbacks:
            self._send(encode(Stop(request_id, reason)))

    def close(self) -> None:
        self._shut()
        if threading.current_thread() is not self._reader:
            self._reader.join()

    def _send(self, frame: bytes) -> None:
        try:
            with self._send_lock:
                self._socket.sendall(frame)
        except OSError:
            self._shut()  # the reader answers whoever is in flight, this request too

    def _shut(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    # ---------------------------------------------------------------- reader thread

    def _read(self) -> None:
        try:
            while (body := read_frame(self._socket)) is not None:
                frame = decode_from_engine(body)
                if isinstance(frame, Answer):
                    self._deliver(frame.response())
        except (OSError, BadFrame) as error:
            _log.warning("the connection to the engine broke: %s", error)
        finally:
            self._end()

    def _deliver(self, response: Response) -> None:
        with self._lock:
            if response.is_final:
                on_response = self._callbacks.pop(response.request_id, None)
            else:
                on_response = self._callbacks.get(response.request_id)
        if on_response is None:
            return
        try:
            on_response(response)
        except Exception:  # one front end's fault must not end everyone's connection
            _log.exception("a front end failed to take a response of request %d", response.request_id)

    def _end(self) -> None:
        self._shut()
        with self._lock:
            self.ended = True
            unanswered = list(self._callbacks)
        for request_id in unanswered:
            self._deliver(Response(request_id, error=self._lost(), is_final=True))
        self._socket.close()

    def _lost(self) -> Unavailable:
        return Unavailable(f"the connection to the engine at {self._path} was lost")

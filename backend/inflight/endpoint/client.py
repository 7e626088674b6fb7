"""The engine endpoint's connecting side, for front ends in other processes.

Owns one connection at a time with the thread that reads from it, and the requests in flight on it. Does not know
Triton or the batcher. `describe`, `submit`, `stop` and `close` may be called on any thread; every response is
delivered on the connection's reader thread.

The engine may come after its front ends, and may be restarted under them: a connection is made when it is needed,
and when it breaks, every request in flight on it gets exactly one final response, Unavailable.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import socket
import struct
import threading
from dataclasses import replace

from inflight.core.description import EngineDescription
from inflight.core.ports import SendResponseCallback
from inflight.core.request import Request
from inflight.core.response import Response
from inflight.core.stop import StopReason
from inflight.endpoint.frames import Answer, FrameError, Hello, Stop, Submit, encode_frame, read_frame
from inflight.endpoint.path import peer_is_this_user
from inflight.errors import InvalidArgument, Unavailable

_log = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 5.0
# The engine's reader takes frames at once; one that does not for this long hangs, and so would the front end.
_SEND_TIMEOUT_S = 5


class SocketEngineClient:
    """An `EngineClient` over the socket at `path`."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._ids = itertools.count(1)
        self._connecting = threading.Lock()
        self._connection: _Connection | None = None
        self._closed = False

    def describe(self) -> EngineDescription:
        """Limits and names of the engine that runs now; raises Unavailable if there is none."""
        return self._connect().description

    def submit(self, request: Request, on_response: SendResponseCallback) -> int:
        """Send `request` and return the id it runs under.

        Raises:
            Unavailable: No engine can be reached; `on_response` is not called.
            InvalidArgument: The request is too large to be sent.
        """
        request_id = next(self._ids)
        try:
            frame = encode_frame(Submit(replace(request, request_id=request_id)))
        except FrameError as error:
            raise InvalidArgument(f"the request is too large: {error}") from error
        while not self._connect().submit(request_id, frame, on_response):
            pass  # that connection has just broken: try a new one, until there is none to be had
        return request_id

    def stop(self, request_id: int, reason: StopReason) -> None:
        """End a request early; nothing happens if it is not in flight."""
        connection = self._connection
        if connection is not None:
            connection.stop(request_id, reason)

    def close(self) -> None:
        """Disconnect; requests in flight are answered with Unavailable first. Idempotent."""
        with self._connecting:
            self._closed = True
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _connect(self) -> _Connection:
        """The connection, made anew if there is none or it has broken."""
        connection = self._connection
        if connection is not None and connection.is_alive:
            return connection
        with self._connecting:
            if self._closed:
                raise Unavailable("this front end is shutting down")
            if self._connection is None or not self._connection.is_alive:
                self._connection = _Connection(self._path)
            return self._connection


class _Connection:
    """One connection to one engine, until it breaks."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._socket = _open(path)
        self._stream = self._socket.makefile("rb")
        try:
            self.description = _read_hello(self._stream)
        except (OSError, FrameError) as error:
            self._socket.close()
            raise _unreachable(path, f"it does not answer ({error})") from error
        self._socket.settimeout(None)
        self._sending = threading.Lock()
        self._lock = threading.Lock()
        self._in_flight: dict[int, SendResponseCallback] = {}
        self.is_alive = True
        self._reader = threading.Thread(target=self._read, name="engine-client", daemon=True)
        self._reader.start()

    def submit(self, request_id: int, frame: bytes, on_response: SendResponseCallback) -> bool:
        """Whether the request is in flight now, and so will be answered; False once the connection is broken."""
        with self._lock:
            if not self.is_alive:
                return False
            self._in_flight[request_id] = on_response
        self._send(frame)
        return True

    def stop(self, request_id: int, reason: StopReason) -> None:
        if request_id in self._in_flight:
            self._send(encode_frame(Stop(request_id, reason)))

    def close(self) -> None:
        self._disconnect()
        if threading.current_thread() is not self._reader:
            self._reader.join()

    def _send(self, frame: bytes) -> None:
        """A failure breaks the connection; the reader then answers everything in flight, in one place."""
        try:
            with self._sending:
                self._socket.sendall(frame)
        except OSError as error:
            _log.warning("the engine endpoint %s takes no requests: %s", self._path, error)
            self._disconnect()

    def _disconnect(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the reader

    def _read(self) -> None:
        try:
            while (frame := read_frame(self._stream)) is not None:
                if not isinstance(frame, Answer):
                    raise FrameError(f"an engine does not send {type(frame).__name__} here")
                self._deliver(frame.response())
        except (OSError, FrameError) as error:
            _log.warning("the connection to the engine endpoint %s broke: %s", self._path, error)
        self._end()

    def _end(self) -> None:
        with self._lock:
            self.is_alive = False
            left = list(self._in_flight)
        self._disconnect()
        for request_id in left:
            error = Unavailable(
                f"the connection to the engine at {self._path} broke while the request was running; "
                "see the server's log for why, and send it again"
            )
            self._deliver(Response(request_id, error=error, is_final=True))
        self._stream.close()
        self._socket.close()

    def _deliver(self, response: Response) -> None:
        with self._lock:
            if response.is_final:
                on_response = self._in_flight.pop(response.request_id, None)
            else:
                on_response = self._in_flight.get(response.request_id)
        if on_response is None:
            return
        try:
            on_response(response)
        except Exception:  # one request's receiver must not end the others' connection
            _log.exception("a front end failed to take a response of request %d", response.request_id)


def _open(path: str) -> socket.socket:
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connected.settimeout(_CONNECT_TIMEOUT_S)
    try:
        connected.connect(path)
        if not peer_is_this_user(connected):
            raise PermissionError("it belongs to another user")
        timeout = struct.pack("ll", _SEND_TIMEOUT_S, 0)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
    except OSError as error:
        connected.close()
        raise _unreachable(path, str(error.strerror or error)) from error
    return connected


def _read_hello(stream: io.BufferedIOBase) -> EngineDescription:
    frame = read_frame(stream)
    if not isinstance(frame, Hello):
        raise FrameError("it closed the connection" if frame is None else "it does not say hello")
    return frame.description


def _unreachable(path: str, why: str) -> Unavailable:
    return Unavailable(
        f"no engine at {path}: {why}. Check that the model that holds the engine (tensorrt_llm) is loaded and "
        "READY, and that both models name the same engine_endpoint"
    )

"""The engine endpoint's listening side, in the process of the batcher.

Owns the socket file, one thread that accepts, and two threads for each connection: a reader that submits and stops,
a writer that sends what waits in the connection's mailbox. Does not know the batcher, only an `EngineClient`; its
responses arrive on the batcher's loop thread and do no more there than go into a mailbox.

A connection that breaks, or says something that is no frame, ends alone: its requests are stopped.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable
from dataclasses import replace

from inflight.core.ports import EngineClient
from inflight.core.request import Request
from inflight.core.response import Response
from inflight.core.stop import StopReason
from inflight.endpoint.frames import Answer, FrameError, Hello, Stop, Submit, encode_frame, read_frame
from inflight.endpoint.mailbox import Mailbox
from inflight.endpoint.path import bind_endpoint, remove_endpoint
from inflight.errors import InflightError, StepFailed

_log = logging.getLogger(__name__)

# Responses a write takes along. While it is under way, those of the other streams go on being joined.
_RESPONSES_PER_WRITE = 64
_FAREWELL_S = 2.0


class EndpointServer:
    """Lets other processes use `client`, from construction to `close`.

    Args:
        client: The engine.
        path: Where to listen, usually `endpoint_path(...)`.

    Raises:
        ConfigError: The path can't be used, or another engine listens there.
    """

    def __init__(self, client: EngineClient, path: str) -> None:
        self._client = client
        self._path = path
        self._listener = bind_endpoint(path)
        self._lock = threading.Lock()
        self._connections: set[_Connection] = set()
        self._closed = False
        self._acceptor = threading.Thread(target=self._accept, name="endpoint-accept", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        """Send what waits, end all connections, stop their requests, remove the socket file. Idempotent.

        Close the batcher first where its last responses are still to be sent.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the acceptor
        self._acceptor.join()
        self._listener.close()
        remove_endpoint(self._path)
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.close()

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                _log.exception("the engine endpoint could not accept a connection")
                continue
            connection = _Connection(accepted, self._client, self._forget)
            with self._lock:
                self._connections.add(connection)
            connection.start()

    def _forget(self, connection: _Connection) -> None:
        with self._lock:
            self._connections.discard(connection)


class _Connection:
    """One front end. Ids here are the front end's; `_engine_ids` maps those in flight to the engine's."""

    def __init__(
        self, connected: socket.socket, client: EngineClient, on_end: Callable[[_Connection], None]
    ) -> None:
        self._socket = connected
        self._client = client
        self._on_end = on_end
        self._mailbox = Mailbox()
        self._lock = threading.Lock()
        self._engine_ids: dict[int, int | None] = {}  # None until submit has returned
        self._reader = threading.Thread(target=self._read, name="endpoint-read", daemon=True)
        self._writer = threading.Thread(target=self._write, name="endpoint-write", daemon=True)

    def start(self) -> None:
        self._reader.start()
        self._writer.start()

    def close(self) -> None:
        """Send what waits, as far as the front end takes it, and end."""
        self._mailbox.close()
        self._writer.join(_FAREWELL_S)
        self._disconnect()
        self._reader.join()
        self._writer.join()

    # ---------------------------------------------------------------- front end to engine

    def _read(self) -> None:
        try:
            with self._socket.makefile("rb") as stream:
                while (frame := read_frame(stream)) is not None:
                    self._handle(frame)
        except FrameError as error:
            _log.warning("engine endpoint: a front end is disconnected: %s", error)
        except OSError:
            pass  # the front end is gone, which needs no words
        except Exception:
            _log.exception("engine endpoint: a front end is disconnected")
        self._end()

    def _handle(self, frame: object) -> None:
        if isinstance(frame, Submit):
            self._submit(frame.request)
        elif isinstance(frame, Stop):
            self._stop(frame.request_id, frame.reason)
        else:
            raise FrameError(f"a front end does not send {type(frame).__name__}")

    def _submit(self, request: Request) -> None:
        front_end_id = request.request_id
        with self._lock:
            if front_end_id in self._engine_ids:
                raise FrameError(f"request id {front_end_id} is in flight already")
            self._engine_ids[front_end_id] = None
        try:
            engine_id = self._client.submit(request, self._answerer(front_end_id))
        except Exception as error:
            self._answer(Response(front_end_id, error=_as_inflight_error(error), is_final=True))
            return
        with self._lock:
            if front_end_id in self._engine_ids:  # else it has been answered meanwhile
                self._engine_ids[front_end_id] = engine_id

    def _stop(self, front_end_id: int, reason: StopReason) -> None:
        with self._lock:
            engine_id = self._engine_ids.get(front_end_id)
        if engine_id is not None:
            self._client.stop(engine_id, reason)

    def _end(self) -> None:
        self._mailbox.close()
        self._disconnect()
        self._writer.join()
        self._socket.close()
        with self._lock:
            left = [engine_id for engine_id in self._engine_ids.values() if engine_id is not None]
        for engine_id in left:
            self._client.stop(engine_id, StopReason.CANCELLED)
        self._on_end(self)

    def _disconnect(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the reader, and the writer

    # ---------------------------------------------------------------- engine to front end

    def _answerer(self, front_end_id: int) -> Callable[[Response], None]:
        return lambda response: self._answer(replace(response, request_id=front_end_id))

    def _answer(self, response: Response) -> None:
        if response.is_final:
            with self._lock:
                self._engine_ids.pop(response.request_id, None)
        self._mailbox.put(response)

    def _write(self) -> None:
        try:
            self._socket.sendall(encode_frame(Hello(self._client.describe())))
            while responses := self._mailbox.get(_RESPONSES_PER_WRITE):
                self._socket.sendall(b"".join(encode_frame(Answer.of(response)) for response in responses))
        except OSError:
            pass  # the reader notices too, and ends the connection
        except Exception as error:
            _log.error("engine endpoint: a front end is disconnected: %s", error)
        self._disconnect()


def _as_inflight_error(error: Exception) -> InflightError:
    if isinstance(error, InflightError):
        return error
    _log.error("engine endpoint: a request could not be submitted", exc_info=error)
    return StepFailed(f"the request could not be submitted: {type(error).__name__}: {error}")

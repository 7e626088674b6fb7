"""The engine's side of the endpoint, through which front ends in other processes use the engine's client.

The server owns the listening socket and, for each connection, a reader thread, a writer thread and the
requests in flight on it. Queries about state, adapters, sleep or reports are answered on a thread of their own.
When a connection ends, for whatever reason, its requests are stopped.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby

from inflight.access_log import AccessLog
from inflight.core.ports import EngineClient
from inflight.core.request.handle import RequestHandle
from inflight.core.request.response import Response
from inflight.endpoint.delivery import Delivery
from inflight.endpoint.frames import (
    AdapterStates,
    BadFrame,
    CommandAdapters,
    CommandSleep,
    Drained,
    FrontEndFrames,
    Hello,
    ReadReports,
    ReadState,
    Reported,
    Retire,
    SleepState,
    State,
    Stop,
    Submit,
    Supervise,
    encode,
    encode_response,
)
from inflight.endpoint.path import listen, remove
from inflight.endpoint.supervision import Supervision, SupervisorConnection
from inflight.errors import InflightError, StepFailed, without_places
from inflight.file_names import native
from inflight.log_lines import REQUEST_ID

_log = logging.getLogger(__name__)

# Largest number of responses per write. Responses that wait meanwhile are merged.
_RESPONSES_PER_WRITE = 64
_LARGE_BYTES = 64 * 1024
_FAREWELL_S = 2.0
_ACCEPT_AGAIN_S = 1.0
_NOT_SUBMITTED = "the request could not be submitted"


class EndpointServer:
    """Serves `client` at `path` from construction to `close`; raises ConfigError if the path cannot be used.

    Args:
        client: The engine's client.
        path: The socket's path.
        drain: Called with a timeout in seconds when the server shuts down. It must return when all requests
            in flight are answered.
        retire: Called with a timeout in seconds, on a thread of its own, when another process replaces this
            engine. It must end the engine, including this server.
        supervision: The supervisors of this engine, if other processes start and end it.
    """

    def __init__(
        self,
        client: EngineClient,
        path: str,
        drain: Callable[[float], object] | None = None,
        retire: Callable[[float], object] | None = None,
        supervision: Supervision | None = None,
    ) -> None:
        self.client = client
        self.supervision = supervision
        self.drain = drain
        self.retire = retire
        self.access_log = AccessLog()
        self._path = native(path)
        self._lock = threading.Lock()
        self._connections: dict[_ClientConnection, None] = {}  # in the order of their arrival
        self._closing = threading.Event()
        self._listening = listen(self._path)
        self._thread = threading.Thread(target=self._accept, name="endpoint-accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Accept no more connections, send waiting responses, close all connections, remove the socket.

        Idempotent.

        Requests that are still in flight are stopped. To let them finish, end the batcher first.
        """
        if self._closing.is_set():
            return
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes the accept
        self._thread.join()
        self._listening.close()
        remove(self._path)
        with self._lock:
            connections = list(self._connections)
        # The peer that asked this engine to retire waits until its connection ends, so this connection is
        # closed last.
        for connection in sorted(connections, key=lambda one: one.asked_to_retire):
            connection.close()
        self.access_log.close()

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._listening.accept()
            except OSError:
                # For example, there are no file descriptors left, and an immediate retry would fail again.
                if self._closing.wait(_ACCEPT_AGAIN_S):
                    return
                continue
            connection = _ClientConnection(self, accepted)
            with self._lock:
                self._connections[connection] = None
            connection.start()

    def forget(self, connection: _ClientConnection) -> None:
        """Remove a connection that has ended."""
        with self._lock:
            self._connections.pop(connection, None)


class _ClientConnection:
    """A connection to a front end, a supervisor or a successor.

    Attributes:
        asked_to_retire: Whether the peer has asked the engine to retire, and waits until the connection ends.
    """

    def __init__(self, server: EndpointServer, connected: socket.socket) -> None:
        self._server = server
        self._client = server.client
        self._supervisor: SupervisorConnection | None = None
        self._socket = connected
        self.asked_to_retire = False
        self._delivery: Delivery[Response] = Delivery(_RESPONSES_PER_WRITE)
        self._lock = threading.Lock()
        self._send_lock = threading.Lock()
        self._handles: dict[int, RequestHandle] = {}  # of requests in flight, by the id on this connection
        self._reader = threading.Thread(target=self._read, name="endpoint-reader", daemon=True)
        self._writer = threading.Thread(target=self._write, name="endpoint-writer", daemon=True)

    def start(self) -> None:
        self._writer.start()
        self._reader.start()

    def close(self) -> None:
        """Send waiting responses, as far as the peer reads them, and end the connection and its threads."""
        self._delivery.close()
        self._writer.join(_FAREWELL_S)
        self._disconnect()
        self._reader.join()
        self._writer.join()

    def _disconnect(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes both threads

    # ---------------------------------------------------------------- reader thread

    def _read(self) -> None:
        try:
            frames = FrontEndFrames(self._socket)
            while (frame := frames.read()) is not None:
                if isinstance(frame, Submit):
                    self._submit(frame)
                elif isinstance(frame, Stop):
                    self._stop(frame)
                elif isinstance(frame, ReadState):
                    # Reading the state may take as long as an iteration, and must not delay a Stop.
                    _start_thread("endpoint-state", self._answer_state, frame)
                elif isinstance(frame, CommandAdapters):
                    # A command may read files.
                    _start_thread("endpoint-adapters", self._answer_adapter_command, frame)
                elif isinstance(frame, CommandSleep):
                    # Requests finish, or the model is loaded.
                    _start_thread("endpoint-sleep", self._answer_sleep, frame)
                elif isinstance(frame, ReadReports):
                    # It may wait until there are reports.
                    _start_thread("endpoint-reports", self._answer_report, frame)
                elif isinstance(frame, Retire):
                    self.asked_to_retire = True
                    if self._server.retire is not None:
                        # `retire` closes this connection, which waits for this thread.
                        _start_thread("endpoint-retire", self._server.retire, frame.timeout_s)
                elif isinstance(frame, Supervise):
                    if self._server.supervision is not None and self._supervisor is None:
                        self._supervisor = self._server.supervision.attach(self._send)
                elif self._server.drain is not None:
                    self._server.drain(frame.timeout_s)  # no message follows a Drain, so this may block
                    self._send([encode(Drained())])
        except (OSError, BadFrame) as error:
            _log.info("a front end's connection ended: %s", error)
        finally:
            self._end()

    def _submit(self, frame: Submit) -> None:
        local_id = frame.request.request_id
        if local_id in self._handles:
            raise BadFrame(f"request id {local_id} is in flight already")
        finished = threading.Event()

        def on_response(response: Response) -> None:
            if response.is_final:
                with self._lock:
                    finished.set()
                    self._handles.pop(local_id, None)
            self._delivery.put(replace(response, request_id=local_id))

        try:
            handle = self._client.submit(frame.request, on_response)
        except Exception as error:  # an error of one request must not end the connection of all
            refusal = _as_inflight_error(error, _NOT_SUBMITTED, frame.request.log_extra)
            self._server.access_log.refuse(frame.request.origin, code=refusal.code)
            self._delivery.put(Response(local_id, error=refusal, is_final=True))
            return
        with self._lock:
            if not finished.is_set():
                self._handles[local_id] = handle

    def _stop(self, frame: Stop) -> None:
        with self._lock:
            handle = self._handles.get(frame.request_id)
        if handle is not None:
            handle.stop(frame.reason, frame.sequence_index)

    def _answer_state(self, frame: ReadState) -> None:
        self._answer(frame, State, lambda: self._client.state(frame.timeout_s), "the state could not be read")

    def _answer_adapter_command(self, frame: CommandAdapters) -> None:
        self._answer(frame, AdapterStates, lambda: self._client.adapters(frame.command, frame.timeout_s))

    def _answer_sleep(self, frame: CommandSleep) -> None:
        self._answer(
            frame, SleepState, lambda: self._client.sleep(frame.action, frame.timeout_s, frame.only_weights)
        )

    def _answer(
        self,
        query: ReadState | CommandAdapters | CommandSleep,
        reply: Callable[..., State | AdapterStates | SleepState],
        run: Callable[[], object],
        failure: str = "the command could not be carried out",
    ) -> None:
        """Run what a query asks for, and send its result or error. Runs on a thread of its own.

        Args:
            query: The query.
            reply: The class of the answer.
            run: Returns the result, within the query's timeout.
            failure: The message for an unexpected error.
        """
        REQUEST_ID.set(query.request_id)
        try:
            answer = reply(query.query_id, run())
        except Exception as caught:  # any error goes to the peer
            error = _as_inflight_error(caught, failure)
            answer = reply(query.query_id, error_kind=error.kind, error_message=error.marked)
        with contextlib.suppress(OSError):  # the connection has ended
            self._send([encode(answer)])

    def _answer_report(self, frame: ReadReports) -> None:
        """Answer a ReadReports. Runs on a thread of its own, which ends at the latest with the batcher."""
        reports = self._client.reports(frame.kind, frame.timeout_s)
        with contextlib.suppress(OSError):  # the connection has ended
            self._send([encode(Reported(frame.query_id, reports))])

    def _end(self) -> None:
        # First, so that a peer that still reads does not take the stopped requests for cancelled ones.
        self._delivery.close()
        self._disconnect()
        with self._lock:
            left = list(self._handles.values())
        for handle in left:
            handle.stop()
        if self._server.supervision is not None and self._supervisor is not None:
            self._server.supervision.detach(self._supervisor)
        self._writer.join()
        if self._supervisor is not None:
            self._supervisor.thread.join()
        self._socket.close()
        self._server.forget(self)

    # ---------------------------------------------------------------- writer thread

    def _write(self) -> None:
        try:
            self._send([encode(self._hello())])
            self._delivery.run(self._send_responses)
        except (OSError, InflightError) as error:
            _log.info("a front end's connection ended: %s", error)
        finally:
            self._disconnect()  # makes the reader end the connection

    def _send_responses(self, responses: Sequence[Response]) -> None:
        self._send([part for response in responses for part in self._parts(response)])

    def _hello(self) -> Hello:
        description, supervision = self._client.describe(), self._server.supervision
        if supervision is None:
            return Hello(description)
        return Hello(description, supervision.server, supervision.awaited_job)

    def _parts(self, response: Response) -> list[bytes]:
        try:
            return encode_response(response)
        except BadFrame as error:
            failed = StepFailed(f"the response is too large to be sent: {error}")
        with self._lock:
            handle = self._handles.pop(response.request_id, None)
        if handle is not None:
            handle.stop()
        return encode_response(Response(response.request_id, error=failed, is_final=True))

    def _send(self, parts: Sequence[bytes]) -> None:
        """Send the parts in few calls: small parts are joined, and large parts are sent without copying."""
        with self._send_lock:
            for is_large, run in groupby(parts, key=lambda part: len(part) > _LARGE_BYTES):
                for piece in run if is_large else (b"".join(run),):
                    self._socket.sendall(piece)


def _start_thread(name: str, target: Callable[..., object], argument: object) -> None:
    threading.Thread(target=target, args=(argument,), name=name, daemon=True).start()


def _as_inflight_error(error: Exception, what: str, log_extra: dict[str, str] | None = None) -> InflightError:
    if isinstance(error, InflightError):
        return error
    _log.error("%s", what, exc_info=error, extra=log_extra)
    return StepFailed(without_places(f"{what}: {type(error).__name__}: {error}"))

"""The front end's side of the endpoint: an EngineClient for an engine in another process.

The client has one connection, made on first use and made again after it was lost. When a connection ends,
every request in flight on it gets one final response with Unavailable. Any thread may call; responses arrive
on the client's reader thread.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import socket
import struct
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from dataclasses import replace
from typing import TypeVar

from inflight.access_log import AccessLog
from inflight.core.ports import SendResponseCallback, WaitUntilSent
from inflight.core.report.reports import ReportKind, Reports
from inflight.core.request.adapter_command import AdapterCommand, AdapterState
from inflight.core.request.engine_description import EngineDescription
from inflight.core.request.handle import RequestHandle
from inflight.core.request.request import Request
from inflight.core.request.response import Response
from inflight.core.request.sleep import SleepAction
from inflight.core.request.stop import StopReason
from inflight.endpoint.delivery import ResponseTarget
from inflight.endpoint.frames import (
    AdapterStates,
    BadFrame,
    CommandAdapters,
    CommandSleep,
    Drain,
    Drained,
    EngineResponse,
    ReadReports,
    ReadState,
    Reported,
    Retire,
    SleepState,
    State,
    Stop,
    decode_from_engine,
    encode,
    encode_submit,
    read_frame,
    read_response,
)
from inflight.endpoint.path import connect, peer_has_this_parent, reach, read_hello
from inflight.errors import InvalidArgument, NotStarted, Unavailable, Unreachable, error_from_kind
from inflight.log_lines import REQUEST_ID

_log = logging.getLogger(__name__)
_HELLO_TIMEOUT_S = 5.0
# Seconds for which a send may block. The engine reads frames as they arrive; if it does not, it hangs and
# must not block the front end.
_SEND_TIMEOUT_S = 5
# Attempts to send a request: the connection may be lost just before.
_CONNECTIONS_TRIED = 3
# Seconds by which this side waits longer for an answer than the engine's own timeout.
_MARGIN_S = 1.0

_Query = ReadState | CommandAdapters | CommandSleep | ReadReports
_Reply = State | AdapterStates | SleepState | Reported
_Result = TypeVar("_Result", State, AdapterStates, SleepState)


class SocketEngineClient:
    """An `EngineClient` over the Unix socket at `path`."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self._connection: _EngineConnection | None = None
        self._closed = False
        self._is_away = False
        self._was_reached = False
        self._access_log = AccessLog()

    def describe(self) -> EngineDescription:
        """Return the engine's description; raises Unavailable if it cannot be reached."""
        return self._connected().description

    def submit(self, request: Request, on_response: SendResponseCallback) -> RequestHandle:
        """Send `request` to the engine.

        Raises:
            Unavailable: The engine cannot be reached, and `on_response` is not called.
            InvalidArgument: The request is too large to be sent.
        """
        request_id = next(self._ids)
        try:
            parts = encode_submit(replace(request, request_id=request_id))
        except BadFrame as error:
            raise InvalidArgument(f"the request is too large: {error}") from error
        target = ResponseTarget(on_response, self._access_log.enter(request, request_id))
        for _ in range(_CONNECTIONS_TRIED):
            if self._connected().submit(request_id, parts, target):
                return RequestHandle(request_id, self.stop)
        raise Unreachable("the engine closes every connection; a later attempt may succeed")

    def reserve_id(self) -> int:
        """Return an id that no request has or will have."""
        return next(self._ids)

    def stop(self, request_id: int, reason: StopReason, sequence_index: int | None = None) -> None:
        """End a request, or one of its sequences, early; unknown ids are ignored."""
        connection = self._connection
        if connection is not None:
            connection.stop(Stop(request_id, reason, sequence_index))

    def add_outbox(self, wait_until_sent: WaitUntilSent) -> None:
        """Do nothing: an engine in another process does not wait until this process has sent its responses."""

    def state(self, timeout_s: float) -> str:
        """Return the engine's state as JSON; raises Unavailable if the engine does not answer.

        Must not be called from a callback of `submit`, because answers arrive on the thread of the callbacks.
        """
        return self._connected().state(timeout_s)

    def adapters(self, command: AdapterCommand, timeout_s: float) -> tuple[AdapterState, ...]:
        """Send a command to the engine, and return the state of all adapters after it.

        Raises Unavailable if the engine cannot be reached or does not answer in time, and errors of the
        command. Must not be called from a callback of `submit` (see `state`).
        """
        return self._connected().adapters(command, timeout_s)

    def sleep(self, action: SleepAction, timeout_s: float, only_weights: bool = False) -> bool:
        """Send a command about the engine's sleep; return whether the engine sleeps or is falling asleep.

        Raises Unavailable if the engine cannot be reached or does not answer in time, and errors of the command.
        Must not be called from a callback of `submit` (see `state`).
        """
        return self._connected().sleep(action, timeout_s, only_weights)

    def reports(self, kind: ReportKind, timeout_s: float | None) -> Reports:
        """Return the reports since the last call; raises Unavailable if the engine cannot be reached.

        Must not be called from a callback of `submit` (see `state`).
        """
        return self._connected().reports(kind, timeout_s)

    def close(self) -> None:
        """Close the connection; requests in flight get Unavailable. Idempotent."""
        with self._lock:
            self._closed = True
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        self._access_log.close()

    def _connected(self) -> _EngineConnection:
        with self._lock:
            if self._closed:
                raise Unavailable("the server is shutting down")
            if self._connection is None or self._connection.ended:
                self._connection = self._connect()
            return self._connection

    def _connect(self) -> _EngineConnection:
        """Make a new connection. Only the first of consecutive failures is logged, with the path."""
        try:
            made = _EngineConnection(self._path, self._access_log)
        except Unreachable as error:
            if not self._was_reached and isinstance(error.__cause__, FileNotFoundError):
                self._log_once("waiting for the engine, which will listen at %s", self._path)
                raise NotStarted(*error.args) from error
            self._log_once("no engine at %s: %s", self._path, error)
            raise
        self._is_away, self._was_reached = False, True
        return made

    def _log_once(self, message: str, *arguments: object) -> None:
        if not self._is_away:
            _log.info(message, *arguments)
        self._is_away = True


class _EngineConnection:
    """One connection to the engine, from Hello to its end."""

    def __init__(self, path: str, access_log: AccessLog) -> None:
        self._path = path
        self._access_log = access_log
        self._lock = threading.Lock()  # guards the targets and the unanswered queries
        self._send_lock = threading.Lock()
        self._targets: dict[int, ResponseTarget] = {}
        self._queries: dict[int, Future[_Reply]] = {}
        self._query_ids = itertools.count(1)
        self.ended = False
        self._is_closing = False
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self.description = self._greet()
        except (OSError, BadFrame) as error:
            self._socket.close()
            raise Unreachable(
                f"the engine cannot be reached ({_why(error)}): check that the model that holds it (tensorrt_llm, "
                "or that of tensorrt_llm_model_name or tensorrt_llm_draft_model_name) is loaded and READY, and "
                "that both models have the same engine_endpoint"
            ) from error
        self._reader = threading.Thread(target=self._read, name="endpoint-client", daemon=True)
        self._reader.start()

    def _greet(self) -> EngineDescription:
        self._socket.settimeout(_HELLO_TIMEOUT_S)
        description = connect(self._socket, self._path).description
        self._socket.settimeout(None)
        timeout = struct.pack("ll", _SEND_TIMEOUT_S, 0)  # struct timeval
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        return description

    def submit(self, request_id: int, parts: Sequence[bytes | memoryview], target: ResponseTarget) -> bool:
        """Send a request; return whether `target` gets a response. If not, the connection has ended."""
        with self._lock:
            if self.ended:
                return False
            self._targets[request_id] = target
        if self._send(*parts):
            return True
        with self._lock:
            self.ended = True  # the reader may be busy and notice later
            return self._targets.pop(request_id, None) is None  # then the reader has answered it

    def stop(self, stop: Stop) -> None:
        if stop.request_id in self._targets:
            self._send(encode(stop))

    def state(self, timeout_s: float) -> str:
        query = ReadState(next(self._query_ids), timeout_s, REQUEST_ID.get())
        return self._result(query, State, "its state").text

    def adapters(self, command: AdapterCommand, timeout_s: float) -> tuple[AdapterState, ...]:
        query = CommandAdapters(next(self._query_ids), command, timeout_s, REQUEST_ID.get())
        return self._result(
            query, AdapterStates, f"whether it could {command.action.value} adapters"
        ).adapters

    def sleep(self, action: SleepAction, timeout_s: float, only_weights: bool) -> bool:
        query = CommandSleep(next(self._query_ids), action, timeout_s, only_weights, REQUEST_ID.get())
        return self._result(query, SleepState, "whether it sleeps").is_asleep

    def reports(self, kind: ReportKind, timeout_s: float | None) -> Reports:
        reported = self._ask(ReadReports(next(self._query_ids), kind, timeout_s), "what it has done")
        assert isinstance(reported, Reported), f"got {type(reported).__name__}"
        return reported.reports

    def _result(self, query: _Query, kind: type[_Result], what: str) -> _Result:
        """Send a query and return its answer, which is of class `kind`; raises the error that the answer holds."""
        answer = self._ask(query, what)
        assert isinstance(answer, kind), f"got {type(answer).__name__}"
        if answer.error_kind:
            raise error_from_kind(answer.error_kind, answer.error_message)
        return answer

    def _ask(self, query: _Query, what: str) -> _Reply:
        """Send a query and wait for its answer, a little longer than the query's own timeout."""
        timeout_s = query.timeout_s
        answer: Future[_Reply] = Future()
        with self._lock:
            if self.ended:
                raise self._lost()
            self._queries[query.query_id] = answer
        self._send(encode(query))
        try:
            return answer.result(None if timeout_s is None else timeout_s + _MARGIN_S)
        except NotInTime:
            raise Unreachable(f"the engine did not report {what} in {timeout_s:g} s") from None
        finally:
            with self._lock:
                self._queries.pop(query.query_id, None)

    def close(self) -> None:
        self._is_closing = True
        self._shut()
        if threading.current_thread() is not self._reader:
            self._reader.join()

    def _send(self, *parts: bytes | memoryview) -> bool:
        """Send a frame; return False if the engine closed the connection before it read the whole frame."""
        try:
            with self._send_lock:
                for part in parts:
                    self._socket.sendall(part)
        except (BrokenPipeError, ConnectionResetError):
            self._shut()
            return False
        except OSError as error:
            _log.warning("the engine at %s takes no requests: %s", self._path, error)
            self._shut()  # the reader answers all requests in flight, including this one
        return True

    def _shut(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    # ---------------------------------------------------------------- reader thread

    def _read(self) -> None:
        try:
            while (body := read_frame(self._socket)) is not None:
                frame = decode_from_engine(body)
                if isinstance(frame, EngineResponse):
                    self._deliver(read_response(self._socket, frame))
                elif isinstance(frame, _Reply):
                    self._answer(frame)
        except (OSError, BadFrame) as error:
            _log.warning("the connection to the engine broke: %s", error)
        finally:
            self._end()

    def _deliver(self, response: Response) -> None:
        with self._lock:
            if response.is_final:
                target = self._targets.pop(response.request_id, None)
            else:
                target = self._targets.get(response.request_id)
        if target is not None:
            target.take(response)

    def _answer(self, frame: _Reply) -> None:
        with self._lock:
            answer = self._queries.pop(frame.query_id, None)
        if answer is not None:
            answer.set_result(frame)

    def _end(self) -> None:
        self._shut()
        with self._lock:
            self.ended = True
            unanswered, answers = list(self._targets.items()), list(self._queries.values())
            self._targets.clear()
            self._queries.clear()
        for answer in answers:
            answer.set_exception(self._lost())
        for request_id, target in unanswered:
            response = Response(request_id, error=self._lost(), is_final=True)
            target.take(response)
            if not self._is_closing:  # otherwise the engine goes on, and writes the line
                self._access_log.leave(target.entry, response)
        self._socket.close()

    def _lost(self) -> Unreachable:
        return Unreachable(
            "the connection to the engine was lost while the request was in flight; the server's log may have "
            "the reason, and a later attempt may succeed"
        )


def _why(error: OSError | BadFrame) -> str:
    """Return an error's reason, without the path in an OSError."""
    return error.strerror or type(error).__name__ if isinstance(error, OSError) else str(error)


def drain_engine(path: str, timeout_s: float) -> bool:
    """Notify the engine at `path` that its server is shutting down, and wait until all requests are answered.

    Args:
        path: Path of the engine's socket.
        timeout_s: Requests still in flight after this many seconds end with UNAVAILABLE.

    Returns:
        Whether the engine has answered all requests; False if no engine can be reached.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout_s + 2 * _HELLO_TIMEOUT_S)
        try:
            connect(connection, path)
            connection.sendall(encode(Drain(timeout_s)))
            while (body := read_frame(connection)) is not None:
                if isinstance(decode_from_engine(body), Drained):
                    return True
        except (OSError, BadFrame):
            pass
    return False


def retire_predecessor(path: str, timeout_s: float, server: str = "", patience_s: float = 30.0) -> bool:
    """End the engine at `path` if its process has the same parent as this one, or it belongs to `server`.

    tritonserver may start a model's next process while the previous process is still alive. This function
    asks the previous process to finish its requests and free its resources, and waits until it has ended.
    Engines of other servers are not touched.

    Args:
        path: Path of the engine's socket.
        timeout_s: How long the engine's requests may continue, in seconds.
        server: The tritonserver of this process, as in `Hello.server`, for engines that are not child
            processes of their tritonserver.
        patience_s: How many seconds after `timeout_s` to wait for the engine's end.

    Returns:
        Whether there was such an engine and it has ended.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout_s + patience_s)
        try:
            reach(connection, path)
            if not (peer_has_this_parent(connection) or (server and read_hello(connection).server == server)):
                return False
            _log.warning("asking the engine at %s to end, because this one replaces it", path)
            connection.sendall(encode(Retire(timeout_s)))
            while read_frame(connection) is not None:
                pass
            return True
        except (OSError, BadFrame):
            return False

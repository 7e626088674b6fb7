"""gRPC streams that serve one request after another, for threads.

A request has a stream to itself while it is in flight: so it can be cancelled alone, an error is its own, and
tritonserver 2.51 never writes two requests' responses to one stream, which can end it. A stream whose request has
ended is kept for the next one, because opening and ending hundreds a minute has ended that server too.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator

import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException

from inflight_client.errors import ServerError, server_error
from inflight_client.tensors import PARAMETERS, Call, is_final


class EndedIdle(Exception):
    """A stream that was kept for another request had ended meanwhile: it has to be sent again on a new one."""


class Streams:
    """The streams of one client: as many as it has had requests in flight at a time. Any thread."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._lock = threading.Lock()
        self._idle: list[_Stream] = []
        self._in_flight: set[_Stream] = set()

    def ask(self, call: Call) -> Generator[grpc.InferResult, None, None]:
        """Each response to a request, as they come; raises ServerError.

        A request whose iterator is closed before its last response is cancelled, and its stream ended.
        """
        try:
            yield from self._ask(call, self._take())
        except EndedIdle:
            yield from self._ask(call, self._add(_Stream(self._url)))

    def close(self) -> None:
        """End the streams without a request. Idempotent."""
        with self._lock:
            idle, self._idle = self._idle, []
        for stream in idle:
            stream.close()

    def cancel(self) -> None:
        """End all streams, and so cancel what is in flight: for the end of the program."""
        with self._lock:
            in_flight = list(self._in_flight)
        for stream in in_flight:
            stream.close()
        self.close()

    def _ask(self, call: Call, stream: _Stream) -> Generator[grpc.InferResult, None, None]:
        try:
            yield from stream.ask(call)
        finally:
            with self._lock:
                self._in_flight.discard(stream)
                if stream.is_idle:
                    self._idle.append(stream)
            if not stream.is_idle:
                stream.close()

    def _take(self) -> _Stream:
        with self._lock:
            stream = self._idle.pop() if self._idle else None
        return self._add(stream or _Stream(self._url))

    def _add(self, stream: _Stream) -> _Stream:
        with self._lock:
            self._in_flight.add(stream)
        return stream


class _Stream:
    """One stream, on a connection of its own as tritonclient's are.

    Attributes:
        is_idle: Whether it can take a request, as far as is known.
    """

    def __init__(self, url: str) -> None:
        self.is_idle = True
        self._is_used = self._is_closed = False
        self._url = url
        self._connection = grpc.InferenceServerClient(url)
        responses: queue.SimpleQueue[tuple[grpc.InferResult | None, Exception | None]] = queue.SimpleQueue()
        self._responses = responses
        # tritonclient's thread inherits whether it is a daemon. If it were not, an exception that leaves a loop
        # over `stream`, and so keeps the iterator alive in its traceback, would stop the interpreter from exiting
        # for ever.
        starter = threading.Thread(
            target=self._connection.start_stream,
            args=(lambda result, error: responses.put((result, error)),),
            daemon=True,
        )
        starter.start()
        starter.join()

    def ask(self, call: Call) -> Generator[grpc.InferResult, None, None]:
        """As `Streams.ask`; raises EndedIdle for one that has served others and not begun to answer this."""
        may_have_ended, self._is_used, self.is_idle = self._is_used, True, False
        try:
            self._connection.async_stream_infer(
                call.model,
                call.inputs,
                outputs=call.outputs,
                request_id=call.request_id,
                enable_empty_final_response=True,
                parameters=PARAMETERS,
            )
        except InferenceServerException as error:
            # A stream that broke before the request was sent has reported why, and that is the better reason.
            _, reported = (None, None) if self._responses.empty() else self._responses.get()
            raise self._error(reported or error, may_have_ended) from error
        while not self.is_idle:
            result, error = self._responses.get()
            if result is None:
                raise self._error(error, may_have_ended)
            may_have_ended = False
            self.is_idle = is_final(result)
            yield result

    def _error(self, error: Exception | None, may_have_ended: bool) -> Exception:
        # An error of gRPC has a status and ends the stream; a refusal of Triton's has none, and ends the request.
        self.is_idle = isinstance(error, InferenceServerException) and error.status() is None
        if may_have_ended and not self.is_idle:
            return EndedIdle()
        return server_error(error, self._url) if error else ServerError("UNKNOWN", "an empty response")

    def close(self) -> None:
        """Cancel what is in flight, and end the stream. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._connection.stop_stream(cancel_requests=True)
        self._connection.close()

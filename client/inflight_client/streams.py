"""gRPC streams that serve one request after another, for threads.

Each request in flight has a stream to itself. So a request can be cancelled without others, and an error on
a stream belongs to one request. Besides, tritonserver 2.51 can crash when it writes responses of two
requests to one stream. The stream of an ended request is reused, because opening and closing hundreds of
streams per minute can also crash tritonserver 2.51.
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
    """A reused stream had already ended, so that the request must be sent again on a new stream."""


class Streams:
    """The streams of one client. There are as many as it has had concurrent requests. Any thread."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._lock = threading.Lock()
        self._idle: list[_Stream] = []
        self._in_flight: set[_Stream] = set()

    def ask(self, call: Call) -> Generator[grpc.InferResult, None, None]:
        """Yield the responses to a request as they arrive; raises ServerError.

        If the iterator is closed before the last response, the request is cancelled and its stream is closed.
        """
        try:
            yield from self._ask(call, self._take())
        except EndedIdle:
            yield from self._ask(call, self._add(_Stream(self._url)))

    def close(self) -> None:
        """Close the streams without requests. Idempotent."""
        with self._lock:
            idle, self._idle = self._idle, []
        for stream in idle:
            stream.close()

    def cancel(self) -> None:
        """Close all streams, which cancels requests in flight. Called at the end of the program."""
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
    """One gRPC stream, with a connection of its own, as tritonclient requires.

    Attributes:
        is_idle: Whether the stream can take a request, as far as the client knows.
    """

    def __init__(self, url: str) -> None:
        self.is_idle = True
        self._is_used = self._is_closed = False
        self._url = url
        self._connection = grpc.InferenceServerClient(url)
        responses: queue.SimpleQueue[tuple[grpc.InferResult | None, Exception | None]] = queue.SimpleQueue()
        self._responses = responses
        # tritonclient's thread inherits the daemon flag. Without the flag the interpreter could not exit after an
        # exception has left a loop over `stream`, because the exception's traceback keeps the iterator alive.
        starter = threading.Thread(
            target=self._connection.start_stream,
            args=(lambda result, error: responses.put((result, error)),),
            daemon=True,
        )
        starter.start()
        starter.join()

    def ask(self, call: Call) -> Generator[grpc.InferResult, None, None]:
        """Yield the responses to a request like `Streams.ask`.

        Raises EndedIdle if the stream has served earlier requests and ends before its first response to this
        one.
        """
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
            # If the stream broke before the request was sent, it has reported the reason, which is a better
            # error.
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
        # A gRPC error has a status and ends the stream. An error of Triton has no status and ends only the
        # request.
        self.is_idle = isinstance(error, InferenceServerException) and error.status() is None
        if may_have_ended and not self.is_idle:
            return EndedIdle()
        return server_error(error, self._url) if error else ServerError("UNKNOWN", "an empty response")

    def close(self) -> None:
        """Cancel a request in flight, and close the stream. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._connection.stop_stream(cancel_requests=True)
        self._connection.close()

"""gRPC streams to a tritonserver, each of which serves one request after another.

Each request in flight has a stream to itself, so that it can be cancelled without ending other requests, and an
error on a stream belongs to one request. Besides, tritonserver 2.51 can crash when it writes responses of two
requests to one stream. Streams are reused, because opening and closing hundreds of streams per minute can
also crash tritonserver 2.51. Runs on one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Protocol

import grpc
from numpy.typing import NDArray
from tritonclient.grpc import InferenceServerException  # pyright: ignore[reportMissingTypeStubs]  it has no types

InferArguments = dict[str, Any]
"""Arguments of one request in tritonclient's `stream_infer`."""


class InferResult(Protocol):
    """The methods of tritonclient's `InferResult` that are used here; tritonclient has no types."""

    def as_numpy(self, name: str) -> NDArray[Any] | None:
        """Return an output tensor; None if it is not in the response."""
        ...

    def get_response(self) -> Any:
        """Return KServe's ModelInferResponse."""
        ...


class Connection(Protocol):
    """The methods of tritonclient's `aio.InferenceServerClient` that are used here; tritonclient has no types."""

    async def is_model_ready(self, model_name: str) -> Any:
        """Return whether the server can run the model."""
        ...

    async def get_model_config(self, model_name: str, *, as_json: bool) -> Any:
        """Return KServe's ModelConfigResponse."""
        ...

    def stream_infer(self, inputs_iterator: AsyncIterator[InferArguments]) -> Any:
        """Return an asynchronous iterator of (result, error). The iterator can be cancelled."""
        ...

    async def close(self) -> None:
        """Close the channel."""
        ...


class KServeStreams:
    """Pool of one connection's gRPC streams. It grows to the largest number of requests in flight at a time."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._idle: list[_KServeStream] = []

    async def ask(self, asked: InferArguments) -> AsyncGenerator[tuple[InferResult, bool], None]:
        """Yield (response, whether it is the last) for each response to a request; end early if the stream ends.

        Closing the generator early cancels the request and ends the stream.

        Raises:
            InferenceServerException, grpc.RpcError: The server refuses the request, or cannot be reached.
        """
        stream = self._idle.pop() if self._idle else _KServeStream(self._connection)
        try:
            try:
                async for response in stream.ask(asked):
                    yield response
            except _EndedIdle:
                stream.cancel()
                stream = _KServeStream(self._connection)
                async for response in stream.ask(asked):
                    yield response
        finally:
            if stream.is_idle:
                self._idle.append(stream)
            else:
                stream.cancel()


class _EndedIdle(Exception):
    """A reused stream had already ended, so that the request must be sent again on a new stream."""


class _KServeStream:
    """A gRPC stream to the server, which serves one request after another.

    Attributes:
        is_idle: Whether the stream can take a request, as far as this side knows.
    """

    def __init__(self, connection: Connection) -> None:
        self.is_idle = True
        self._is_used = False
        self._requests: asyncio.Queue[InferArguments | None] = asyncio.Queue()
        self._responses = connection.stream_infer(self._sent())

    async def ask(self, asked: InferArguments) -> AsyncIterator[tuple[InferResult, bool]]:
        may_have_ended, self._is_used, self.is_idle = self._is_used, True, False
        self._requests.put_nowait(asked)
        while not self.is_idle:
            try:
                result, refusal = await self._responses.__anext__()
            except (StopAsyncIteration, InferenceServerException, grpc.RpcError) as error:
                if may_have_ended:
                    raise _EndedIdle from error
                if isinstance(error, StopAsyncIteration):
                    return
                raise
            may_have_ended = False
            if refusal is not None:  # the error ends the request and not the stream
                self.is_idle = True
                raise refusal
            self.is_idle = result.get_response().parameters["triton_final_response"].bool_param
            yield result, self.is_idle

    def cancel(self) -> None:
        """End the stream, which cancels its request in flight."""
        self._responses.cancel()
        self._requests.put_nowait(None)

    async def _sent(self) -> AsyncIterator[InferArguments]:
        while (asked := await self._requests.get()) is not None:
            yield asked

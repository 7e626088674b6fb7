"""gRPC streams to a tritonserver that serve one request after another.

A request has a stream to itself while it is in flight: so it can be cancelled alone, an error is its own, and
tritonserver 2.51 never writes two requests' responses to one stream, which can end it. A stream whose request has
ended is kept for the next one, because opening and ending hundreds a minute has ended that server too. One event
loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import grpc
import tritonclient.grpc.aio as triton
from tritonclient.grpc import InferResult
from tritonclient.utils import InferenceServerException

InferArguments = dict[str, Any]
"""A request by the names of tritonclient's `async_stream_infer`."""


class KServeStreams:
    """The streams of one connection: as many as there have been requests in flight at a time."""

    def __init__(self, connection: triton.InferenceServerClient) -> None:
        self._connection = connection
        self._idle: list[_KServeStream] = []

    async def ask(self, asked: InferArguments) -> AsyncGenerator[tuple[InferResult, bool], None]:
        """Each response to a request, and whether it is the last; ends without a last one if the stream does.

        A request whose iterator is closed before that is cancelled, and its stream ended.

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
    """A stream that was kept for another request had ended meanwhile: it has to be sent again on a new one."""


class _KServeStream:
    """A gRPC stream to the server, which serves one request after another.

    Attributes:
        is_idle: Whether it can take a request, as far as is known.
    """

    def __init__(self, connection: triton.InferenceServerClient) -> None:
        self.is_idle = True
        self._is_used = False
        self._requests: asyncio.Queue[InferArguments | None] = asyncio.Queue()
        # tritonclient does not annotate what it returns: an asynchronous iterator that can be cancelled.
        self._responses: Any = connection.stream_infer(self._sent())

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
            if refusal is not None:  # of this request; the stream goes on
                self.is_idle = True
                raise refusal
            self.is_idle = result.get_response().parameters["triton_final_response"].bool_param
            yield result, self.is_idle

    def cancel(self) -> None:
        """End it, and with it what is in flight."""
        self._responses.cancel()
        self._requests.put_nowait(None)

    async def _sent(self) -> AsyncIterator[InferArguments]:
        while (asked := await self._requests.get()) is not None:
            yield asked

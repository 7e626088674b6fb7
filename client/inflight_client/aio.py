"""The client for asyncio: the methods of `client.Client` as coroutines. Must be used in one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import grpc
import tritonclient.grpc.aio as grpc_aio
from tritonclient.utils import InferenceServerException

from inflight_client.errors import ServerError, server_error
from inflight_client.results import Adapter, Completion, Delta, completion
from inflight_client.streams import EndedIdle
from inflight_client.tensors import (
    IDS_MODEL,
    PARAMETERS,
    TEXT_MODEL,
    Call,
    Prompt,
    adapters_call,
    generate_call,
    is_final,
    name_or_id,
    read_adapters,
    read_delta,
    read_state,
    state_call,
    stop_call,
)

_T = TypeVar("_T")


class AsyncClient:
    """A client of the server's gRPC port; as an asynchronous context manager it closes the connection.

    It keeps as many gRPC streams open as it has had concurrent requests. Use one client for many requests.

    Args:
        url: host:port.
        model: The model for all requests; by default `ensemble` for text and `tensorrt_llm` for ids.
    """

    def __init__(self, url: str = "localhost:8001", model: str | None = None) -> None:
        self._url = url
        self._model = model
        self._in_flight: set[Call] = set()
        self._connection: grpc_aio.InferenceServerClient | None = None  # created inside of the event loop
        self._idle: list[_Stream] = []

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; requests in flight are cancelled. Idempotent."""
        connection, self._connection = self._connection, None
        idle, self._idle = self._idle, []
        for stream in idle:
            stream.close()
        if connection is not None:
            await connection.close()

    async def generate(
        self, prompt: Prompt, max_tokens: int = 128, *, request_id: str | None = None, **options: Any
    ) -> Completion:
        """Generate an answer, as `Client.generate` does. Cancelling the task cancels the request."""
        call = self._call(prompt, False, request_id, max_tokens, options)
        return completion([delta async for delta in self._deltas(call)])

    def stream(
        self, prompt: Prompt, max_tokens: int = 128, *, request_id: str | None = None, **options: Any
    ) -> AsyncIterator[Delta]:
        """Return the answer as a stream, as `Client.stream` does.

        `aclose()` of the iterator cancels the request.
        """
        return self._deltas(self._call(prompt, True, request_id, max_tokens, options))

    async def cancel(self, request_id: str, model: str | None = None) -> None:
        """Cancel a request in flight, as `Client.cancel` does."""
        own = [call.model for call in list(self._in_flight) if call.request_id == request_id]
        model = model or (own[0] if own else self._model or TEXT_MODEL)
        async for _ in self._deltas(stop_call(model, request_id)):
            pass

    async def state(self, model: str | None = None) -> dict[str, Any]:
        """Return the state of the server's batcher, as `Client.state` does."""
        call = state_call(model or self._model or IDS_MODEL)
        (state,) = [state async for state in self._received(call, read_state)]
        return state

    async def adapters(self, model: str | None = None) -> tuple[Adapter, ...]:
        """Return the server's LoRA adapters, as `Client.adapters` does."""
        return await self._command(model, command="list")

    async def load_adapter(
        self, name: str, path: str | None = None, model: str | None = None
    ) -> tuple[Adapter, ...]:
        """Load an adapter ahead of its first request, as `Client.load_adapter` does."""
        return await self._command(model, command="load", name=name, path=path)

    async def unload_adapter(self, adapter: str | int, model: str | None = None) -> tuple[Adapter, ...]:
        """Free an adapter's memory once it is unused, as `Client.unload_adapter` does."""
        return await self._command(model, command="unload", **name_or_id(adapter))

    async def _command(self, model: str | None, **command: Any) -> tuple[Adapter, ...]:
        call = adapters_call(model or self._model or IDS_MODEL, **command)
        (adapters,) = [each async for each in self._received(call, read_adapters)]
        return adapters

    def _call(
        self,
        prompt: Prompt,
        streaming: bool,
        request_id: str | None,
        max_tokens: int,
        options: dict[str, Any],
    ) -> Call:
        return generate_call(
            prompt, streaming, {"max_tokens": max_tokens, **options}, self._model, request_id
        )

    def _deltas(self, call: Call) -> AsyncIterator[Delta]:
        return self._received(call, lambda result: read_delta(result, call))

    async def _received(
        self, call: Call, read: Callable[[grpc_aio.InferResult], _T | None]
    ) -> AsyncIterator[_T]:
        stream = self._idle.pop() if self._idle else self._new_stream()
        self._in_flight.add(call)
        try:
            try:
                async for said in _read(stream, call, read):
                    yield said
            except EndedIdle:
                stream.close()
                stream = self._new_stream()
                async for said in _read(stream, call, read):
                    yield said
        finally:
            self._in_flight.discard(call)
            if stream.is_idle:
                self._idle.append(stream)
            else:
                stream.close()

    def _new_stream(self) -> _Stream:
        if self._connection is None:
            self._connection = grpc_aio.InferenceServerClient(self._url)
        return _Stream(self._connection, self._url)


async def _read(
    stream: _Stream, call: Call, read: Callable[[grpc_aio.InferResult], _T | None]
) -> AsyncIterator[_T]:
    async for result in stream.ask(call):
        said = read(result)
        if said is not None:
            yield said


class _Stream:
    """A gRPC stream, which serves one request after another; see `streams.py`.

    Attributes:
        is_idle: Whether the stream can take a request, as far as the client knows.
    """

    def __init__(self, connection: grpc_aio.InferenceServerClient, url: str) -> None:
        self.is_idle = True
        self._is_used = False
        self._url = url
        self._calls: asyncio.Queue[Call | None] = asyncio.Queue()
        # tritonclient has no annotation for the result, an asynchronous iterator that can be cancelled.
        self._responses: Any = connection.stream_infer(self._requests())

    async def ask(self, call: Call) -> AsyncIterator[grpc_aio.InferResult]:
        """Yield the responses to a request as they arrive; raises ServerError.

        Raises EndedIdle if the stream has served earlier requests and ends before its first response to this
        one.
        """
        may_have_ended, self._is_used, self.is_idle = self._is_used, True, False
        self._calls.put_nowait(call)
        while not self.is_idle:
            try:
                result, refusal = await self._responses.__anext__()
            except (StopAsyncIteration, InferenceServerException, grpc.RpcError) as error:
                if may_have_ended:
                    raise EndedIdle from error
                if isinstance(error, StopAsyncIteration):
                    message = f"{self._url} closed the stream before its last response"
                    raise ServerError("UNAVAILABLE", message) from None
                raise server_error(error, self._url) from error
            may_have_ended = False
            self.is_idle = refusal is not None or is_final(result)
            if refusal is not None:  # an error of this request only; the stream continues
                raise server_error(refusal, self._url)
            yield result

    def close(self) -> None:
        """Cancel a request in flight, and end the stream."""
        self._responses.cancel()
        self._calls.put_nowait(None)

    async def _requests(self) -> AsyncIterator[dict[str, Any]]:
        while (call := await self._calls.get()) is not None:
            yield {
                "model_name": call.model,
                "inputs": call.inputs,
                "outputs": call.outputs,
                "request_id": call.request_id,
                "parameters": {"triton_enable_empty_final_response": True, **PARAMETERS},
            }

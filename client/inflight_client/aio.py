"""The client for asyncio: `client.Client`'s methods, awaited. Belongs to one event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import grpc
import tritonclient.grpc.aio as grpc_aio
from tritonclient.utils import InferenceServerException

from inflight_client.client import STREAM_HEADERS
from inflight_client.errors import ServerError, server_error
from inflight_client.results import Completion, Delta, completion
from inflight_client.tensors import (
    IDS_MODEL,
    TEXT_MODEL,
    Call,
    Prompt,
    delta_of,
    generate_call,
    is_final,
    state_call,
    state_of,
    stop_call,
)

_T = TypeVar("_T")


class AsyncClient:
    """Talks to the server's gRPC port; also an asynchronous context manager, which closes the connection.

    Args:
        url: host:port.
        model: Serves all requests; by default `ensemble` does for text and `tensorrt_llm` for ids.
    """

    def __init__(self, url: str = "localhost:8001", model: str | None = None) -> None:
        self._url = url
        self._model = model
        self._in_flight: set[Call] = set()
        self._connection: grpc_aio.InferenceServerClient | None = None  # made inside of the event loop

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; requests in flight are cancelled. Idempotent."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def generate(
        self, prompt: Prompt, max_tokens: int = 128, *, request_id: str | None = None, **options: Any
    ) -> Completion:
        """As `Client.generate`; cancelling the task cancels the request."""
        call = self._call(prompt, False, request_id, max_tokens, options)
        return completion([delta async for delta in self._deltas(call)])

    def stream(
        self, prompt: Prompt, max_tokens: int = 128, *, request_id: str | None = None, **options: Any
    ) -> AsyncIterator[Delta]:
        """As `Client.stream`; `aclose()` of the iterator cancels the request."""
        return self._deltas(self._call(prompt, True, request_id, max_tokens, options))

    async def cancel(self, request_id: str, model: str | None = None) -> None:
        """As `Client.cancel`."""
        own = [call.model for call in list(self._in_flight) if call.request_id == request_id]
        model = model or (own[0] if own else self._model or TEXT_MODEL)
        async for _ in self._deltas(stop_call(model, request_id)):
            pass

    async def state(self, model: str | None = None) -> dict[str, Any]:
        """As `Client.state`."""
        call = state_call(model or self._model or IDS_MODEL)
        (state,) = [state async for state in self._received(call, state_of)]
        return state

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
        return self._received(call, lambda result: delta_of(result, call))

    async def _received(
        self, call: Call, read: Callable[[grpc_aio.InferResult], _T | None]
    ) -> AsyncIterator[_T]:
        if self._connection is None:
            self._connection = grpc_aio.InferenceServerClient(self._url)
        self._in_flight.add(call)
        # tritonclient declares neither that it returns something nor what.
        responses: Any = self._connection.stream_infer(_once(call), headers=STREAM_HEADERS)
        finished = False
        try:
            async for result, error in responses:
                if error is not None:
                    raise server_error(error, self._url)
                finished = is_final(result)
                said = read(result)
                if said is not None:
                    yield said
            if not finished:
                raise ServerError("UNAVAILABLE", f"{self._url} closed the stream before its last response")
        except (InferenceServerException, grpc.RpcError) as error:
            raise server_error(error, self._url) from error
        finally:
            self._in_flight.discard(call)
            responses.cancel()


async def _once(call: Call) -> AsyncIterator[dict[str, Any]]:
    yield {
        "model_name": call.model,
        "inputs": call.inputs,
        "outputs": call.outputs,
        "request_id": call.request_id,
        "parameters": {"triton_enable_empty_final_response": True},
    }

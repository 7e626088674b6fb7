"""A client that disconnects while its prompts are submitted: all of its prompts end, and no more start."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from inflight.core.ports import EngineClient, SendResponseCallback
from inflight.core.request.handle import RequestHandle
from inflight.core.request.request import Request
from inflight.core.request.stop import StopReason
from inflight.errors import Cancelled
from inflight.openai.answers import Piece
from inflight.openai.context import answer_stream, answer_whole
from inflight.openai.request_ids import RequestIds, passage_of
from inflight.prompt import Prompt, ReplyOptions
from inflight.serving.engine_session import EngineSession
from tests.core.factories import make_request


class BlockingClient:
    """An engine client that never answers, and takes the third request only after the first is stopped."""

    def __init__(self) -> None:
        self.num_submitted = 0
        self.stopped: list[int] = []
        self.takes_third = threading.Event()
        self._first_is_stopped = threading.Event()

    def submit(self, request: Request, on_response: SendResponseCallback) -> RequestHandle:
        self.num_submitted += 1
        if self.num_submitted == 3:
            self.takes_third.set()
            assert self._first_is_stopped.wait(60), "nobody has noticed that the client is gone"
        return RequestHandle(self.num_submitted, self.stop)

    def stop(self, request_id: int, reason: StopReason, sequence_index: int | None = None) -> None:
        assert reason is StopReason.CANCELLED and sequence_index is None
        self.stopped.append(request_id)
        self._first_is_stopped.set()


async def no_events(pieces: AsyncIterator[list[Piece]]) -> AsyncIterator[bytes]:
    async for _ in pieces:
        yield b""


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_client_lost_during_submission_stops_its_prompts(is_streamed: bool) -> None:
    client = BlockingClient()
    session = EngineSession(cast(EngineClient, client))

    async def receive() -> dict[str, Any]:
        await asyncio.to_thread(client.takes_third.wait)
        return {"type": "http.disconnect"}

    scope: dict[str, Any] = {"type": "http", "headers": []}

    async def identified(*_: Any) -> None:
        """Do nothing: `RequestIds` has given the request its id."""

    async def ask() -> None:
        await RequestIds(identified)(scope, receive, identified)
        prompt = Prompt(make_request(0), ReplyOptions(frozenset()))
        prepared: Any = SimpleNamespace(
            prompts=[(prompt, None)] * 10, asked=None, usage=None, model_name="m", receipt=None
        )
        context: Any = SimpleNamespace(session=session)
        request: Any = SimpleNamespace(receive=receive, scope=scope)
        if is_streamed:
            await answer_stream(context, request, prepared, no_events)
        else:
            await answer_whole(context, request, prepared)

    with pytest.raises(Cancelled, match="by its client"):
        asyncio.run(ask())
    session.close()
    assert client.num_submitted == 3 and passage_of(scope).reaches_engine
    assert sorted(client.stopped) == [1, 2, 3]

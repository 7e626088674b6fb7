"""Requests that the server cancels when it ends, because their time is over: each gets an error and its end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from inflight.openai.messages.answers import MessageStream
from inflight.openai.request_ids import RequestIds
from inflight.openai.streaming import EventStream, Watcher

_MESSAGE = "the server is shutting down"


async def messages_of_cancelled(app: ASGIApp) -> list[dict[str, Any]]:
    """Return what the application sends if its request is cancelled while it waits."""
    sent: list[dict[str, Any]] = []
    scope = {"type": "http", "path": "/v1/completions", "headers": [(b"x-request-id", b"mine")]}

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return await asyncio.get_running_loop().create_future()

    task = asyncio.create_task(cast(Any, app(scope, receive, send)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return sent


def test_a_request_without_an_answer_gets_503() -> None:
    async def waiting(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()

    head, body = asyncio.run(messages_of_cancelled(RequestIds(waiting)))
    assert head["status"] == 503
    assert (b"x-request-id", b"mine") in head["headers"]
    error = json.loads(body["body"])["error"]
    assert (error["message"], error["code"]) == (_MESSAGE, "unavailable")


@pytest.mark.parametrize("stream", [EventStream, MessageStream])
def test_a_stream_gets_an_error_and_its_end(stream: type[EventStream]) -> None:
    async def events() -> AsyncIterator[bytes]:
        yield b"data: {}\n\n"
        await asyncio.get_running_loop().create_future()

    has_closed: list[bool] = []
    watcher = cast(Watcher, SimpleNamespace(close=lambda: has_closed.append(True)))
    head, first, error, end = asyncio.run(messages_of_cancelled(stream(events(), watcher)))
    assert head["status"] == 200 and first["body"] == b"data: {}\n\n"
    told = json.loads(error["body"].partition(b"data: ")[2])
    assert told["error"]["message"] == _MESSAGE
    assert end["body"] == stream.end and not end["more_body"]
    assert has_closed == [True]

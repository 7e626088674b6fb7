"""Sends requests to the application in the same process, through its middleware but without a connection."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from inflight.access_log import random_id
from inflight.openai.batches.lines import BatchAnswer, BatchRequest
from inflight.openai.middleware import OWNER
from inflight.openai.request_ids import HEADER

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message

_log = logging.getLogger(__name__)


async def call_application(app: ASGIApp, request: BatchRequest, owner: bytes) -> BatchAnswer:
    """Return the application's answer; if this task is cancelled, so is the request.

    Args:
        app: The application.
        request: The request.
        owner: Digest of the API key to which the request belongs; empty if the server needs none.
    """
    request_id = random_id()
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": request.url,
        "raw_path": request.url.encode(),
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (HEADER.encode(), request_id.encode())],
        OWNER: owner,
    }
    body = [request.encoded_body()]
    status, parts = 500, list[bytes]()

    async def receive() -> Message:
        if body:
            return {"type": "http.request", "body": body.pop(), "more_body": False}
        return await asyncio.get_running_loop().create_future()  # never: the client does not disconnect

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            parts.append(message.get("body", b""))

    try:
        await app(scope, receive, send)
    except Exception:  # raised again by the middleware that has answered with 500
        _log.exception("a request of a batch failed")
    return BatchAnswer.read(status, request_id, b"".join(parts))

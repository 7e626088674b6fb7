"""The request id in an answer's headers: the client's X-Request-Id, or a random id.

Every answer has the header, including refusals, so that logs of clients, proxies and this server can be
compared. Runs on the event loop of the process.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.datastructures import Headers, MutableHeaders

from inflight.access_log import random_id
from inflight.core.request.request import Origin
from inflight.log_lines import REQUEST_ID
from inflight.openai.errors import error_body, error_response, refusal
from inflight.openai.messages.error_format import HEADER as ANTHROPICS_HEADER
from inflight.openai.messages.error_format import is_of_messages

if TYPE_CHECKING:
    from fastapi import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-request-id"
_MAX_CHARACTERS = 256
_SCOPE_KEY = "inflight.passage"
_CHATS = ("/v1/chat", "/v1/messages", "/v1/responses")


def request_id_of(request: Request) -> str:
    """Return the id of a request that has passed `RequestIds`."""
    return passage_of(request.scope).origin.request_id


@dataclass(slots=True)
class Passage:
    """The record of one HTTP request, which `RequestIds` keeps while the application handles it.

    Attributes:
        origin: The front end, request id and address that the access line names.
        reaches_engine: Whether the request was passed to the engine, whose client then writes its access line.
        key: Digest of the API key that the request has; empty if the server needs none.
    """

    origin: Origin
    reaches_engine: bool = False
    key: bytes = b""


def passage_of(scope: Scope) -> Passage:
    """Return the record that `RequestIds` has made for a request, given the request's ASGI scope."""
    return scope[_SCOPE_KEY]


def id_for(scope: Scope) -> str:
    """Return the id that the client has given a request, or a random one if it gave none that can be used."""
    own = Headers(scope=scope).get(HEADER, "")
    is_usable = own and len(own) <= _MAX_CHARACTERS and own.isascii() and own.isprintable()
    return own if is_usable else random_id()


class RequestIds:
    """Middleware that gives each request an id, for log lines too, and returns it in the answer's header.

    Args:
        app: The application that gets the requests.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; answer 400 if its id is not valid in a header."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = id_for(scope)
        scope[_SCOPE_KEY] = Passage(_origin(scope, request_id))
        REQUEST_ID.set(request_id)

        has_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                headers = MutableHeaders(scope=message)
                headers[HEADER] = request_id
                if is_of_messages(scope["path"]):
                    headers[ANTHROPICS_HEADER] = request_id
            await send(message)

        own = Headers(scope=scope).get(HEADER, "")
        if own in ("", request_id):
            try:
                await self._app(scope, receive, send_with_id)
            except (Exception, asyncio.CancelledError) as error:
                # A bug, or the end of the time for requests in flight. Answered here, so that the answer has the
                # id; the server logs it.
                if not has_started:
                    await error_response(error, scope["path"])(scope, receive, send_with_id)
                raise
            return
        text = (
            f"the header X-Request-Id has {len(own)} characters, expected at most {_MAX_CHARACTERS} of "
            "printable ASCII"
        )
        body = error_body(400, text, HEADER, "invalid_value")
        await refusal(scope["path"], 400, body)(scope, receive, send_with_id)


def _origin(scope: Scope, request_id: str) -> Origin:
    return Origin(
        "openai",
        request_id,
        client=_address(scope),
        received_ns=time.monotonic_ns(),
        operation="chat" if scope.get("path", "").startswith(_CHATS) else "text_completion",
        traceparent=Headers(scope=scope).get("traceparent", ""),
    )


def _address(scope: Scope) -> str:
    """Return the client's address, as HOST:PORT; "" if it is not known."""
    client = scope.get("client")
    if not client:
        return ""
    host, port = client
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

"""Who may ask the OpenAI endpoint, from which web pages, and with how large a body.

Owns what is decided before a request reaches its route: API keys, cross-origin requests of browsers (CORS) and the
bound on bodies. Knows nothing of models. Runs on the event loop of the process.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse

from inflight.openai.errors import error_body
from inflight.openai.request_ids import RequestIds

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from inflight.openai.options import OpenAiOptions

OPEN_PATHS = frozenset({"/", "/health"})
"""What is answered without an API key: whether the server lives, and the playground's page, which holds no data.
Everything else needs one where there are keys, /metrics and what the playground asks for among them."""


def add_middleware(app: FastAPI, options: OpenAiOptions) -> None:
    """Put what `options` ask for in front of the routes of `app`."""
    app.add_middleware(BodyLimit, max_bytes=options.max_body_bytes)
    if options.api_keys:
        app.add_middleware(ApiKeys, keys=options.api_keys)
    if options.cors_origins:  # outside of these, so that a browser can also read refusals
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(options.cors_origins),
            allow_methods=["GET", "POST", "OPTIONS"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id"],
        )
    app.add_middleware(RequestIds)


class ApiKeys:
    """Refuses requests without a known key in `Authorization: Bearer KEY`; how long that takes tells nothing.

    Args:
        app: What answers those that have one.
        keys: The known keys.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with 401, or pass the request on."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._is_known(scope):
            await self._app(scope, receive, send)
            return
        response = _refusal(
            401,
            "this server needs an API key: send one of its keys as `Authorization: Bearer KEY`",
            code="invalid_api_key",
        )
        response.headers["www-authenticate"] = "Bearer"
        await response(scope, receive, send)

    def _is_known(self, scope: Scope) -> bool:
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            return False
        # Digests are of one length, and all of them are looked at.
        digest = _digest(key.strip().encode("latin-1"))
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0


class BodyLimit:
    """Refuses bodies that are too large with 413: by their declared length, or else as soon as they have grown so.

    A body is read whole before its route sees the request, which every route here does anyway.

    Args:
        app: What answers those that are not.
        max_bytes: The largest body.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with 413, or pass the request on."""
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        declared = headers.get("content-length")
        if declared is None and "transfer-encoding" not in headers:
            await self._app(scope, receive, send)
            return
        if declared is not None and declared.isdecimal() and int(declared) > self._max_bytes:
            await self._refuse(scope, receive, send)
            return
        body = bytearray()
        while (message := await receive())["type"] == "http.request":
            body += message.get("body", b"")
            if len(body) > self._max_bytes:
                await self._refuse(scope, receive, send)
                return
            if not message.get("more_body", False):
                await self._app(scope, _replay(bytes(body), receive), send)
                return
        # The client has gone in the middle of its body: nobody waits for an answer.

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = _refusal(
            413, f"the request's body is larger than {self._max_bytes} bytes (--max-body-size)"
        )
        response.headers["connection"] = "close"  # what is still on its way is not read
        await response(scope, receive, send)


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body first, and then what comes from the client after it."""
    unread = [body]

    async def replayed() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        return await receive()

    return replayed


def _refusal(status: int, message: str, code: str | None = None) -> JSONResponse:
    return JSONResponse(error_body(status, message, code=code), status)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()

"""Middleware of the OpenAI endpoint: API keys, cross-origin requests of browsers (CORS), and HEAD requests.

Runs on the event loop of the process.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware

from inflight.openai.errors import error_body, refusal
from inflight.openai.request_ids import RequestIds, passage_of

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.types import ASGIApp, Receive, Scope, Send

    from inflight.openai.options import OpenAiOptions

OPEN_PATHS = frozenset({"/", "/health"})
"""Paths that need no API key: the health check, and the playground's page, which contains no data. If keys
are set, all other paths need one, including /metrics and the playground's own requests."""

OWNER = "inflight.owner"
"""Key of the ASGI scope of a request that this process sends itself: the digest of its owner's API key."""


def add_middleware(app: FastAPI, options: OpenAiOptions) -> None:
    """Add the middleware that the options require to `app`."""
    app.add_middleware(HeadAsGet)
    if options.api_keys:
        app.add_middleware(ApiKeys, keys=options.api_keys)
    if options.cors_origins:  # outermost, so that refusals have CORS headers and browsers can read them
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(options.cors_origins),
            allow_methods=["GET", "POST", "DELETE", "OPTIONS"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id"],
        )
    app.add_middleware(RequestIds)


class ApiKeys:
    """Middleware that refuses requests without a known key in `Authorization: Bearer KEY` or `x-api-key: KEY`.

    Keys are compared in constant time.

    Args:
        app: The application that gets the accepted requests.
        keys: Known keys.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401, or pass the request on."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._is_known(scope):
            await self._app(scope, receive, send)
            return
        text = "this server needs an API key: send one as `Authorization: Bearer KEY` or `x-api-key: KEY`"
        body = error_body(401, text, code="invalid_api_key")
        await refusal(scope["path"], 401, body, {"www-authenticate": "Bearer"})(scope, receive, send)

    def _is_known(self, scope: Scope) -> bool:
        headers = Headers(scope=scope)
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = [key] * (scheme.lower() == "bearer") + headers.getlist("x-api-key")[:1]
        # Digests have equal lengths, and every key is compared, so that the time does not depend on the key.
        digests = [_digest(key.strip().encode("latin-1")) for key in given]
        if OWNER in scope:
            digests = [scope[OWNER]]
        known = [each for each in digests for one in self._digests if hmac.compare_digest(each, one)]
        if known:
            passage_of(scope).key = known[0]
        return bool(known)


class HeadAsGet:
    """Middleware that treats HEAD as GET. The HTTP server leaves the body out.

    Args:
        app: The application that gets the requests.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application, with the method GET if the request has HEAD."""
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()

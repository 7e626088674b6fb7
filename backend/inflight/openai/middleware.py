"""Access to the OpenAI endpoint: who may call it, and from which web pages.

Owns what is decided before a request reaches its route: API keys, cross-origin requests of browsers (CORS), and
that HEAD is GET. Knows nothing of models. Runs on the event loop of the process.
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
    from starlette.types import ASGIApp, Receive, Scope, Send

    from inflight.openai.options import OpenAiOptions

OPEN_PATHS = frozenset({"/", "/health"})
"""What is answered without an API key: whether the server lives, and the playground's page, which holds no data.
Everything else needs one where there are keys, /metrics and what the playground asks for among them."""


def add_middleware(app: FastAPI, options: OpenAiOptions) -> None:
    """Put what `options` ask for in front of the routes of `app`."""
    app.add_middleware(HeadAsGet)
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


class HeadAsGet:
    """Has HEAD answered wherever GET is; the HTTP server leaves the answer's body out.

    Args:
        app: What answers GET.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)


def _refusal(status: int, message: str, code: str | None = None) -> JSONResponse:
    return JSONResponse(error_body(status, message, code=code), status)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()

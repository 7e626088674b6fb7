"""Routes of the playground: GET / returns the page; other routes serve its requests beyond OpenAI's API.

Builds the page and its Content-Security-Policy, which allows only the page's own script. Runs on the event
loop.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from inflight.openai.context import context_of
from inflight.openai.errors import ApiError
from inflight.openai.playground.activity import Activity
from inflight.pictures.encoded_prompt import MAX_PICTURE_BYTES

_PARTS = Path(__file__).parent / "page"
# The scripts, in the order in which they are joined to one. The last one starts the page.
_SCRIPTS = (
    "vendor/marked.js", "storage.js", "api.js", "sampling.js", "controls.js", "markdown.js", "tokens.js",
    "pictures.js", "calls.js", "answers.js", "conversation.js", "library.js", "presets.js", "context.js",
    "code.js", "engine.js", "main.js",
)  # fmt: skip

playground_router = APIRouter(include_in_schema=False)


@playground_router.get("/")
async def get_page() -> HTMLResponse:
    """Return the page: one HTML document that includes its style and script."""
    html, policy = build_page()
    return HTMLResponse(
        html,
        headers={
            "Content-Security-Policy": policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
        },
    )


@playground_router.get("/playground/state")
async def get_state(request: Request) -> dict[str, Any]:
    """Return the engine's activity in a few figures (`Activity.read`); raise the engine client's errors."""
    state = request.app.state
    if not hasattr(state, "playground_activity"):
        state.playground_activity = Activity(context_of(request).session)
    return await state.playground_activity.read()


@playground_router.get("/playground/model")
async def get_model(request: Request) -> dict[str, bool | str | int]:
    """Return whether the model has a usable chat template, the reason if not, and the largest picture's size.

    The size is in bytes, and 0 if the model takes no pictures.
    """
    context = context_of(request)
    try:
        takes_pictures = await context.session.wait_for(context.model.takes_pictures)
    except ApiError as error:
        return {"has_chat_template": False, "reason": str(error), "max_picture_bytes": 0}
    # A body has pictures in base64, with a message around them.
    most = min(MAX_PICTURE_BYTES, context.model.options.max_body_bytes * 7 // 10) if takes_pictures else 0
    return {"has_chat_template": True, "reason": "", "max_picture_bytes": most}


@cache
def build_page() -> tuple[str, str]:
    """Return the document and its Content-Security-Policy."""
    html, style = _read("index.html"), _read("page.css")
    script = "\n".join(['"use strict";', *map(_read, _SCRIPTS)])
    html = html.replace("<style></style>", f"<style>{style}</style>")
    html = html.replace("<script></script>", f"<script>{script}</script>")
    policy = (
        "default-src 'none'",
        f"script-src {_hash(script)}",
        f"style-src {_hash(style)}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",  # text is never parsed as HTML, not even by mistake
        "trusted-types 'none'",
    )
    return html, "; ".join(policy)


def _read(name: str) -> str:
    return (_PARTS / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """Return the hash by which a Content-Security-Policy allows an inline script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

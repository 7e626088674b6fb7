"""Errors in Anthropic's format, for clients of /v1/messages. Any thread.

{"type": "error", "error": {"type": …, "message": …}, "request_id": …}
"""

from __future__ import annotations

from typing import Any

from inflight.log_lines import REQUEST_ID

HEADER = "request-id"
"""The header in which Anthropic's clients expect the id of their request."""

_PATH = "/v1/messages"
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def is_of_messages(path: str) -> bool:
    """Return whether clients of an HTTP path expect Anthropic's protocol."""
    return path == _PATH or path.startswith(f"{_PATH}/")


def in_anthropics_format(status: int, body: dict[str, Any]) -> dict[str, Any]:
    """Convert an error from OpenAI's format.

    Args:
        status: HTTP status, which gives the type.
        body: OpenAI's object for the error.
    """
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    error = {"type": kind, "message": body["error"]["message"]}
    return {"type": "error", "error": error, "request_id": REQUEST_ID.get()}

"""Read a request's body: from received bytes to a checked `Body`.

Checks a body's size and number of values before parsing it, because Python objects need much more memory
than the body, and parsing holds the GIL. `BodyReader` runs on the event loop, `parse_body` on the session's
threads. Errors name fields of the body.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np
import pydantic
from fastapi import Depends, Request
from starlette.requests import ClientDisconnect

from inflight.errors import Cancelled, Unavailable
from inflight.openai.errors import ApiError, validation_error
from inflight.openai.protocol import Body
from inflight.serving.engine_session import EngineSession
from inflight.serving.memory import return_free_memory

MAX_VALUES = 1 << 20
"""Largest number of values in a body, at any depth: texts, numbers, lists and so on."""
MAX_TEXTS = 1 << 18
"""Largest number of texts in a body, including keys of objects."""
MAX_CONTAINERS = 1 << 15
"""Largest number of lists and objects in a body."""
_MAX_UNREAD = 16
"""Number of bodies of the largest allowed size that may be in memory at a time, being received or parsed."""
_SMALL_BYTES = 64 << 10
"""The first bytes of each body, which do not count towards `_MAX_UNREAD`, so that small bodies are always read."""

_LARGE_BYTES = 1 << 20
_RETURN_S = 3.0

_Body = TypeVar("_Body", bound=Body)
_DECODER = msgspec.json.Decoder()


class BodyReader:
    """Reader of bodies, with a limit for each body and a limit for all bodies in memory together.

    Args:
        session: Session whose threads parse bodies.
        max_bytes: Size of the largest allowed body, in bytes.
    """

    def __init__(self, session: EngineSession, max_bytes: int) -> None:
        self._session = session
        self._max_bytes = max_bytes
        self._num_waiting_bytes = 0
        self._return: asyncio.TimerHandle | None = None

    async def read(self, kind: type[_Body], request: Request) -> _Body:
        """Return the body of `request`; raise ApiError, Unavailable or Cancelled.

        Keeps no reference to the received bytes.
        """
        encoding = request.headers.get("content-encoding", "identity")
        if encoding.strip().lower() not in ("", "identity"):
            raise ApiError(
                f"Content-Encoding is {encoding[:40]!r}, expected no such header: bodies are not decompressed",
                415,
            )
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > self._max_bytes:
            raise self._too_large()
        parts: list[bytes] = []
        size = num_counted = 0
        try:
            async for part in request.stream():
                parts.append(part)
                size += len(part)
                if size > self._max_bytes:
                    raise self._too_large()
                more = max(size - _SMALL_BYTES, 0) - num_counted
                num_counted += more
                self._num_waiting_bytes += more
                if more and self._num_waiting_bytes > _MAX_UNREAD * self._max_bytes:
                    raise Unavailable("too many large bodies are waiting to be read: try again")
            reading = partial(parse_body, kind, b"".join(parts), request.headers.get("content-type", ""))
            parts.clear()
            if size > _LARGE_BYTES:
                self._return_memory_soon()
            return await self._session.compute(reading)
        except ClientDisconnect:
            raise Cancelled("the client went away within its request's body") from None
        finally:
            self._num_waiting_bytes -= num_counted

    def _return_memory_soon(self) -> None:
        """Schedule the return of freed memory to the kernel, when large bodies are likely to be freed."""
        if self._return is None:
            self._return = asyncio.get_running_loop().call_later(_RETURN_S, self._return_memory)

    def _return_memory(self) -> None:
        self._return = None
        self._session.compute_later(return_free_memory)

    def _too_large(self) -> ApiError:
        return ApiError(f"the request's body is larger than {self._max_bytes} bytes (--max-body-size)", 413)


def body_as(kind: type[Body]) -> Any:
    """Return the FastAPI annotation of a route's parameter that receives the request's body."""

    async def read(request: Request) -> Body:
        reader: BodyReader = request.app.state.bodies
        return await reader.read(kind, request)

    return Depends(read)


def parse_body(kind: type[_Body], raw: bytes, content_type: str) -> _Body:
    """Parse and check a body; raise ApiError if it is invalid."""
    if not raw:
        raise ApiError("a body is required", 400, None, "missing")
    if not _is_json(content_type):  # a browser sends JSON to another site only if that site allows it
        found = repr(content_type) if content_type else "no such header"
        raise ApiError(f"the header Content-Type must be application/json, got {found}")
    _check_counts(raw)
    try:
        return kind.model_validate(_DECODER.decode(raw))
    except pydantic.ValidationError as error:
        raise validation_error(error) from None
    except RecursionError:
        raise ApiError("the body is nested too deeply") from None
    except ValueError as error:  # includes msgspec's errors and text that is not UTF-8
        raise ApiError(f"the body is not JSON: {error}") from None


def _is_json(content_type: str) -> bool:
    media_type = content_type.partition(";")[0].strip().lower()
    kind, _, name = media_type.partition("/")
    return kind == "application" and (name == "json" or name.endswith("+json"))


def _check_counts(raw: bytes) -> None:
    if not _excess(raw):  # an upper bound: punctuation inside texts counts, too
        return
    excess = _excess(_without_texts(raw))
    if excess:
        raise ApiError(f"the body has {excess} in one")


def _excess(raw: bytes) -> str:
    """Describe the first limit that JSON exceeds, estimated from its punctuation; "" if it exceeds none."""
    for count, most, name in (
        (raw.count(b","), MAX_VALUES, "values"),  # the last value of a list or object has no comma
        # `_without_texts` keeps one quotation mark of each text.
        (
            raw.count(b'"'),
            MAX_TEXTS,
            "texts and keys",
        ),
        (raw.count(b"[") + raw.count(b"{"), MAX_CONTAINERS, "lists and objects"),
    ):
        if count > most:
            return f"{count} {name}: this server takes at most {most}"
    return ""


def _without_texts(raw: bytes) -> bytes:
    """Return JSON without the contents of its strings.

    For invalid JSON, the result is correct up to the first error.
    """
    found = np.frombuffer(raw.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
    is_in_text = np.logical_xor.accumulate(found == ord('"'))
    return found[~is_in_text].tobytes()

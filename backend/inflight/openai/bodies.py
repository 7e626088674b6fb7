"""The body of a request, from the bytes that arrive to a checked `Body`.

Owns how large a body may be, and how many values it may have. That is found out before any of them is made:
Python's objects take many times the bytes of a body, and while they are made no other thread runs. `BodyReader` is
the event loop's; `parse_body` runs on the session's threads. Errors are raised by the body's names.
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
"""Most values in a body, wherever they are in it: texts, numbers, lists and so on."""
MAX_TEXTS = 1 << 18
"""Most texts, the keys of objects among them."""
MAX_CONTAINERS = 1 << 15
"""Most lists and objects."""
_MAX_UNREAD = 16
"""Bodies of the largest size that may wait in memory to be parsed, or for their rest to arrive."""
_SMALL_BYTES = 64 << 10
"""The first bytes of a body, which do not count towards that bound: small bodies are read even when it is
reached."""

_LARGE_BYTES = 1 << 20
_RETURN_S = 3.0

_Body = TypeVar("_Body", bound=Body)
_DECODER = msgspec.json.Decoder()


class BodyReader:
    """Reads bodies, within bounds on each and on all that wait.

    Args:
        session: Has the threads that they are parsed on.
        max_bytes: The largest body.
    """

    def __init__(self, session: EngineSession, max_bytes: int) -> None:
        self._session = session
        self._max_bytes = max_bytes
        self._num_waiting_bytes = 0
        self._return: asyncio.TimerHandle | None = None

    async def read(self, kind: type[_Body], request: Request) -> _Body:
        """The body of `request`. Its bytes are let go of when this returns."""
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
        """Give memory back that large bodies have taken, when they are likely to be gone."""
        if self._return is None:
            self._return = asyncio.get_running_loop().call_later(_RETURN_S, self._return_memory)

    def _return_memory(self) -> None:
        self._return = None
        self._session.compute_later(return_free_memory)

    def _too_large(self) -> ApiError:
        return ApiError(f"the request's body is larger than {self._max_bytes} bytes (--max-body-size)", 413)


def body_as(kind: type[Body]) -> Any:
    """The annotation by which a parameter of a route is the request's body, read by the application's reader."""

    async def read(request: Request) -> Body:
        reader: BodyReader = request.app.state.bodies
        return await reader.read(kind, request)

    return Depends(read)


def parse_body(kind: type[_Body], raw: bytes, content_type: str) -> _Body:
    """A body as `kind`; raises ApiError."""
    if not raw:
        raise ApiError("a body is required", 400, None, "missing")
    if not _is_json(content_type):  # which a browser sends to other sites only if they allow it
        raise ApiError("the body is not said to be JSON: send the header Content-Type: application/json")
    _check_counts(raw)
    try:
        return kind.model_validate(_DECODER.decode(raw))
    except pydantic.ValidationError as error:
        raise validation_error(error) from None
    except RecursionError:
        raise ApiError("the body is nested too deeply") from None
    except ValueError as error:  # msgspec's are of this class, and so is a text that is no UTF-8
        raise ApiError(f"the body is no JSON: {error}") from None


def _is_json(content_type: str) -> bool:
    media_type = content_type.partition(";")[0].strip().lower()
    kind, _, name = media_type.partition("/")
    return kind == "application" and (name == "json" or name.endswith("+json"))


def _check_counts(raw: bytes) -> None:
    if not _excess(raw):  # counting what is in texts, too
        return
    excess = _excess(_without_texts(raw))
    if excess:
        raise ApiError(f"the body has {excess} in one")


def _excess(raw: bytes) -> str:
    """A description of the first limit that JSON exceeds, by counts of its punctuation; "" if there is none."""
    for count, most, name in (
        (raw.count(b","), MAX_VALUES, "values"),  # the last one of each list or object has no comma
        (raw.count(b'"'), MAX_TEXTS, "texts and keys"),  # `_without_texts` leaves one mark of each
        (raw.count(b"[") + raw.count(b"{"), MAX_CONTAINERS, "lists and objects"),
    ):
        if count > most:
            return f"{count} {name}: this server takes at most {most}"
    return ""


def _without_texts(raw: bytes) -> bytes:
    """The bytes outside of strings in JSON. For invalid JSON, right as far as a parser would read."""
    found = np.frombuffer(raw.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
    is_in_text = np.logical_xor.accumulate(found == ord('"'))
    return found[~is_in_text].tobytes()

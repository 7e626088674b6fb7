"""What crosses the engine endpoint: msgpack messages behind a four-byte length.

Owns the message types and their encoding. The engine's side speaks first, with Hello. Requests go by an id that
the connecting side chooses and that means nothing outside of its connection. Errors cross as code and message.
A tensor too large for msgpack could follow its frame as raw bytes of announced length. Pure but for `read_frame`.
"""

from __future__ import annotations

import socket
from typing import Any

import msgspec

from inflight.core.description import EngineDescription
from inflight.core.request import Request
from inflight.core.response import Response, Result
from inflight.core.stop import StopReason
from inflight.errors import InflightError, error_from_code

MAX_FRAME_BYTES = 1 << 30
_LENGTH_BYTES = 4


class BadFrame(InflightError):
    """The other side does not speak this protocol, or no longer."""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Engine → front end, once, first."""

    description: EngineDescription


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Front end → engine: `request`, whose request_id is the connection's."""

    request: Request


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Front end → engine: end a request early."""

    request_id: int
    reason: StopReason


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Supervisor → engine: refuse new requests, end within `timeout_s` seconds what is in flight, say Drained."""

    timeout_s: float


class Drained(msgspec.Struct, frozen=True, tag=True):
    """Engine → supervisor: every request has its final response."""


class Answer(msgspec.Struct, frozen=True, tag=True):
    """Engine → front end: one response."""

    request_id: int
    result: Result | None
    error_code: str
    error_message: str
    is_final: bool

    @classmethod
    def of(cls, response: Response) -> Answer:
        """The frame that carries `response`."""
        code, message = (response.error.code, str(response.error)) if response.error else ("", "")
        return cls(response.request_id, response.result, code, message, response.is_final)

    def response(self) -> Response:
        """The response that the frame carries."""
        error = error_from_code(self.error_code, self.error_message) if self.error_code else None
        return Response(self.request_id, self.result, error, self.is_final)


_ENCODER = msgspec.msgpack.Encoder()
_FROM_ENGINE = msgspec.msgpack.Decoder(Hello | Answer | Drained)
_FROM_FRONT_END = msgspec.msgpack.Decoder(Submit | Stop | Drain)


def encode(frame: Hello | Answer | Drained | Submit | Stop | Drain) -> bytes:
    """Length and body; BadFrame if there is more to say than one frame may."""
    body = _ENCODER.encode(frame)
    if len(body) > MAX_FRAME_BYTES:
        raise BadFrame(f"a frame of {len(body)} bytes; at most {MAX_FRAME_BYTES} are sent")
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


def decode_from_engine(body: bytes) -> Hello | Answer | Drained:
    """A frame for a front end; BadFrame if it is none."""
    return _decode(_FROM_ENGINE, body)


def decode_from_front_end(body: bytes) -> Submit | Stop | Drain:
    """A frame for the engine; BadFrame if it is none."""
    return _decode(_FROM_FRONT_END, body)


def _decode(decoder: msgspec.msgpack.Decoder, body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadFrame(f"not a frame of the engine endpoint: {error}") from error


def read_frame(connection: socket.socket) -> bytes | None:
    """The body of the next frame, None when the other side has closed; BadFrame if it is too long or cut short."""
    header = _read(connection, _LENGTH_BYTES)
    if not header:
        return None
    length = int.from_bytes(header, "big")
    if len(header) < _LENGTH_BYTES or length > MAX_FRAME_BYTES:
        raise BadFrame(f"a frame of {length} bytes; at most {MAX_FRAME_BYTES} are taken")
    body = _read(connection, length)
    if len(body) < length:
        raise BadFrame(f"the connection ended inside a frame, {len(body)} of {length} bytes")
    return body


def _read(connection: socket.socket, count: int) -> bytes:
    """`count` bytes, fewer only at the end of the connection."""
    parts = []
    while count and (part := connection.recv(min(count, 1 << 20))):
        parts.append(part)
        count -= len(part)
    return b"".join(parts)

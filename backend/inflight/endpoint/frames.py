"""What crosses the engine endpoint: frames of MessagePack, each behind its length in four bytes, big-endian.

Owns the messages and their encoding. Does not know who sends what when, except for one rule: the engine's first
frame is Hello. Plain functions, any thread.

Frozen dataclasses of the core travel as they are. An error travels as its code and message, since an exception's
class means nothing in another process. Ids are the connection's own: the front end chooses them, and the server
translates. A tensor too large for MessagePack would follow its frame as raw bytes of announced length.
"""

from __future__ import annotations

import io
import struct

import msgspec

from inflight.core.description import EngineDescription
from inflight.core.request import Request
from inflight.core.response import Response, Result
from inflight.core.stop import StopReason
from inflight.errors import error_from_code

MAX_FRAME_BYTES = 64 << 20

_LENGTH = struct.Struct(">I")


class FrameError(Exception):
    """Bytes that are no frame, or a frame that is too large. The connection they came over is of no more use."""


class Hello(msgspec.Struct, tag="hello", array_like=True, frozen=True):
    """Engine to front end, once."""

    description: EngineDescription


class Submit(msgspec.Struct, tag="submit", array_like=True, frozen=True):
    """Front end to engine: `request.request_id` is unused on this connection, or free again."""

    request: Request


class Stop(msgspec.Struct, tag="stop", array_like=True, frozen=True):
    """Front end to engine; unknown ids are ignored."""

    request_id: int
    reason: StopReason


class Answer(msgspec.Struct, tag="answer", array_like=True, frozen=True):
    """Engine to front end: one Response."""

    request_id: int
    result: Result | None = None
    error: tuple[str, str] | None = None  # code, message
    is_final: bool = False

    @classmethod
    def of(cls, response: Response) -> Answer:
        """The message for `response`."""
        error = None if response.error is None else (response.error.code, str(response.error))
        return cls(response.request_id, response.result, error, response.is_final)

    def response(self) -> Response:
        """The response that was sent, its error rebuilt."""
        error = None if self.error is None else error_from_code(*self.error)
        return Response(self.request_id, self.result, error, self.is_final)


Frame = Hello | Submit | Stop | Answer

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)


def encode_frame(frame: Frame) -> bytes:
    """Length and content.

    Raises:
        FrameError: The content exceeds MAX_FRAME_BYTES.
    """
    content = _encoder.encode(frame)
    if len(content) > MAX_FRAME_BYTES:
        raise FrameError(f"{len(content)} bytes; a message can have {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(content)) + content


def read_frame(stream: io.BufferedIOBase) -> Frame | None:
    """The next frame, None at the end of the stream; blocks until there is one.

    Raises:
        FrameError: The frame is cut short, too large, or says nothing that is known.
    """
    header = stream.read(_LENGTH.size)
    if not header:
        return None
    if len(header) < _LENGTH.size:
        raise FrameError("the stream ends within a length")
    (size,) = _LENGTH.unpack(header)
    if size > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {size} bytes was announced; it can have {MAX_FRAME_BYTES}")
    content = stream.read(size)
    if len(content) < size:
        raise FrameError("the stream ends within a frame")
    try:
        return _decoder.decode(content)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise FrameError(f"not a known message: {error}") from error

"""The messages between front ends and the process that encodes pictures. Imports no torch.

A connection has one request and one answer; a front end that closes it takes the request back. Frames and
raw buffers are those of the engine endpoint (`endpoint/frames.py`): the pictures' files and the tables follow
their message as raw bytes.
"""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec

from inflight.config import SpecialTokens
from inflight.core.request.adapter import RawBuffer
from inflight.endpoint.frames import LENGTH_BYTES, BadFrame, decode_by, frame_length
from inflight.pictures.encoded_prompt import EncodedPrompt, PictureStats
from inflight.raw_buffers import BufferedDecoder

_T = TypeVar("_T")


class EncodePictures(msgspec.Struct, frozen=True, tag=True):
    """Front end → encoder: the arguments of `PictureEncoder.encode`. Answered by Encoded.

    Attributes:
        urls: The URLs of the pictures, if `pictures` is empty.
        request_id: The id of the client's request, for log lines; "": none.
    """

    text: str
    pictures: tuple[RawBuffer, ...]
    vocab_size: int
    special_tokens: SpecialTokens | None = None
    urls: tuple[str, ...] = ()
    request_id: str = ""


class ReadStats(msgspec.Struct, frozen=True, tag=True):
    """Front end → encoder: answer with the statistics."""


class Encoded(msgspec.Struct, frozen=True, tag=True):
    """Encoder → front end: the prompt, or the kind and marked message of an error."""

    prompt: EncodedPrompt | None = None
    error_kind: str = ""
    error_message: str = ""


class Stats(msgspec.Struct, frozen=True, tag=True):
    """Encoder → front end: the statistics."""

    stats: PictureStats


ToEncoder = EncodePictures | ReadStats
FromEncoder = Encoded | Stats


async def read_message(reader: asyncio.StreamReader, decoder: BufferedDecoder[_T]) -> _T | None:
    """Return the next message with its buffers; None at the end of the connection. Raises BadFrame."""
    try:
        header = await reader.readexactly(LENGTH_BYTES)
    except asyncio.IncompleteReadError as error:
        if not error.partial:
            return None
        raise BadFrame("the connection ended inside a frame") from None
    try:
        body = await reader.readexactly(frame_length(header))
        message, buffers = decode_by(decoder.decode, body)
        for buffer in buffers:
            buffer[:] = await reader.readexactly(len(buffer))
    except asyncio.IncompleteReadError:
        raise BadFrame("the connection ended inside a message") from None
    return message

"""Encode messages without their RawBuffers: the message has each buffer's length, and the bytes follow it.

Both sides process the buffers of a message in the same order. The receiver allocates each buffer and fills
it from a socket or a broadcast, so that the bytes are not copied to and from a message.
"""

from __future__ import annotations

import mmap
from typing import Any, Generic, TypeVar

import msgspec

from inflight.core.request.adapter import RawBuffer

_T = TypeVar("_T")
_LARGE_BYTES = 1 << 20


class BufferedEncoder:
    """Encodes messages with msgpack. Must be used by one thread at a time."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._note)
        self._buffers: list[memoryview] = []

    def encode(self, message: object) -> tuple[bytes, list[memoryview]]:
        """Return the encoded message, and the buffers to send after it."""
        self._buffers = []
        return self._encoder.encode(message), self._buffers

    def _note(self, value: object) -> int:
        if not isinstance(value, RawBuffer):
            raise NotImplementedError(
                f"{type(value).__name__} cannot be part of a message"
            )  # as msgspec asks for
        self._buffers.append(memoryview(value.data).cast("B"))
        return len(value)


class BufferedDecoder(Generic[_T]):
    """Decodes messages of one type. Must be used by one thread at a time."""

    def __init__(self, kind: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[_T] = msgspec.msgpack.Decoder(kind, dec_hook=self._make_room)
        self._buffers: list[memoryview] = []

    def decode(self, body: bytes) -> tuple[_T, list[memoryview]]:
        """Return the message, and its empty buffers, which must be filled in order before the message is used.

        Raises:
            msgspec.MsgspecError: The body is not a message of this type.
            MemoryError: A buffer cannot be allocated.
        """
        self._buffers = []
        return self._decoder.decode(body), self._buffers

    def _make_room(self, kind: type, value: Any) -> RawBuffer:
        if kind is not RawBuffer:
            raise NotImplementedError(f"{kind.__name__} cannot be part of a message")  # as msgspec asks for
        if not isinstance(value, int) or value < 0:
            raise ValueError(f"expected the length of a buffer, got {value!r}")
        room = _allocate(value)
        self._buffers.append(room)
        return RawBuffer(room)


def _allocate(length: int) -> memoryview:
    """Return writable memory. Pages of a large buffer take no memory before they are filled."""
    if length < _LARGE_BYTES:
        return memoryview(bytearray(length))
    try:
        return memoryview(mmap.mmap(-1, length, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    except (OSError, OverflowError) as error:
        raise MemoryError(f"a buffer of {length} bytes") from error

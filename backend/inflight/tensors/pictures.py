"""Read one prompt's pictures: their pixels, or URLs with their files in them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from inflight.config import SpecialTokens
from inflight.errors import InvalidArgument, Name
from inflight.pictures.encoded_prompt import EncodedPrompt
from inflight.pictures.sources import read_data_url
from inflight.tensors.reader import TensorReader

_PIXELS = "image_bytes_input"
_URLS = ("image_url_input", "image_url")
_HEADER_BYTES = 54


class PicturesEncoder(Protocol):
    """Encodes the pictures of prompts."""

    def encode(
        self, text: str, pictures: Sequence[bytes], vocab_size: int, special_tokens: SpecialTokens
    ) -> EncodedPrompt:
        """Return the prompt with its pictures (`PictureEncoder.encode`). May take seconds."""
        ...


@dataclass(frozen=True, slots=True)
class SentPictures:
    """The pictures of one prompt.

    Attributes:
        name: Main name of the tensor that they came in.
        files: Each picture's file.
    """

    name: str
    files: tuple[bytes, ...]


def has_pictures(reader: TensorReader) -> bool:
    """Return whether a prompt has pictures, without reading them."""
    return bool(_sent_names(reader))


def read_pictures(reader: TensorReader) -> SentPictures | None:
    """Return the prompt's pictures; None if none were sent.

    Raises InvalidArgument for a wrong type or shape, a URL that is no data: URL, or pictures in two tensors.
    """
    names = _sent_names(reader)
    if not names:
        return None
    first, *others = [Name(reader.shown_name(name)) for name in names]
    if others:
        raise InvalidArgument("got both ", first, " and ", others[0], ": send the pictures in one of them")
    if names[0] == _PIXELS:
        return SentPictures(_PIXELS, _files_of_pixels(reader, first))
    return SentPictures(names[0], tuple(read_data_url(url, first) for url in _urls(reader, names[0])))


def _sent_names(reader: TensorReader) -> list[str]:
    pixels = [_PIXELS] if reader.array(_PIXELS) is not None else []
    return [*pixels, *(name for name in _URLS if _urls(reader, name))]


def _urls(reader: TensorReader, name: str) -> list[str]:
    """Return the URLs in a tensor. An empty one stands for no picture."""
    found = reader.texts(name) if name == "image_url" else [reader.text(name)]
    return [url for url in found if url]


def _files_of_pixels(reader: TensorReader, name: Name) -> tuple[bytes, ...]:
    pictures = reader.array(_PIXELS)
    assert pictures is not None
    if pictures.shape[-1] != 3:
        raise InvalidArgument(
            name, f" must have shape [1, pictures, height, width, 3], got {[1, *pictures.shape]}"
        )
    return tuple(to_bmp(pixels) for pixels in pictures)


def to_bmp(pixels: NDArray[np.uint8]) -> bytes:
    """Return RGB pixels [height, width, 3] as the file of a picture, uncompressed."""
    height, width, _ = pixels.shape
    rows: NDArray[Any] = np.zeros((height, (3 * width + 3) // 4 * 4), np.uint8)  # whole words of 4 bytes
    rows[:, : 3 * width] = pixels[::-1, :, ::-1].reshape(height, 3 * width)  # upwards, blue first
    size = _HEADER_BYTES + rows.size
    head = struct.pack("<2sIIIIiiHHIIiiII", b"BM", size, 0, _HEADER_BYTES, 40, width, height, 1, 24, *[0] * 6)
    return head + rows.tobytes()

"""Read one prompt's pictures: their pixels, or their URLs."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from inflight.config import SpecialTokens
from inflight.errors import InvalidArgument, Name, RequestError
from inflight.pictures.encoded_prompt import MAX_PICTURE_BYTES, EncodedPrompt
from inflight.tensors.reader import TensorReader

PIXELS = "image_bytes_input"
URLS = ("image_url_input", "image_url")
_HEADER_BYTES = 54

Pictures = Sequence[bytes] | Sequence[str]
"""The pictures of a prompt: their files, or their URLs."""


class BlockingEncoder(Protocol):
    """Encodes the pictures of prompts."""

    def encode(
        self, text: str, pictures: Pictures, vocab_size: int, special_tokens: SpecialTokens
    ) -> EncodedPrompt:
        """Return the prompt with its pictures (`PicturesClient.encode`). May take seconds."""
        ...


@dataclass(frozen=True, slots=True)
class SentPictures:
    """The pictures of one prompt.

    Attributes:
        name: The client's name of the tensor that they came in.
        pictures: Their files, or their URLs.
    """

    name: Name
    pictures: Pictures

    def encode(
        self, encoder: BlockingEncoder, text: str, vocab_size: int, special_tokens: SpecialTokens
    ) -> EncodedPrompt:
        """Return the prompt with its pictures (`BlockingEncoder.encode`); errors have the client's name."""
        try:
            return encoder.encode(text, self.pictures, vocab_size, special_tokens)
        except RequestError as error:
            raise error.with_names(lambda each: each.replace("pictures", self.name)) from None


def has_pictures(reader: TensorReader, pixels: str = PIXELS, urls: Sequence[str] = URLS) -> bool:
    """Return whether a prompt has pictures, without reading them; the arguments are those of `read_pictures`."""
    return bool(_sent_names(reader, pixels, urls))


def read_pictures(
    reader: TensorReader, pixels: str = PIXELS, urls: Sequence[str] = URLS
) -> SentPictures | None:
    """Return the prompt's pictures; None if none were sent.

    Args:
        reader: The prompt's tensors.
        pixels: Name of the tensor of decoded pictures.
        urls: Names of the tensors of URLs.

    Raises:
        InvalidArgument: A type or shape is wrong, or pictures came in two tensors.
    """
    names = _sent_names(reader, pixels, urls)
    if not names:
        return None
    first, *others = [Name(reader.shown_name(name)) for name in names]
    if others:
        raise InvalidArgument("got both ", first, " and ", others[0], ": send the pictures in one of them")
    if names[0] == pixels:
        return SentPictures(first, _files_of_pixels(reader, pixels))
    return SentPictures(first, _urls(reader, names[0]))


def _sent_names(reader: TensorReader, pixels: str, urls: Sequence[str]) -> list[str]:
    sent = [pixels] if reader.array(pixels) is not None else []
    return [*sent, *(name for name in urls if _urls(reader, name))]


def _urls(reader: TensorReader, name: str) -> list[str]:
    """Return the URLs in a tensor. An empty one stands for no picture."""
    found = [reader.text(name)] if name == "image_url_input" else reader.texts(name)
    return [url for url in found if url]


def _files_of_pixels(reader: TensorReader, name: str) -> tuple[bytes, ...]:
    pictures = reader.array(name)
    assert pictures is not None
    if pictures.shape[-1] != 3:
        raise InvalidArgument(
            Name(reader.shown_name(name)),
            f" must have shape [1, pictures, height, width, 3], got {[1, *pictures.shape]}",
        )
    num_bytes = prod(pictures.shape[1:])
    if num_bytes > MAX_PICTURE_BYTES:
        raise InvalidArgument(
            Name(reader.shown_name(name)),
            f" has pictures of {num_bytes} bytes; at most {MAX_PICTURE_BYTES} are taken",
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

"""Read one prompt's pictures: their pixels, their URLs, or their files."""

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

_HEADER_BYTES = 54

Pictures = Sequence[bytes] | Sequence[str]
"""The pictures of a prompt: their files, or their URLs."""


@dataclass(frozen=True, slots=True)
class PictureTensors:
    """The names of the tensors in which a model takes pictures.

    Attributes:
        pixels: Pixels of all pictures, UINT8 [pictures, height, width, 3] or [pictures, 3, height, width].
        sizes: The part of each picture's pixels that is not padding, INT64 [pictures, 2]: height, width.
        urls: URLs, BYTES [pictures]; several names of equal meaning.
        files: Files such as PNG or JPEG, BYTES [pictures]; None: the model has no such tensor.
    """

    pixels: str
    sizes: str
    urls: tuple[str, ...]
    files: str | None = None


OF_SERVING_MODELS = PictureTensors("image_bytes_input", "image_sizes_input", ("image_url_input", "image_url"))
OF_TEXT_MODELS = PictureTensors("IMAGE_BYTES", "IMAGE_SIZES", ("IMAGE_URL",), "IMAGES")
"""The tensors of `preprocessing` and `multimodal_encoders`."""


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
        """Return the prompt with its pictures (`BlockingEncoder.encode`); errors name the tensor that the
        client sent."""
        try:
            return encoder.encode(text, self.pictures, vocab_size, special_tokens)
        except RequestError as error:
            raise error.with_names(lambda each: each.replace("pictures", self.name)) from None


def has_pictures(reader: TensorReader, tensors: PictureTensors = OF_SERVING_MODELS) -> bool:
    """Return whether a prompt has pictures, without reading them."""
    return bool(_sent_names(reader, tensors))


def read_pictures(reader: TensorReader, tensors: PictureTensors = OF_SERVING_MODELS) -> SentPictures | None:
    """Return the prompt's pictures; None if none were sent.

    Raises:
        InvalidArgument: A type or shape is wrong, or pictures came in two tensors.
    """
    names = _sent_names(reader, tensors)
    if reader.array(tensors.sizes) is not None and tensors.pixels not in names:
        sizes, pixels = (Name(reader.shown_name(name)) for name in (tensors.sizes, tensors.pixels))
        raise InvalidArgument(sizes, " needs ", pixels, ", which is missing")
    if not names:
        return None
    first, *others = [Name(reader.shown_name(name)) for name in names]
    if others:
        raise InvalidArgument("got both ", first, " and ", others[0], ": send the pictures in one of them")
    if names[0] == tensors.pixels:
        return SentPictures(first, _files_of_pixels(reader, tensors))
    if names[0] == tensors.files:
        return SentPictures(first, _files(reader, names[0]))
    return SentPictures(first, _urls(reader, names[0]))


def _sent_names(reader: TensorReader, tensors: PictureTensors) -> list[str]:
    sent = [tensors.pixels] if reader.array(tensors.pixels) is not None else []
    sent += [name for name in tensors.urls if _urls(reader, name)]
    return [*sent, tensors.files] if tensors.files and _files(reader, tensors.files) else sent


def _urls(reader: TensorReader, name: str) -> list[str]:
    """Return the URLs in a tensor. An empty one stands for no picture."""
    return [url for url in reader.texts(name) if url]


def _files(reader: TensorReader, name: str) -> list[bytes]:
    """Return the files in a tensor. An empty one stands for no picture."""
    array = reader.array(name)
    return [] if array is None else [file for file in array.tolist() if file]


def _files_of_pixels(reader: TensorReader, tensors: PictureTensors) -> tuple[bytes, ...]:
    pictures, name = reader.array(tensors.pixels), Name(reader.shown_name(tensors.pixels))
    assert pictures is not None
    sent_shape = [1, *pictures.shape]
    if pictures.shape[3] != 3 and pictures.shape[1] == 3:
        pictures = pictures.transpose(0, 2, 3, 1)
    if pictures.shape[3] != 3:
        raise InvalidArgument(
            name,
            " must have shape [1, pictures, height, width, 3] or [1, pictures, 3, height, width], "
            f"got {sent_shape}",
        )
    num_bytes = prod(pictures.shape[1:])
    if num_bytes > MAX_PICTURE_BYTES:
        raise InvalidArgument(
            name, f" has pictures of {num_bytes} bytes; at most {MAX_PICTURE_BYTES} are taken"
        )
    return tuple(
        to_bmp(pixels[:height, :width])
        for pixels, (height, width) in zip(pictures, _sizes(reader, tensors, pictures.shape))
    )


def _sizes(reader: TensorReader, tensors: PictureTensors, shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return height and width of each picture in pixels of this shape [pictures, height, width, 3]."""
    num_pictures, height, width, _ = shape
    sizes = reader.array(tensors.sizes)
    if sizes is None:
        return [(height, width)] * num_pictures
    if len(sizes) != num_pictures or (sizes < 1).any() or (sizes > [height, width]).any():
        raise InvalidArgument(
            Name(reader.shown_name(tensors.sizes)),
            f" must have the height, from 1 to {height}, and the width, from 1 to {width}, of each of the "
            f"{num_pictures} pictures in ",
            Name(reader.shown_name(tensors.pixels)),
            f", got {sizes.tolist()}",
        )
    return [(int(rows), int(columns)) for rows, columns in sizes.tolist()]


def to_bmp(pixels: NDArray[np.uint8]) -> bytes:
    """Return RGB pixels [height, width, 3] as the file of a picture, uncompressed."""
    height, width, _ = pixels.shape
    rows: NDArray[Any] = np.zeros((height, (3 * width + 3) // 4 * 4), np.uint8)  # whole words of 4 bytes
    rows[:, : 3 * width] = pixels[::-1, :, ::-1].reshape(height, 3 * width)  # upwards, blue first
    size = _HEADER_BYTES + rows.size
    head = struct.pack("<2sIIIIiiHHIIiiII", b"BM", size, 0, _HEADER_BYTES, 40, width, height, 1, 24, *[0] * 6)
    return head + rows.tobytes()

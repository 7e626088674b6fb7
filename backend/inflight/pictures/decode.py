"""The files of a prompt's pictures → PIL images. Any thread."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from io import BytesIO

from PIL import Image, ImageOps

from inflight.errors import InvalidArgument, Name, without_places
from inflight.pictures.encoded_prompt import MAX_PICTURE_BYTES

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Formats of pictures, by PIL's names. PIL's other decoders are not used: some of them run other programs."""

MAX_PIXELS = 178_956_970
"""Largest number of pixels that are decoded for a prompt: twice as many as PIL allows in a picture by default."""


def read_pictures(files: Mapping[int, bytes | memoryview]) -> dict[int, Image.Image]:
    """Return the first frame of each picture, in RGB, turned as its EXIF data say; as transformers reads pictures.

    Args:
        files: The pictures' files, by their index in the prompt.

    Raises:
        InvalidArgument: A file is too large, is not a picture in one of the FORMATS, is broken, or has more pixels
            than PIL allows (`Image.MAX_IMAGE_PIXELS`); or all pictures together have more than MAX_PIXELS.
    """
    opened = {index: _read(index, partial(_open, data, index)) for index, data in files.items()}
    num_pixels = sum(image.width * image.height for image in opened.values())
    if num_pixels > MAX_PIXELS:
        raise InvalidArgument(
            Name("pictures"),
            f": {num_pixels} pixels in the pictures of one prompt together; at most {MAX_PIXELS} are taken",
        )
    return {index: _read(index, partial(_decode, image)) for index, image in opened.items()}


def _open(data: bytes | memoryview, index: int) -> Image.Image:
    """Return a picture whose pixels are not decoded yet."""
    if len(data) > MAX_PICTURE_BYTES:
        raise bad_picture(index, f"has {len(data)} bytes; at most {MAX_PICTURE_BYTES} are taken")
    return Image.open(BytesIO(data), formats=FORMATS)


def _decode(image: Image.Image) -> Image.Image:
    return (ImageOps.exif_transpose(image) or image).convert("RGB")


def _read(index: int, read: Callable[[], Image.Image]) -> Image.Image:
    """Return what `read` returns; its errors become those of a prompt's picture."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            return read()
    except InvalidArgument:
        raise
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        raise bad_picture(index, f"has too many pixels; at most {Image.MAX_IMAGE_PIXELS} are taken") from None
    except Image.UnidentifiedImageError:
        raise bad_picture(index, f"is not a picture of a known format: {', '.join(FORMATS)}") from None
    except Exception as error:  # PIL's decoders raise many classes for broken files
        raise bad_picture(index, f"cannot be decoded: {without_places(str(error))}") from error


def bad_picture(index: int, reason: str) -> InvalidArgument:
    """Return the error of a prompt's picture; `reason` continues a sentence that begins with its name."""
    return InvalidArgument(Name(f"pictures[{index}]"), f" {reason}")

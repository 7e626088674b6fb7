"""The bytes of a picture → a PIL image. Any thread."""

from __future__ import annotations

import warnings
from io import BytesIO

from PIL import Image, ImageOps

from inflight.errors import InvalidArgument, Name, without_places
from inflight.pictures.encoded_prompt import MAX_PICTURE_BYTES

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Formats of pictures, by PIL's names. PIL's other decoders are not used: some of them run other programs."""


def read_picture(data: bytes | memoryview, index: int) -> Image.Image:
    """Return the first frame of a picture, in RGB, turned as its EXIF data say; as transformers reads pictures.

    Args:
        data: The picture's file.
        index: The picture's index in the prompt, for errors.

    Raises:
        InvalidArgument: The file is too large, is no picture of one of the FORMATS, is broken, or has more
            pixels than PIL allows (`Image.MAX_IMAGE_PIXELS`).
    """
    if len(data) > MAX_PICTURE_BYTES:
        raise bad_picture(index, f"has {len(data)} bytes; at most {MAX_PICTURE_BYTES} are taken")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image = Image.open(BytesIO(data), formats=FORMATS)
            return (ImageOps.exif_transpose(image) or image).convert("RGB")
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        raise bad_picture(index, f"has too many pixels; at most {Image.MAX_IMAGE_PIXELS} are taken") from None
    except Image.UnidentifiedImageError:
        raise bad_picture(index, f"is no picture of a known format: {', '.join(FORMATS)}") from None
    except Exception as error:  # PIL's decoders raise many classes for broken files
        raise bad_picture(index, f"cannot be decoded: {without_places(str(error))}") from error


def bad_picture(index: int, reason: str) -> InvalidArgument:
    """Return the error of a prompt's picture; `reason` continues a sentence that begins with its name."""
    return InvalidArgument(Name(f"pictures[{index}]"), f" {reason}")

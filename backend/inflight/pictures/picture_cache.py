"""The cache of encoded pictures. One thread."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch

_ID_BYTES = 8


@dataclass(frozen=True, slots=True)
class EncodedPicture:
    """The rows of a picture, and what its place in a prompt needs.

    Attributes:
        digest: Identifies the picture and its processing.
        rows: [rows, width], on the CPU.
        replacement: The text that replaces the picture's placeholder; has one image token for each row.
        grid: Numbers of patches: time, height, width. Empty for models without mRoPE.
    """

    digest: bytes
    rows: torch.Tensor
    replacement: str
    grid: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Size of the rows in bytes."""
        return self.rows.nbytes

    def extra_ids(self) -> list[int]:
        """Return an id for each row, which only this row of this picture has."""
        return [_row_id(self.digest, row) for row in range(len(self.rows))]


class PictureCache:
    """Encoded pictures by digest; the least recently used ones make room for others.

    Args:
        max_bytes: Maximum size of all rows.
    """

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._pictures: OrderedDict[bytes, EncodedPicture] = OrderedDict()

    def get(self, digest: bytes) -> EncodedPicture | None:
        """Return the picture with this digest, which is the most recently used one from now on; None: unknown."""
        picture = self._pictures.get(digest)
        if picture is not None:
            self._pictures.move_to_end(digest)
        return picture

    def add(self, pictures: Sequence[EncodedPicture]) -> None:
        """Store pictures that are not in the cache."""
        for picture in pictures:
            self._pictures[picture.digest] = picture
            self.num_bytes += picture.num_bytes
        while self.num_bytes > self._max_bytes:
            _, oldest = self._pictures.popitem(last=False)
            self.num_bytes -= oldest.num_bytes


def _row_id(digest: bytes, row: int) -> int:
    numbered = digest + row.to_bytes(_ID_BYTES, "little")
    return int.from_bytes(blake2b(numbered, digest_size=_ID_BYTES).digest(), "little") or 1

"""A tensor as the core sees it: a shape and bytes to hand through. Only the two ends look inside."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class FloatTensor:
    """float32 values in row-major order, in the machine's byte order.

    Attributes:
        shape: Lengths of the dimensions.
        data: 4 * product of `shape` bytes.
    """

    shape: tuple[int, ...]
    data: bytes

    def __post_init__(self) -> None:
        if len(self.data) != 4 * prod(self.shape):
            raise ValueError(f"{len(self.data)} bytes for a float32 tensor of shape {list(self.shape)}")

    def __repr__(self) -> str:
        return f"FloatTensor(shape={self.shape})"


def concatenate_rows(tensors: list[FloatTensor]) -> FloatTensor:
    """Tensors [n, …], one after another along the first dimension; the further ones are equal where n > 0."""
    filled = [tensor for tensor in tensors if tensor.data]
    if len(filled) <= 1:
        return filled[0] if filled else tensors[0]
    rows = sum(tensor.shape[0] for tensor in filled)
    return FloatTensor((rows, *filled[0].shape[1:]), b"".join(tensor.data for tensor in filled))

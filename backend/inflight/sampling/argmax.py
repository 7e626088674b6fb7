"""Indices of the highest values of long rows, found without sorting; ties go to the lower index."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from inflight.sampling.transfer import as_array, as_tensor

_LOWER_HALF = 2**32 - 1


def first_highest(values: Tensor) -> Tensor:
    """Return the index [rows] of each row's highest value in `values` [rows, width]; NaN counts as the highest."""
    if values.device.type == "cpu":  # numpy's argmax is several times as fast as torch's
        return as_tensor(as_array(values).argmax(axis=-1))
    return values.argmax(dim=-1)


def top_indices(values: Tensor, count: int) -> Tensor:
    """Return the indices [rows, count] of the highest values, in descending order; ties by ascending index.

    The row is divided into blocks, of which the `count` blocks with the highest maxima are searched (ties: the
    first blocks). Each of these maxima is at least as high as every value of every other block, so the `count`
    highest values are in the searched blocks.

    Args:
        values: [rows, width] float32.
        count: 1 .. width.
    """
    width = values.shape[-1]
    size = _block_size(width, count)
    if size < 8:
        return _highest(values, count)
    blocks = _highest(reduce_blocks(values, size, torch.amax), count).sort(dim=-1).values
    inside = torch.arange(size, device=values.device)
    indices = (blocks[:, :, None] * size + inside).flatten(1)
    in_row = indices < width
    indices.clamp_(max=width - 1)  # the last block may be shorter
    candidates = values.gather(-1, indices).masked_fill_(~in_row, -torch.inf)
    return indices.gather(-1, _highest(candidates, count))


def reduce_blocks(values: Tensor, size: int, reduction: Callable[..., Tensor]) -> Tensor:
    """Apply `reduction` to blocks of `size` consecutive values; return [rows, ceil(width / size)].

    The last block may be shorter.
    """
    whole = values.shape[-1] // size
    reduced = reduction(values[:, : whole * size].unflatten(-1, (whole, size)), dim=-1)
    if whole * size == values.shape[-1]:
        return reduced
    return torch.cat([reduced, reduction(values[:, whole * size :], dim=-1, keepdim=True)], dim=-1)


def _block_size(width: int, count: int) -> int:
    """Return a power of 2 for which there are about as many blocks as candidates; at least 32, as smaller
    blocks are slow to reduce."""
    balanced = 1 << (int((width / count) ** 0.5)).bit_length()
    size = max(32, balanced)
    return size if 2 * size * count <= width else 0


def _highest(values: Tensor, count: int) -> Tensor:
    keys = _sort_keys(values).topk(count, dim=-1).values
    return _LOWER_HALF - (keys & _LOWER_HALF)


def _sort_keys(values: Tensor) -> Tensor:
    """Return distinct int64 keys in the order of the float32 values, equal values in descending order of index.

    The upper half is the float's bits, changed to compare like the float; the lower half is a decreasing index.
    """
    bits = (values + 0.0).view(torch.int32)  # adding 0 turns -0.0 into 0.0
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    indices = torch.arange(values.shape[-1], device=values.device)
    return bits.long().mul_(2**32).add_(_LOWER_HALF - indices)

"""The indices of the highest values of long rows, found without sorting; of equal values the first is higher."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from inflight.sampling.transfer import as_array, as_tensor

_LOWER_HALF = 2**32 - 1


def first_highest(values: Tensor) -> Tensor:
    """Index [rows] of the highest value in each row of `values` [rows, width]; of a row with nan, a nan's."""
    if values.device.type == "cpu":  # there numpy's is several times as fast as torch's
        return as_tensor(as_array(values).argmax(axis=-1))
    return values.argmax(dim=-1)


def top_indices(values: Tensor, count: int) -> Tensor:
    """Indices [rows, count] of the highest values in descending order, equal ones in ascending order of index.

    The row is cut into blocks. Of `count` blocks with the highest maxima (of equal ones, the first), every maximum
    beats every value of every other block, so the `count` highest values are in them.

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
    """`reduction` over blocks of `size` consecutive values: [rows, ceil(width / size)], the last one shorter."""
    whole = values.shape[-1] // size
    reduced = reduction(values[:, : whole * size].unflatten(-1, (whole, size)), dim=-1)
    if whole * size == values.shape[-1]:
        return reduced
    return torch.cat([reduced, reduction(values[:, whole * size :], dim=-1, keepdim=True)], dim=-1)


def _block_size(width: int, count: int) -> int:
    """A power of 2 near where maxima and candidates are equally many; blocks below 32 are slow to reduce."""
    balanced = 1 << (int((width / count) ** 0.5)).bit_length()
    size = max(32, balanced)
    return size if 2 * size * count <= width else 0


def _highest(values: Tensor, count: int) -> Tensor:
    keys = _sort_keys(values).topk(count, dim=-1).values
    return _LOWER_HALF - (keys & _LOWER_HALF)


def _sort_keys(values: Tensor) -> Tensor:
    """Distinct int64 keys in the order of the float32 values, equal values in descending order of index.

    The upper half is the float's bits, turned so that they compare like the float; the lower half counts down.
    """
    bits = (values + 0.0).view(torch.int32)  # adding 0 makes -0.0 the 0.0 it is equal to
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    indices = torch.arange(values.shape[-1], device=values.device)
    return bits.long().mul_(2**32).add_(_LOWER_HALF - indices)

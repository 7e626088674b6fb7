"""The numbers that quantized matrices stand for, by the published layouts of their formats.

    weight[o, i] = (level[o, i] - zero[o, group]) * scale[o, group]

All of it is exact in float32 but for the last product, which is rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

FLOAT8 = "F8_E4M3"
"""What a safetensors file calls float8_e4m3fn."""

_WORD_BITS = 32
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""In which 4 bits of a word each of its 8 outputs lies."""


def unpack_bits(words: Tensor, bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """Unsigned numbers of `bits` bits out of int32 words [..., n]: uint8 [..., n * 32 / bits].

    `places`: which part of its word, counted from the lowest bits, each number is; None: in order.
    """
    per_word = _WORD_BITS // bits
    numbers = torch.empty((*words.shape, per_word), dtype=torch.uint8)
    for index, place in enumerate(places or range(per_word)):
        numbers[..., index] = (words >> (bits * place)) & ((1 << bits) - 1)
    return numbers.flatten(-2)


def dequantize_awq(words: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:
    """AutoAWQ's layout `gemm`, as float32 [outputs, inputs].

    Args:
        words: [inputs, outputs / 8] int32.
        zeros: [groups, outputs / 8] int32.
        scales: [groups, outputs].
    """
    levels = unpack_bits(words, 4, _AWQ_PLACES).T
    return _by_groups(levels, unpack_bits(zeros, 4, _AWQ_PLACES).T, scales.T)


def dequantize_gptq(
    words: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor | None, bits: int, zero_offset: int
) -> Tensor:
    """GPTQ's layout, as float32 [outputs, inputs].

    Args:
        words: [inputs * bits / 32, outputs] int32.
        zeros: [groups, outputs * bits / 32] int32.
        scales: [groups, outputs].
        groups: [inputs], each input's group; None: as many inputs after each other in every one.
        bits: 4 or 8.
        zero_offset: What is added to a stored zero point: 1 in the first version of the format.
    """
    levels = unpack_bits(words.T.contiguous(), bits)
    points = unpack_bits(zeros, bits).to(torch.int16).T + zero_offset
    return _by_groups(levels, points, scales.T, groups)


def dequantize_packed(
    words: Tensor, scales: Tensor, zeros: Tensor | None, groups: Tensor | None, bits: int, num_inputs: int
) -> Tensor:
    """compressed-tensors' format pack-quantized, as float32 [outputs, inputs].

    Signed levels are stored with half of their range added.

    Args:
        words: [outputs, inputs * bits / 32, rounded up] int32.
        scales: [outputs or 1, groups].
        zeros: [outputs * bits / 32, rounded up, groups] int32; None: all are 0.
        groups: [inputs], each input's group; None: as many inputs after each other in every one.
        bits: 4 or 8.
        num_inputs: How many inputs there are.
    """
    middle = 1 << (bits - 1)
    levels = unpack_bits(words, bits)[:, :num_inputs]
    points: Tensor = torch.full((1, 1), middle, dtype=torch.uint8)
    if zeros is not None:
        points = unpack_bits(zeros.T.contiguous(), bits).T[: len(levels)]
    return _by_groups(levels, points, scales, groups)


def dequantize_scaled(
    levels: Tensor, scales: Tensor, block: tuple[int, int] | None = None, zeros: Tensor | None = None
) -> Tensor:
    """int8 or float8 levels [outputs, inputs] times their scales, as float32.

    Args:
        levels: The stored matrix.
        scales: One number, or [outputs, 1] or [outputs], or [outputs, groups], or with `block` one for each block.
        block: Rows and columns that share a scale; at the edges there may be fewer.
        zeros: Zero points, like `scales`; None: all are 0.
    """
    scales = scales.float()
    if block is not None:
        rows, columns = block
        scales = scales.repeat_interleave(rows, 0)[: len(levels)]
        scales = scales.repeat_interleave(columns, 1)[:, : levels.shape[1]]
        return levels.float().mul_(scales)
    points = torch.zeros((1, 1)) if zeros is None else zeros.reshape(len(zeros), -1)
    return _by_groups(levels, points, scales.reshape(len(scales) if scales.dim() else 1, -1))


def _by_groups(levels: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor | None = None) -> Tensor:
    """(level - zero) * scale, [outputs, inputs] float32, by each input's group.

    `zeros` and `scales` are [outputs or 1, groups or 1].
    """
    weight = levels.float()
    if groups is not None:
        groups = groups.long()
        zeros = zeros.expand(-1, scales.shape[1])[:, groups]
        return weight.sub_(zeros).mul_(scales.float()[:, groups])
    num_inputs, num_groups = weight.shape[1], max(scales.shape[1], zeros.shape[1])
    of_groups = weight.contiguous().view(len(weight), num_groups, num_inputs // num_groups)
    of_groups.sub_(zeros[..., None]).mul_(scales.float()[..., None])
    return of_groups.view(len(weight), num_inputs)

"""Decodes the levels, zero points and scales of quantized matrices from the published layouts of their formats."""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.models.levels import FLOAT4, Levels

FLOAT8 = "F8_E4M3"
"""The name of float8_e4m3fn in safetensors files."""

_WORD_BITS = 32
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""For each of the 8 outputs in a word, the position of its 4 bits."""


def unpack_bits(words: Tensor, bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """Unpack unsigned numbers of `bits` bits from int32 words [..., n], or, only without `places`, from bytes
    [..., n].

    Returns uint8 [..., n * 32 / bits] from words, [..., n * 8 / bits] from bytes.
    `places`: position of each number in its word, counted from the lowest bits; None: in order.
    """
    stored = words.contiguous().view(torch.uint8)  # lowest bits first, as in the files
    if bits == 8 and places is None:
        return stored
    most = (1 << bits) - 1
    per_byte = 8 // bits
    if places is None:
        numbers = torch.empty((*stored.shape, per_byte), dtype=torch.uint8)
        for index in range(per_byte):
            torch.bitwise_and(stored >> (bits * index), most, out=numbers[..., index])
        return numbers.flatten(-2)
    of_words = torch.unflatten(stored, -1, (-1, _WORD_BITS // 8))
    numbers = torch.empty((*words.shape, len(places)), dtype=torch.uint8)
    for index, place in enumerate(places):
        numbers[..., index] = (of_words[..., place // per_byte] >> (bits * (place % per_byte))) & most
    return numbers.flatten(-2)


def awq_levels(words: Tensor, zeros: Tensor, scales: Tensor) -> Levels:
    """Unpack the 4-bit weights, zero points and scales of a linear layer that AutoAWQ saved as `gemm`.

    Args:
        words: [inputs, outputs / 8] int32.
        zeros: [groups, outputs / 8] int32.
        scales: [groups, outputs].
    """
    levels = unpack_bits(words, 4, _AWQ_PLACES).T.contiguous()
    return Levels(levels, scales.T.float(), unpack_bits(zeros, 4, _AWQ_PLACES).T, None, 4)


def gptq_levels(
    words: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor | None, bits: int, zero_offset: int
) -> Levels:
    """Decode GPTQ's layout; 8-bit levels become signed if all zero points are 128.

    Args:
        words: [inputs * bits / 32, outputs] int32.
        zeros: [groups, outputs * bits / 32] int32.
        scales: [groups, outputs].
        groups: [inputs], each input's group; None: groups of equal size, of consecutive inputs.
        bits: 4 or 8.
        zero_offset: Added to stored zero points: 1 in the first version of the format, otherwise 0.
    """
    levels = unpack_bits(words.T.contiguous(), bits)
    points: Tensor | None = unpack_bits(zeros, bits).to(torch.int16).T + zero_offset
    if bits == 8 and bool((points == 128).all()):
        levels, points = (levels ^ 128).view(torch.int8), None
    return Levels(levels, scales.T.float(), points, None if groups is None else groups.long(), bits)


def packed_levels(
    words: Tensor, scales: Tensor, zeros: Tensor | None, groups: Tensor | None, bits: int, num_inputs: int
) -> Levels:
    """Unpack the weights of a linear layer that compressed-tensors saved as `pack-quantized`.

    Signed levels are stored with half of their range added.

    Args:
        words: [outputs, inputs * bits / 32, rounded up] int32.
        scales: [outputs or 1, groups].
        zeros: [outputs * bits / 32, rounded up, groups] int32; None: all are 0.
        groups: [inputs], each input's group; None: groups of equal size, of consecutive inputs.
        bits: 4 or 8.
        num_inputs: Number of inputs.
    """
    middle = 1 << (bits - 1)
    levels = unpack_bits(words, bits)[:, :num_inputs]
    points: Tensor | None = torch.full((1, 1), middle, dtype=torch.uint8)
    if zeros is not None:
        points = unpack_bits(zeros.T.contiguous(), bits).T[: len(levels)]
    elif bits == 8:  # signed levels without zero points
        levels, points = (levels ^ middle).view(torch.int8), None
    return Levels(levels, scales.float(), points, None if groups is None else groups.long(), bits)


def float4_levels(packed: Tensor, exponents: Tensor) -> Levels:
    """Decode MXFP4: 4-bit floats with a power of 2 for each group of inputs.

    Args:
        packed: [outputs, inputs / 2] uint8; the lower half of a byte is the first of its two inputs.
        exponents: [outputs, groups] uint8; the scale of a group is 2 ** (exponent - 127).
    """
    scales = exponents.view(torch.float8_e8m0fnu).float()
    return Levels(unpack_bits(packed, 4), scales, None, None, 4, is_float4=True)


def nvfp4_levels(packed: Tensor, scales: Tensor) -> Levels:
    """Decode NVFP4, 4-bit floats with a scale for each group of inputs, to int8 levels that are twice the floats.

    Args:
        packed: [outputs, inputs / 2] uint8; the lower half of a byte is the first of its two inputs.
        scales: [outputs, groups] float32.
    """
    doubled = torch.tensor([int(2 * value) for value in FLOAT4], dtype=torch.int8)
    floats = unpack_bits(packed, 4)
    values = doubled.index_select(0, floats.flatten().int()).view(floats.shape)
    return Levels(values, scales / 2, None, None, 8)


def scaled_levels(
    levels: Tensor, scales: Tensor, block: tuple[int, int] | None = None, zeros: Tensor | None = None
) -> Levels:
    """Combine int8 or float8 levels [outputs, inputs] with their scales.

    Args:
        levels: The stored matrix.
        scales: One number, or [outputs, 1], [outputs] or [outputs, groups], or with `block` one per block.
        block: Number of rows and columns that share a scale; blocks at the edges may be smaller.
        zeros: Zero points in the shape of `scales`; None: all are 0.
    """
    scales = scales.float()
    if block is not None:
        rows, columns = block
        scales = scales.repeat_interleave(rows, 0)[: len(levels)]
        return Levels(levels, scales, None, torch.arange(levels.shape[1]) // columns, 8)
    points = None if zeros is None else zeros.float().reshape(len(zeros) if zeros.dim() else 1, -1)
    return Levels(levels, scales.reshape(len(scales) if scales.dim() else 1, -1), points, None, 8)

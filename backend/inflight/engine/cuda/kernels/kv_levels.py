"""Keys and values in 8 bits inside kernels: conversion of a head's values to levels and a scale, and back.

The arithmetic of `kv_quantization.py`. float8 is converted by integer operations on its bits, as older GPUs have
no instructions for the conversion, and Triton's interpreter computes it wrongly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.engine.cuda.kernels.language import Value, constexpr, jit, tl
from inflight.engine.kv_quantization import FP8_LEVELS, INT8_LEVELS
from inflight.shared_constants import MIN_SCALE

AS_COMPUTED, INT8, FP8 = 0, 1, 2
"""The values of a kernel's `LEVELS`: the storage of its KV cache."""

_MIN_SCALE = tl.constexpr(MIN_SCALE)
_KINDS = {INT8_LEVELS.stored: INT8, FP8_LEVELS.stored: FP8}


def levels_of(stored: torch.dtype) -> int:
    """Return `LEVELS` for a cache with keys and values of this dtype."""
    return _KINDS.get(stored, AS_COMPUTED)


def or_any(scales: tuple[Tensor, Tensor] | None, pages: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return `scales`, or any tensors if None, as a kernel needs tensor arguments even if it does not read
    them."""
    return pages if scales is None else scales


@jit()
def load_tokens(
    page: Value, rows: Value, columns: Value, inside: Value, scales: Value, tokens: Value, is_read: Value,
    any_result: Value, LEVELS: constexpr,
):  # fmt: skip
    """Load one head of some tokens' keys or values [tokens, columns], in the dtype of `any_result`.

    `scales` + `tokens` are the addresses of the tokens' scales.
    """
    numbers = tl.load(page + rows[:, None] + columns[None, :], mask=inside, other=0)
    if LEVELS == 0:
        return numbers
    scale = tl.load(scales + tokens, mask=is_read, other=0.0)
    if LEVELS == 1:
        wide = numbers.to(tl.float32)
    else:  # converted as halves, whose exponent bias is greater by 8
        bits = numbers.to(tl.int32)
        halves = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        wide = halves.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return (wide * scale[:, None]).to(any_result.dtype)


@jit()
def store_head(
    cache: Value, target: Value, scales: Value, place: Value, numbers: Value, inside: Value,
    LEVELS: constexpr,
):  # fmt: skip
    """Store a key or value of one head, unchanged or (with LEVELS) as levels and a scale at `place`.

    `inside` masks the head's `numbers`, which are 0 outside of it.
    """
    if LEVELS == 0:
        tl.store(cache + target, numbers, mask=inside)
    else:
        wide = numbers.to(tl.float32)
        levels, scale = _round_head(wide, LEVELS)
        tl.store(cache + target, levels.to(cache.dtype.element_ty), mask=inside)
        tl.store(scales + place, scale)


@jit()
def _round_head(numbers: Value, LEVELS: constexpr) -> tuple[Value, Value]:
    largest = 127.0 if LEVELS == 1 else 448.0
    is_number = numbers == numbers
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(numbers), axis=0), largest), _MIN_SCALE)
    has_no_number = tl.max((is_number == 0).to(tl.int32), axis=0) > 0
    scale = tl.where(has_no_number, float("nan"), scale)
    scaled = tl.div_rn(numbers, tl.zeros_like(numbers) + scale)
    # NaN becomes 0.
    scaled = tl.where(scaled == scaled, scaled, 0.0)
    if LEVELS == 1:
        # A sum with 1.5 * 2**23 has the nearest integer in its last bits.
        levels = (scaled + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    else:
        bits = scaled.to(tl.int32, bitcast=True)
        positive = bits & 0x7FFFFFFF
        # Round to nearest, ties to even: the last 20 of 23 mantissa bits are dropped.
        normal = ((positive + 0x7FFFF + ((positive >> 20) & 1)) >> 20) - (120 << 3)
        # A sum with 2**14 has multiples of 2**-9 in its last bits.
        small = (tl.abs(scaled) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        levels = tl.where(positive < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)
    return levels, scale

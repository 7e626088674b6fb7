"""Quantizes the rows of a matrix to 8 bits, as int8 or float8 levels with a scale per row."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from inflight.config import FP8, INT8
from inflight.models.levels import GroupedMatrix
from inflight.models.sink import StoredMatrix
from inflight.shared_constants import MIN_SCALE

RowQuantizer = Callable[[Tensor], tuple[Tensor, Tensor]]
"""A function that quantizes rows [rows, inner]; it returns levels of this shape, and a float32 scale per row."""

INT8_LEVELS = 127
FLOAT8 = torch.float8_e4m3fn
_OF_LARGEST = 1 / torch.finfo(FLOAT8).max
# Elements of a matrix that are quantized at a time, in float32.
_NUMBERS_AT_ONCE = {"cpu": 1 << 19, "cuda": 1 << 24}


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 levels [rows, inner] and a float32 scale per row; a row's largest magnitude becomes 127."""
    wide = weight.float()
    largest = wide.abs().amax(1)
    # By a tensor: torch on a GPU multiplies by a number's reciprocal instead, which may change a level.
    scales = largest / torch.full_like(largest, INT8_LEVELS)
    return (wide / scales.clamp_min(MIN_SCALE)[:, None]).round_().to(torch.int8), scales


def quantize_float8(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return float8_e4m3fn levels [rows, inner] and a float32 scale per row; a row's largest magnitude becomes
    448."""
    wide = values.float()
    # Multiplied by the reciprocal, as torch on a GPU divides by constants, so that all devices give equal scales.
    scales = wide.abs().amax(1).mul_(_OF_LARGEST).clamp_min_(MIN_SCALE)
    return (wide / scales[:, None]).to(FLOAT8), scales


_QUANTIZERS: dict[str | None, tuple[RowQuantizer, torch.dtype]] = {
    INT8: (quantize_int8, torch.int8),
    FP8: (quantize_float8, FLOAT8),
}


def quantize_matrix(weight: Tensor, dtype: str | None) -> StoredMatrix:
    """Return a matrix [outputs, inputs] in int8 or fp8 with a scale per row; unchanged for any other dtype.

    Some rows are quantized at a time, so that little more memory than the result is needed.
    """
    if dtype not in _QUANTIZERS:
        return weight
    quantize, level_dtype = _QUANTIZERS[dtype]
    outputs, inputs = weight.shape
    levels = torch.empty(weight.shape, dtype=level_dtype, device=weight.device)
    scales = torch.empty(outputs, device=weight.device)
    step = max(1, _NUMBERS_AT_ONCE[weight.device.type] // max(1, inputs))
    for begin in range(0, outputs, step):
        rows = slice(begin, begin + step)
        levels[rows], scales[rows] = quantize(weight[rows])
    return GroupedMatrix(levels, scales[:, None], None, inputs, None, 8)

"""Quantizes the rows of a matrix to 8 bits, as int8 or float8 levels with a scale per row."""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.shared_constants import LEAST_SCALE

INT8_LEVELS = 127
FLOAT8 = torch.float8_e4m3fn
_OF_LARGEST = 1 / torch.finfo(FLOAT8).max


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 levels [rows, inner] and a float32 scale per row; a row's largest magnitude becomes 127."""
    wide = weight.float()
    scales = wide.abs().amax(1) / INT8_LEVELS
    return (wide / scales.clamp_min(LEAST_SCALE)[:, None]).round_().to(torch.int8), scales


def quantize_float8(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return float8_e4m3fn levels [rows, inner] and a float32 scale per row; a row's largest magnitude becomes
    448."""
    wide = values.float()
    # Multiplied by the reciprocal, as torch on a GPU divides by constants, so that all devices give equal scales.
    scales = wide.abs().amax(1).mul_(_OF_LARGEST).clamp_min_(LEAST_SCALE)
    return (wide / scales[:, None]).to(FLOAT8), scales

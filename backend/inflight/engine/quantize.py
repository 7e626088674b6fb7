"""Rounds the rows of a matrix to 8 bits, each by a scale of its own: int8 or float8 levels."""

from __future__ import annotations

import torch
from torch import Tensor

INT8_LEVELS = 127
FLOAT8 = torch.float8_e4m3fn
LEAST_SCALE = 1e-30
_OF_LARGEST = 1 / torch.finfo(FLOAT8).max


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [rows, inner] and a float32 scale for each row; the largest of a row is 127 scales."""
    wide = weight.float()
    scales = wide.abs().amax(1) / INT8_LEVELS
    return (wide / scales.clamp_min(LEAST_SCALE)[:, None]).round_().to(torch.int8), scales


def quantize_float8(values: Tensor) -> tuple[Tensor, Tensor]:
    """float8_e4m3fn [rows, inner] and a float32 scale for each row; the largest of a row is 448 scales."""
    wide = values.float()
    # By a product: torch divides by a number so on a GPU, and kernels have to get the same scales.
    scales = wide.abs().amax(1).mul_(_OF_LARGEST).clamp_min_(LEAST_SCALE)
    return (wide / scales[:, None]).to(FLOAT8), scales

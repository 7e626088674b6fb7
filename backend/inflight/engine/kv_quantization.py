"""Quantization of keys and values to 8 bits, with a scale for each token and head.

The values of a head become levels of one byte and a float32 scale, by which levels are multiplied when they are
read. The scale depends on the head's values alone, so the stored data of a token do not depend on other tokens
or on the batch. int8 has 255 equidistant levels; fp8 (e4m3) has a 4-bit exponent and a 3-bit mantissa. Either
maps the head's largest value to the largest level.

A head with an infinity or NaN has a scale that makes all its values NaN when they are read; levels are always
finite. Compiled layers (cpu/source/kv_levels.h) and the kernels in Triton's language
(cuda/kernels/kv_levels.py) compute the same levels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.config import FP8, INT8
from inflight.shared_constants import MIN_SCALE

SCALE_BYTES = 4
_FLOAT8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class KvQuantization:
    """An 8-bit format of keys and values.

    Attributes:
        name: Name of the format in the parameter kv_cache_dtype.
        stored: Data type of the bytes: int8, or uint8 for the bits of a float8_e4m3fn.
        largest: The level of a head's largest value.
    """

    name: str
    stored: torch.dtype
    largest: float

    def round(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Quantize `numbers` [..., head_dim]; return levels of the same shape, in dtype `stored`, and their scales
        [...] float32."""
        wide = numbers.float()
        scales = wide.abs().amax(-1)
        # By a tensor: torch on a GPU multiplies by a number's reciprocal instead, which may change a level.
        scales = scales.div_(torch.full_like(scales, self.largest)).clamp_min_(MIN_SCALE)
        levels = (wide / scales[..., None]).nan_to_num_(0.0)
        if self.name == FP8:
            return levels.to(_FLOAT8).view(self.stored), scales
        return levels.round_().to(self.stored), scales

    def restore(self, levels: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the values of quantized levels [..., head_dim] with `scales` [...], in `dtype`."""
        known = levels.view(_FLOAT8) if self.name == FP8 else levels
        return known.float().mul_(scales[..., None]).to(dtype)


INT8_LEVELS = KvQuantization(INT8, torch.int8, 127.0)
FP8_LEVELS = KvQuantization(FP8, torch.uint8, torch.finfo(_FLOAT8).max)


def find_kv_quantization(kv_cache_dtype: str) -> KvQuantization | None:
    """Return the format that the parameter names; None: keys and values are not quantized."""
    return {INT8: INT8_LEVELS, FP8: FP8_LEVELS}.get(kv_cache_dtype)


def head_bytes(head_dim: int, dtype: torch.dtype, quantization: KvQuantization | None) -> int:
    """Return the size of one head's key, or value, of one token in bytes, its scale included."""
    if quantization is None:
        return head_dim * dtype.itemsize
    return head_dim * quantization.stored.itemsize + SCALE_BYTES

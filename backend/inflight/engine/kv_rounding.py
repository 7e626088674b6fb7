"""How keys and values are rounded to 8 bits: each token's, head by head, by a scale of their own.

A head's numbers become levels of a byte, and a float32 scale that they are multiplied by when they are read. The
scale follows from these numbers alone, so what is stored of a token does not depend on other tokens, nor on who
else is in the batch. int8 has 255 levels at equal distances; fp8 (e4m3) has numbers of four bits and an exponent.
In both the largest number of a head is the largest level.

A head with an infinity or NaN has a scale that makes all of it NaN when it is read. Levels are finite
whatever was stored. Compiled layers (cpu/source/kv_levels.h) and the kernels in Triton's language
(cuda/kernels/kv_levels.py) round in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.config import FP8, INT8
from inflight.models import DecoderConfig

LEAST_SCALE = 1e-30
"""Of heads of zeros."""

SCALE_BYTES = 4
_FLOAT8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class KvRounding:
    """One of the ways to round.

    Attributes:
        name: As the parameter kv_cache_dtype.
        stored: Dtype of the bytes: int8, or uint8 for the bits of a float8_e4m3fn.
        largest: Level of a head's largest number.
    """

    name: str
    stored: torch.dtype
    largest: float

    def round(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Levels of `numbers` [..., head_dim], `stored`, and their scales [...] float32."""
        wide = numbers.float()
        scales = wide.abs().amax(-1).div_(self.largest).clamp_min_(LEAST_SCALE)
        levels = (wide / scales[..., None]).nan_to_num_(0.0)
        if self.name == FP8:
            return levels.to(_FLOAT8).view(self.stored), scales
        return levels.round_().to(self.stored), scales

    def restore(self, levels: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """The values that quantized levels [..., head_dim] with `scales` [...] stand for, in `dtype`."""
        known = levels.view(_FLOAT8) if self.name == FP8 else levels
        return known.float().mul_(scales[..., None]).to(dtype)


INT8_LEVELS = KvRounding(INT8, torch.int8, 127.0)
FP8_LEVELS = KvRounding(FP8, torch.uint8, torch.finfo(_FLOAT8).max)


def find_rounding(kv_cache_dtype: str) -> KvRounding | None:
    """The rounding that the parameter asks for; None: keys and values are stored as they are computed."""
    return {INT8: INT8_LEVELS, FP8: FP8_LEVELS}.get(kv_cache_dtype)


def head_bytes(decoder: DecoderConfig, dtype: torch.dtype, rounding: KvRounding | None) -> int:
    """Bytes that a cache takes for a key or a value of one head of a token."""
    if rounding is None:
        return decoder.head_dim * dtype.itemsize
    return decoder.head_dim * rounding.stored.itemsize + SCALE_BYTES

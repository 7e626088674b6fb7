"""Rotary position tables, computed once in float32."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from inflight.models.decoder_config import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    RopeConfig,
    YarnScaling,
)


def rope_tables(rope: RopeConfig, head_dim: int, max_positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin of every position's angles, each [max_positions, head_dim / 2] float32 on the CPU."""
    frequencies, factor = inverse_frequencies(rope, head_dim)
    angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * frequencies
    return angles.cos() * factor, angles.sin() * factor


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Radians a token turns each pair of dimensions, [head_dim / 2] float32, and the factor on cos and sin."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    scaling = rope.scaling
    if scaling is None or isinstance(scaling, DynamicScaling):
        return frequencies, 1.0
    if isinstance(scaling, LinearScaling):
        return frequencies / scaling.factor, 1.0
    if isinstance(scaling, Llama3Scaling):
        return _llama3(frequencies, scaling), 1.0
    return _yarn(frequencies, scaling, rope.theta), scaling.attention_factor


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)  # 0: divide by the factor, 1: keep
    return frequencies * kept + frequencies / scaling.factor * (1 - kept)


def _yarn(frequencies: Tensor, scaling: YarnScaling, theta: float) -> Tensor:
    pairs = frequencies.shape[0]

    def pair_that_turns(times: float) -> float:
        """The (fractional) index of the pair that turns `times` times over the original positions."""
        return pairs * math.log(scaling.original_max_positions / (times * 2 * math.pi)) / math.log(theta)

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    if first == last:
        last += 0.001  # a step instead of a ramp, without dividing by zero
    scaled = ((torch.arange(pairs, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    return frequencies / scaling.factor * scaled + frequencies * (1 - scaled)

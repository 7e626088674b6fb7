"""Computes the tables of rotary positions, in float32 on the CPU, with a row for each position.

For models that scale queries by their position, computes these factors, too.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from inflight.models.decoder_config import AttentionTemperature
from inflight.models.rope_config import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    RopeConfig,
    YarnScaling,
)


def rope_tables(rope: RopeConfig, head_dim: int, max_positions: int) -> tuple[Tensor, Tensor]:
    """Return cos and sin of every position's angles, each [max_positions, rotary_dim / 2] float32 on the CPU."""
    frequencies, factor = inverse_frequencies(rope, head_dim, max_positions)
    angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * frequencies
    return angles.cos() * factor, angles.sin() * factor


def query_factors(temperature: AttentionTemperature, max_positions: int) -> Tensor:
    """Return the factor of queries at every position, [max_positions] float32 on the CPU."""
    positions = torch.arange(max_positions, dtype=torch.float32)
    steps = torch.floor((positions + temperature.first_position) / temperature.interval)
    return 1 + temperature.growth * torch.log1p(steps)


def inverse_frequencies(rope: RopeConfig, head_dim: int, max_positions: int) -> tuple[Tensor, float]:
    """Return each pair's angle in radians per token, [rotary_dim / 2] float32, and the factor of cos and sin.

    `max_positions`: number of positions that an engine uses.
    """
    rotary_dim = rope.rotary_dim(head_dim)
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    frequencies = 1.0 / rope.theta**exponents
    scaling = rope.scaling
    if scaling is None or isinstance(scaling, DynamicScaling):
        return frequencies, 1.0
    if isinstance(scaling, LinearScaling):
        return frequencies / scaling.factor, 1.0
    if isinstance(scaling, ProportionalScaling):
        turns = torch.arange(len(frequencies)) < int(scaling.part * head_dim // 2)
        return frequencies / scaling.factor * turns, 1.0
    if isinstance(scaling, Llama3Scaling):
        return _llama3(frequencies, scaling), 1.0
    if isinstance(scaling, LongRopeScaling):
        is_long = max_positions > scaling.original_max_positions
        factors = torch.tensor(scaling.long_factors if is_long else scaling.short_factors)
        return frequencies / factors, scaling.attention_factor
    return _yarn(frequencies, scaling, rope.theta), scaling.attention_factor


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if high <= low:  # no ramp, as in Llama 4 Scout, whose two factors are equal
        return torch.where(turns < low, frequencies / scaling.factor, frequencies)
    kept = ((turns - low) / (high - low)).clamp(0, 1)  # 0: divide by the factor, 1: keep
    return frequencies * kept + frequencies / scaling.factor * (1 - kept)


def _yarn(frequencies: Tensor, scaling: YarnScaling, theta: float) -> Tensor:
    pairs = frequencies.shape[0]

    def pair_with_rotations(times: float) -> float:
        """Return the (fractional) index of the pair with `times` full rotations over the original positions."""
        return pairs * math.log(scaling.original_max_positions / (times * 2 * math.pi)) / math.log(theta)

    first, last = pair_with_rotations(scaling.beta_fast), pair_with_rotations(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    if first == last:
        last += 0.001  # a step instead of a ramp, without dividing by zero
    scaled = ((torch.arange(pairs, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    return frequencies / scaling.factor * scaled + frequencies * (1 - scaled)

"""Rotary positions: the section of config.json that describes them, and their tables, computed once in float32.

transformers 5 writes one object, `rope_parameters` with `rope_theta` and `rope_type` inside; older checkpoints
have `rope_theta` at the top and `rope_scaling` with `rope_type` (or `type`) when there is any scaling.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from inflight.models.config_file import ConfigFile, refuse_unread
from inflight.models.decoder_config import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    RopeConfig,
    RopeScaling,
    YarnScaling,
)

_DEFAULT_THETA = 10000.0
_SUPPORTED = "one of default, linear, dynamic, llama3, yarn"
# YaRN's authors wrote it beside the scaling that a model was trained with.
_NEUTRAL = {"finetuned": (None, True, False)}


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


def read_rope(config: ConfigFile, max_positions: int) -> RopeConfig:
    """The model's rotary positions. Raises ConfigError for a type, or a key of it, that is not understood.

    `max_positions` is `max_position_embeddings`, or what stands for it.
    """
    section = _section(config)
    theta = config.number_or_none("rope_theta") or _DEFAULT_THETA
    theta = section.number_or_none("rope_theta") or theta
    for place in (section, config):
        if place.number_or_none("partial_rotary_factor") not in (None, 1.0):
            raise place.error(
                "partial_rotary_factor", "1.0: rotary positions on part of a head are not supported"
            )
    rope = RopeConfig(theta, _read_scaling(config, section, max_positions))
    refuse_unread(section, _NEUTRAL)
    return rope


def longest_sequence(rope: RopeConfig, max_positions: int) -> int:
    """How many tokens the positions reach.

    Linear and YaRN scaling stretch what the model was first trained with by their factor, and many a
    `max_position_embeddings` beside them was left as it was. Llama 3's is always that of the scaled model. Dynamic
    NTK ends where it would begin to scale: what is cached then stands for positions of another base.
    """
    scaling = rope.scaling
    if isinstance(scaling, LinearScaling | YarnScaling):
        return max(max_positions, int(scaling.factor * scaling.original_max_positions))
    return max_positions


def _section(config: ConfigFile) -> ConfigFile:
    found = [key for key in ("rope_scaling", "rope_parameters") if config.value(key)]
    if len(found) == 2 and config.values["rope_scaling"] != config.values["rope_parameters"]:
        raise config.error("rope_scaling", "the same as rope_parameters, or no such key")
    return config.child(found[0]) if found else ConfigFile(config.path, {}, "rope_parameters")


def _read_scaling(config: ConfigFile, section: ConfigFile, max_positions: int) -> RopeScaling | None:
    key = "rope_type" if section.has("rope_type") else "type"
    kind = section.text_or_none("rope_type") or section.text_or_none("type") or "default"
    for name, value in section.values.items():
        if isinstance(value, dict):
            raise section.error(name, "no values of its own: a set for each layer type is not supported")
    original = _original_max_positions(config, section) or max_positions
    if kind == "default":
        return None
    if kind == "dynamic":
        return DynamicScaling(section.number("factor"))
    if kind == "linear":
        return LinearScaling(section.number("factor"), original)
    if kind == "llama3":
        return _read_llama3(section, original)
    if kind == "yarn":
        return _read_yarn(section, original, max_positions)
    raise section.error(key, _SUPPORTED)


def _original_max_positions(config: ConfigFile, section: ConfigFile) -> int | None:
    key = "original_max_position_embeddings"
    inside = section.int_or_none(key)
    return config.int_or_none(key) or inside


def _read_llama3(section: ConfigFile, original: int) -> Llama3Scaling:
    low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
    if high <= low:
        raise section.error("high_freq_factor", f"more than low_freq_factor, which is {low}")
    return Llama3Scaling(
        factor=section.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_positions=original,
    )


def _read_yarn(section: ConfigFile, original: int, max_positions: int) -> YarnScaling:
    factor = section.number_or_none("factor") or max_positions / original
    computed = _yarn_attention_factor(section, factor)
    return YarnScaling(
        factor=factor,
        original_max_positions=original,
        beta_fast=section.number_or_none("beta_fast") or 32.0,
        beta_slow=section.number_or_none("beta_slow") or 1.0,
        attention_factor=section.number_or_none("attention_factor") or computed,
        truncate=section.boolean("truncate", True),
    )


def _yarn_attention_factor(section: ConfigFile, factor: float) -> float:
    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    both = section.value("mscale"), section.value("mscale_all_dim")
    if all(both):
        return scale(section.number("mscale")) / scale(section.number("mscale_all_dim"))
    return scale(1.0)

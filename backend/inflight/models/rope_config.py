"""The rotary section of config.json, in both spellings, → RopeConfig.

transformers 5 writes one object, `rope_parameters` with `rope_theta` and `rope_type` inside; older checkpoints
have `rope_theta` at the top and `rope_scaling` with `rope_type` (or `type`) when there is any scaling.
"""

from __future__ import annotations

import math

from inflight.models.config_file import ConfigFile
from inflight.models.decoder_config import LinearScaling, Llama3Scaling, RopeConfig, RopeScaling, YarnScaling

_DEFAULT_THETA = 10000.0
_SUPPORTED = "one of default, linear, dynamic, llama3, yarn"


def read_rope(config: ConfigFile) -> RopeConfig:
    """The model's rotary positions. Raises ConfigError for a type that is not supported."""
    section = _section(config)
    theta = section.number_or_none("rope_theta") or config.number_or_none("rope_theta") or _DEFAULT_THETA
    for place in (section, config):
        if place.number_or_none("partial_rotary_factor") not in (None, 1.0):
            raise place.error(
                "partial_rotary_factor", "1.0: rotary positions on part of a head are not supported"
            )
    return RopeConfig(theta, _read_scaling(config, section))


def _section(config: ConfigFile) -> ConfigFile:
    for key in ("rope_scaling", "rope_parameters"):
        if config.has(key):
            return config.child(key)
    return ConfigFile(config.path, {}, "rope_parameters")


def _read_scaling(config: ConfigFile, section: ConfigFile) -> RopeScaling | None:
    key = "rope_type" if section.has("rope_type") else "type"
    kind = section.text_or_none(key) or "default"
    for name, value in section.values.items():
        if isinstance(value, dict):
            raise section.error(name, "no values of its own: a set for each layer type is not supported")
    # Dynamic NTK changes the base only beyond max_position_embeddings, where this server's sequences end.
    if kind in ("default", "dynamic"):
        return None
    if kind == "linear":
        return LinearScaling(section.number("factor"))
    if kind == "llama3":
        return _read_llama3(config, section)
    if kind == "yarn":
        return _read_yarn(config, section)
    raise section.error(key, _SUPPORTED)


def _original_max_positions(config: ConfigFile, section: ConfigFile) -> int:
    key = "original_max_position_embeddings"
    return (
        config.int_or_none(key) or section.int_or_none(key) or config.positive_int("max_position_embeddings")
    )


def _read_llama3(config: ConfigFile, section: ConfigFile) -> Llama3Scaling:
    low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
    if high <= low:
        raise section.error("high_freq_factor", f"more than low_freq_factor, which is {low}")
    return Llama3Scaling(
        factor=section.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_positions=_original_max_positions(config, section),
    )


def _read_yarn(config: ConfigFile, section: ConfigFile) -> YarnScaling:
    original = _original_max_positions(config, section)
    factor = section.number_or_none("factor") or config.positive_int("max_position_embeddings") / original
    return YarnScaling(
        factor=factor,
        original_max_positions=original,
        beta_fast=section.number_or_none("beta_fast") or 32.0,
        beta_slow=section.number_or_none("beta_slow") or 1.0,
        attention_factor=section.number_or_none("attention_factor")
        or _yarn_attention_factor(section, factor),
        truncate=section.boolean("truncate", True),
    )


def _yarn_attention_factor(section: ConfigFile, factor: float) -> float:
    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if section.values.get("mscale") and section.values.get("mscale_all_dim"):
        return scale(section.number("mscale")) / scale(section.number("mscale_all_dim"))
    return scale(1.0)

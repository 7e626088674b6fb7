"""Reads from config.json how positions are rotated. `rope_tables.py` computes the tables.

transformers 5 writes one object, `rope_parameters` with `rope_theta` and `rope_type` inside; older checkpoints
have `rope_theta` at the top level, and `rope_scaling` with `rope_type` (or `type`) if there is any scaling.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from inflight.checkpoint_config import ConfigFile
from inflight.models.neutral_keys import ANY, NeutralKeys, refuse_unread
from inflight.models.rope_config import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    RopeConfig,
    RopeScaling,
    YarnScaling,
)

_DEFAULT_THETA = 10000.0
_SUPPORTED = "one of default, linear, dynamic, llama3, yarn, longrope, proportional"
_NEUTRAL: NeutralKeys = {
    "finetuned": (None, True, False),  # written by YaRN's authors, for scaling that was used in training
    # Requests bring the rotations of positions in time, height and width, which are equal in text.
    "mrope_section": ANY,
    "mrope_interleaved": ANY,
}
# attn_factor is read by other implementations; transformers reads only attention_factor.
_YARN_NEUTRAL: NeutralKeys = {**_NEUTRAL, "attn_factor": ANY}


def read_rope(
    config: ConfigFile,
    max_positions: int,
    default_theta: float = _DEFAULT_THETA,
    default_part: float | None = None,
    of_section_alone: bool = False,
) -> RopeConfig:
    """Read the model's rotary positions; raise ConfigError for an unknown type of scaling or an unknown key.

    Args:
        config: The whole file.
        max_positions: `max_position_embeddings`, or its equivalent.
        default_theta: The base if the key is absent.
        of_section_alone: As for `read_rope_section`.
        default_part: Rotated fraction of a head if the key is absent; None: the family always rotates all
            dimensions.
    """
    theta = config.number_or_none("rope_theta") or default_theta
    return read_rope_section(config, _section(config), max_positions, theta, default_part, of_section_alone)


def read_layer_type_ropes(
    config: ConfigFile, max_positions: int, default_thetas: Mapping[str, float]
) -> dict[str, RopeConfig]:
    """Read the rotary positions of each layer type, from its section in `rope_parameters`.

    Without `rope_parameters`, `rope_theta` and `rope_scaling` apply to full_attention, and
    `rope_local_base_freq` is the base of sliding_attention.
    """
    thetas = dict(default_thetas)
    for kind, key in (("full_attention", "rope_theta"), ("sliding_attention", "rope_local_base_freq")):
        thetas[kind] = config.number_or_none(key) or thetas[kind]
    sections = {kind: ConfigFile(config.path, {}, "rope_parameters") for kind in thetas}
    if config.value("rope_parameters"):
        parameters = config.child("rope_parameters")
        for kind, value in parameters.values.items():
            if kind not in sections or not isinstance(value, dict):
                raise config.error("rope_parameters", f"a section for each of {', '.join(sections)}")
            sections[kind] = parameters.child(kind)
    if config.value("rope_scaling"):
        if config.value("rope_parameters"):
            raise config.error("rope_scaling", "no such key beside rope_parameters")
        sections["full_attention"] = config.child("rope_scaling")
        if not sections["full_attention"].has("rope_type"):
            raise config.error("rope_scaling", "an object with rope_type")
    return {
        kind: read_rope_section(config, sections[kind], max_positions, theta)
        for kind, theta in thetas.items()
    }


def read_rope_section(
    config: ConfigFile,
    section: ConfigFile,
    max_positions: int,
    default_theta: float,
    default_part: float | None = None,
    of_section_alone: bool = False,
) -> RopeConfig:
    """Read rotary positions from one section; `config` is the file that contains it.

    With `of_section_alone`, `partial_rotary_factor` is read from the section only. Otherwise it may also be at the
    file's top level, where null means that all dimensions are rotated.
    """
    theta = section.number_or_none("rope_theta") or default_theta
    scaling = _read_scaling(config, section, max_positions)
    if isinstance(scaling, ProportionalScaling):
        refuse_unread(section, _NEUTRAL)
        return RopeConfig(theta, scaling)
    is_null = not of_section_alone and "partial_rotary_factor" in config.values
    part = 1.0 if default_part is None or is_null else default_part
    for place in (section,) if of_section_alone else (config, section):
        given = place.number_or_none("partial_rotary_factor")
        if given is not None and (given > 1 or (default_part is None and given != 1)):
            expected = "at most 1" if default_part else "1.0: this family rotates whole heads"
            raise place.error("partial_rotary_factor", expected)
        part = part if given is None else given
    refuse_unread(section, _YARN_NEUTRAL if isinstance(scaling, YarnScaling) else _NEUTRAL)
    return RopeConfig(theta, scaling, part, is_multimodal=bool(section.value("mrope_section")))


def section_key(config: ConfigFile) -> str:
    """Return the key of the object that describes rotary positions."""
    return "rope_scaling" if config.value("rope_scaling") else "rope_parameters"


def _section(config: ConfigFile) -> ConfigFile:
    scaling, parameters = config.value("rope_scaling"), config.value("rope_parameters")
    if scaling and parameters and scaling != parameters:
        raise config.error("rope_scaling", "the same as rope_parameters, or nothing")
    key = section_key(config)
    return config.child(key) if config.value(key) else ConfigFile(config.path, {}, key)


def _read_scaling(config: ConfigFile, section: ConfigFile, max_positions: int) -> RopeScaling | None:
    # Older transformers versions save both names of the type; if both are present, the newer one is used.
    kinds = {name: section.text_or_none(name) for name in ("type", "rope_type")}
    key = "rope_type" if kinds["rope_type"] else "type"
    kind = kinds[key] or "default"
    for name, value in section.values.items():
        if isinstance(value, dict):
            raise section.error(name, "no values of its own: a set for each layer type is not supported")
    original = _original_max_positions(config, section) or max_positions
    if kind in ("default", "mrope"):
        return None
    if kind == "dynamic":
        return DynamicScaling(section.number("factor"))
    if kind == "linear":
        return LinearScaling(section.number("factor"), original)
    if kind == "llama3":
        return _read_llama3(section, original)
    if kind == "yarn":
        return _read_yarn(section, original, max_positions)
    if kind == "proportional":
        part = (
            1.0 if section.value("partial_rotary_factor") is None else section.number("partial_rotary_factor")
        )
        if part > 1:
            raise section.error("partial_rotary_factor", "at most 1")
        return ProportionalScaling(part, section.number_or_none("factor") or 1.0)
    if kind in ("longrope", "su"):
        return _read_longrope(section, original, max_positions)
    raise section.error(key, _SUPPORTED)


def _original_max_positions(config: ConfigFile, section: ConfigFile) -> int | None:
    key = "original_max_position_embeddings"
    inside = section.int_or_none(key)
    return config.int_or_none(key) or inside


def _read_llama3(section: ConfigFile, original: int) -> Llama3Scaling:
    return Llama3Scaling(
        factor=section.number("factor"),
        low_freq_factor=section.number("low_freq_factor"),
        high_freq_factor=section.number("high_freq_factor"),
        original_max_positions=original,
    )


def _read_yarn(section: ConfigFile, original: int, max_positions: int) -> YarnScaling:
    factor = section.number_or_none("factor") or max_positions / original
    computed = _yarn_attention_factor(section, factor)
    of_all = section.number("mscale_all_dim") if section.value("mscale_all_dim") else 0.0
    return YarnScaling(
        factor=factor,
        original_max_positions=original,
        beta_fast=section.number("beta_fast") if section.value("beta_fast") else 32.0,
        beta_slow=section.number("beta_slow") if section.value("beta_slow") else 1.0,
        attention_factor=section.number_or_none("attention_factor") or computed,
        truncate=section.boolean("truncate", "truncate" not in section.values),  # null is false
        all_dim_factor=_yarn_mscale(factor, of_all),
    )


def _read_longrope(section: ConfigFile, original: int, max_positions: int) -> LongRopeScaling:
    factor = section.number_or_none("factor") or max_positions / original
    if factor > 1 and original == 1:
        raise section.error("original_max_position_embeddings", "more than 1")
    computed = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return LongRopeScaling(
        short_factors=section.numbers("short_factor"),
        long_factors=section.numbers("long_factor"),
        original_max_positions=original,
        attention_factor=section.number_or_none("attention_factor") or computed,
    )


def _yarn_attention_factor(section: ConfigFile, factor: float) -> float:
    both = section.value("mscale"), section.value("mscale_all_dim")
    if all(both):
        mscale, of_all = section.number("mscale"), section.number("mscale_all_dim")
        return _yarn_mscale(factor, mscale) / _yarn_mscale(factor, of_all)
    return _yarn_mscale(factor, 1.0)


def _yarn_mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

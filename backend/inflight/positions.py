"""The longest sequence that a checkpoint's positions allow, by the keys of its config.json.

Owns each family's value of absent keys. Loading a checkpoint and programs that load none use the same function.
Standard library only; plain functions on parsed JSON, any thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inflight.json_values import MAX_NUMBER, is_object, positive_int

_KEY, _ORIGINAL = "max_position_embeddings", "original_max_position_embeddings"


@dataclass(frozen=True, slots=True)
class _Positions:
    """A family's number of positions.

    Attributes:
        default: transformers' value if no key is present; None for an unknown family.
        keys: The keys that have the number; the first one that is present counts.
        is_scaled: Whether the number is the one after linear scaling.
        scaling: transformers' `rope_parameters` of files that have none.
    """

    default: int | None
    keys: tuple[str, ...] = (_KEY,)
    is_scaled: bool = False
    scaling: Mapping[str, Any] | None = None


MINISTRAL3_SCALING: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    _ORIGINAL: 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""`rope_parameters` of Ministral 3's files that have none."""

MISTRAL4_SCALING: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 128.0,
    _ORIGINAL: 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""`rope_parameters` of Mistral 4's files that have none."""

GPT_OSS_SCALING: Mapping[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    _ORIGINAL: 4096,
}
"""`rope_parameters` of gpt-oss's files that have none."""

_UNKNOWN = _Positions(None, (_KEY, "n_positions", "n_ctx"))
_FAMILIES = {
    "llama": _Positions(2048),
    "mistral": _Positions(131072),
    "ministral": _Positions(131072),
    "ministral3": _Positions(262144, scaling=MINISTRAL3_SCALING),
    "qwen2": _Positions(32768),
    "qwen3": _Positions(32768),
    "phi3": _Positions(4096),
    "arcee": _Positions(4096),
    "apertus": _Positions(65536),
    "seed_oss": _Positions(524288),
    "olmo2": _Positions(2048),
    "olmo3": _Positions(2048),
    "exaone4": _Positions(2048),
    "smollm3": _Positions(32768),
    "llama4_text": _Positions(131072),
    "granite": _Positions(2048),
    "granite_swa": _Positions(8192),
    "granitemoe_swa": _Positions(2048),
    "mixtral": _Positions(131072),
    "qwen2_moe": _Positions(32768),
    "qwen3_moe": _Positions(32768),
    "olmoe": _Positions(4096),
    "minimax_m2": _Positions(196608),
    "mistral4": _Positions(1048576, scaling=MISTRAL4_SCALING),
    "deepseek_v2": _Positions(2048),
    "deepseek_v3": _Positions(4096),
    "glm4": _Positions(131072),
    "glm4_moe": _Positions(131072),
    "glm4_moe_lite": _Positions(202752),
    "ernie4_5": _Positions(131072),
    "ernie4_5_moe": _Positions(131072),
    "hunyuan_v1_dense": _Positions(2048),
    "hunyuan_v1_moe": _Positions(2048),
    "gpt_oss": _Positions(131072, scaling=GPT_OSS_SCALING),
    "gemma2": _Positions(8192),
    "gemma3_text": _Positions(131072, is_scaled=True),
    "gemma3n_text": _Positions(32768, is_scaled=True),
    "gemma4_text": _Positions(131072, is_scaled=True),
    "gemma4_unified_text": _Positions(262144, is_scaled=True),
    "cohere2": _Positions(8192),
    "qwen3_5_text": _Positions(32768),
    "qwen3_5_moe_text": _Positions(32768),
    "qwen3_next": _Positions(32768),
    "olmo_hybrid": _Positions(65536),
    "granitemoehybrid": _Positions(2048),
    "lfm2": _Positions(128000),
    "lfm2_moe": _Positions(128000),
    "lfm3": _Positions(128000),
    "nemotron_h": _Positions(4096),
    "falcon_h1": _Positions(8192),
    "kimi_linear": _Positions(1048576, (_KEY, "model_max_length")),
    "gpt2": _Positions(1024, ("n_positions", _KEY)),
    "gpt_neox": _Positions(2048),
    "opt": _Positions(2048),
    "falcon": _Positions(2048),
    "bloom": _Positions(2048, ("seq_length",)),
    "stablelm": _Positions(4096),
    "starcoder2": _Positions(4096),
}
"""By config.json's `model_type`."""


def position_keys(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys of a config.json that may have its number of positions."""
    return _family(values).keys


def stated_positions(values: Mapping[str, Any]) -> int | None:
    """Return the number of positions before scaling; None if no key states it and the family is unknown."""
    stated = (positive_int(values.get(key)) for key in position_keys(values))
    return next(filter(None, stated), _family(values).default)


def longest_sequence(values: Mapping[str, Any]) -> int | None:
    """Return the longest sequence, in tokens, for which the positions are usable; None if unknown.

    Linear and YaRN scaling multiply the length of the first training by their factor, and many checkpoints
    keep the original `max_position_embeddings` beside them. With Llama 3's scaling that key is always the
    scaled length. Dynamic NTK ends where scaling would begin, because cached keys would then belong to
    another base.
    """
    positions, family = stated_positions(values), _family(values)
    if positions is None or family.is_scaled:
        return positions
    section = values.get("rope_scaling") or values.get("rope_parameters")
    if section is None:
        section = family.scaling
    if not is_object(section):
        return positions
    # Some models have a section for each kind of layer.
    sections = [section, *filter(is_object, section.values())]
    return max(positions, *(_scaled(each, values, positions) for each in sections))


def _family(values: Mapping[str, Any]) -> _Positions:
    kind = values.get("model_type")
    return _FAMILIES.get(kind, _UNKNOWN) if isinstance(kind, str) else _UNKNOWN


def _original(section: Mapping[str, Any], values: Mapping[str, Any], default: int) -> int:
    """Return the length of the first training; a key beside the section counts instead of the one inside."""
    return positive_int(values.get(_ORIGINAL)) or positive_int(section.get(_ORIGINAL)) or default


def _scaled(section: Mapping[str, Any], values: Mapping[str, Any], positions: int) -> int:
    """Return the number of positions after linear or YaRN scaling; 0 for a section without either."""
    factor = section.get("factor")
    if (section.get("rope_type") or section.get("type")) not in ("linear", "yarn"):
        return 0
    if not isinstance(factor, int | float) or not 0 < factor <= MAX_NUMBER:
        return 0
    return int(factor * _original(section, values, positions))

"""Reads from a GGUF file how the positions of long sequences are scaled."""

from __future__ import annotations

import math

from inflight.gguf.keys import ArchitectureKeys
from inflight.json_values import Json


def read_scaling(section: ArchitectureKeys) -> Json | None:
    """Return `rope_scaling` of config.json; None without scaling.

    A GGUF file stores Llama 3's scaling as a factor for each frequency. This equals LongRoPE with the same
    factors at all lengths.
    """
    key, header, max_positions = (
        section.name("rope.scaling.type"),
        section.header,
        section.size("context_length"),
    )
    kind = section.keys.text_or_none(key) or "none"
    original = section.size_or_none("rope.scaling.original_context_length") or max_positions
    attention_factor = section.number_or_none("rope.scaling.attn_factor")
    of_frequencies = header.numbers("rope_freqs.weight")
    short, long = (header.numbers(f"rope_factors_{length}.weight") for length in ("short", "long"))
    if of_frequencies is not None:
        if kind != "none":
            raise section.keys.error(key, "none beside the tensor rope_freqs.weight")
        short = long = of_frequencies
        original, attention_factor = max_positions, 1.0
    if short is not None and long is not None:
        if kind not in ("none", "longrope"):
            raise section.keys.error(
                key, "longrope beside the tensors rope_factors_short and rope_factors_long"
            )
        factors = {"short_factor": short, "long_factor": long, "attention_factor": attention_factor}
        return {"rope_type": "longrope", "original_max_position_embeddings": original, **factors}
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise section.keys.error(key, "none, linear or yarn, or longrope with its tensors")
    if attention_factor is not None:
        raise section.keys.error(section.name("rope.scaling.attn_factor"), f"no such key beside {kind}")
    scaling: Json = {"rope_type": kind, "factor": section.number("rope.scaling.factor")}
    return scaling if kind == "linear" else {**scaling, **_yarn(section, original, scaling["factor"])}


def _yarn(section: ArchitectureKeys, original: int, factor: float) -> Json:
    """Return the keys of YaRN other than its factor."""
    section.expect("rope.scaling.yarn_ext_factor", None, 1.0)
    found: Json = {"original_max_position_embeddings": original}
    for key in ("beta_fast", "beta_slow"):
        if (value := section.number_or_none(f"rope.scaling.yarn_{key}")) is not None:
            found[key] = value
    # llama.cpp multiplies by the default beside this factor, and transformers does not.
    stated, default = section.number_or_none("rope.scaling.yarn_attn_factor"), 0.1 * math.log(factor) + 1
    if stated is not None and abs(stated - default) > 1e-4:
        raise section.keys.error(section.name("rope.scaling.yarn_attn_factor"), f"{default:g}, or nothing")
    if (scale := section.number_or_none("rope.scaling.yarn_log_multiplier")) is not None:
        factor_of_all = 10 * scale if section.header.architecture == "deepseek2" else scale
        found["mscale"] = found["mscale_all_dim"] = round(factor_of_all, 6)
    return found

"""Granite: Llama with four scales; and Granite SWA, with windows and learned sinks, with and without experts.

Granite's hybrids are in `recurrent.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from inflight.checkpoint_config import ConfigFile
from inflight.json_values import is_list
from inflight.models.decoder_config import DecoderConfig, ExpertsConfig
from inflight.models.families.family import (
    ExpertNames,
    ExpertStacks,
    Family,
    MlpNames,
    no_window,
    read_layer_types,
    read_size,
)
from inflight.models.families.llama import LLAMA_ATTENTION, LLAMA_NAMES, read_llama_like
from inflight.models.rope_config import RopeConfig

_SWA_KV_HEADS, _SWA_EPS = 4, 1e-5  # if the keys are absent, like the values below
_WINDOW = 128
_FULL_INTERVAL = 4  # the first of every four layers has no window
_EXPERTS = 8

GRANITE_MLP = MlpNames(up=("shared_mlp.input_linear",), down="shared_mlp.output_linear", fused=True)


def read_granite_scales(config: ConfigFile) -> dict[str, Any]:
    """Return the scales of embeddings, attention scores, residuals and logits, as fields of a DecoderConfig."""
    return {
        "embedding_scale": config.number_or_none("embedding_multiplier") or 1.0,
        "attention_scale": config.number_or_none("attention_multiplier") or 1.0,
        "residual_scale": config.number_or_none("residual_multiplier") or 1.0,
        "logits_scale": 1 / (config.number_or_none("logits_scaling") or 1.0),
    }


def _read_granite(config: ConfigFile) -> DecoderConfig:
    """Read the config of Granite: Llama with scales for embeddings, attention scores, residuals and logits."""
    attention_bias = config.boolean("attention_bias", False)
    return read_llama_like(
        config,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=config.boolean("mlp_bias", False),
        **read_granite_scales(config),
    )


def _read_granite_swa(config: ConfigFile) -> DecoderConfig:
    """Read the config of Granite SWA: Granite with learned sinks, windows, and a base of positions by layer."""
    return _read_with_windows(
        config,
        default_kv_heads=_SWA_KV_HEADS,
        mlp_bias=config.boolean("mlp_bias", False),
        norm_eps=config.number_or_none("rms_norm_eps") or _SWA_EPS,
        tied_embeddings=config.boolean("tie_word_embeddings", True),
    )


def _read_granitemoe_swa(config: ConfigFile) -> DecoderConfig:
    """Read the config of Granite MoE SWA: Granite SWA with experts, and a shared MLP if the config has its
    width."""
    shared = config.count("shared_intermediate_size", 0)
    experts = ExpertsConfig(
        count=read_size(config, "num_local_experts", "num_experts", _EXPERTS),
        num_per_token=config.int_or_none("num_experts_per_tok") or 2,
        intermediate_size=config.positive_int("intermediate_size"),
        is_normalized=True,
        layers=(True,) * config.positive_int("num_hidden_layers"),
        shared_intermediate_size=shared,
    )
    return _read_with_windows(config, experts=experts)


def _read_with_windows(config: ConfigFile, **settings: Any) -> DecoderConfig:
    """Read the keys that Granite SWA and Granite MoE SWA share; `settings` as in `read_llama_like`."""
    num_layers, attention_bias = (
        config.positive_int("num_hidden_layers"),
        config.boolean("attention_bias", False),
    )
    window = config.int_or_none("sliding_window") if "sliding_window" in config.values else _WINDOW
    types = read_layer_types(config, num_layers)
    slides = [kind == "sliding_attention" for kind in types] or [
        index % _FULL_INTERVAL != 0 for index in range(num_layers)
    ]
    if window is None and any(slides):
        raise no_window(config)
    decoder = read_llama_like(
        config,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        sliding_windows=tuple(window if sliding else None for sliding in slides),
        learned_sinks=True,
        **read_granite_scales(config),
        **settings,
    )
    return replace(decoder, ropes=_read_ropes(config, decoder.ropes))


def _read_ropes(config: ConfigFile, ropes: tuple[RopeConfig | None, ...]) -> tuple[RopeConfig | None, ...]:
    """Return the rotary positions of each layer: `ropes` with the bases in `layer_rope_theta`.

    A base of 0 means that the layer has no rotary positions.
    """
    thetas: Any = config.value("layer_rope_theta")
    if thetas is None:
        return ropes
    if (
        not is_list(thetas)
        or len(thetas) != len(ropes)
        or any(type(each) not in (int, float) or each < 0 for each in thetas)
    ):
        raise config.error("layer_rope_theta", f"a number >= 0 for each of num_hidden_layers, {len(ropes)}")
    return tuple(
        rope and (replace(rope, theta=float(theta)) if theta else None)
        for rope, theta in zip(ropes, thetas, strict=True)
    )


_SWA_NAMES = replace(LLAMA_NAMES, attention=replace(LLAMA_ATTENTION, sinks="self_attn.sinks"))
_MOE_SWA_NAMES = replace(
    _SWA_NAMES,
    experts=ExpertNames(
        router="block_sparse_moe.router",
        prefix="block_sparse_moe.experts.{}.",
        each=MlpNames(up=("w1", "w3"), down="w2"),
        stacks=ExpertStacks(
            up="block_sparse_moe.experts.gate_up_proj", down="block_sparse_moe.experts.down_proj"
        ),
        shared=GRANITE_MLP,
    ),
)

GRANITE_FAMILIES = (
    Family("granite", "GraniteForCausalLM", _read_granite, LLAMA_NAMES),
    Family("granite_swa", "GraniteSWAForCausalLM", _read_granite_swa, _SWA_NAMES),
    Family("granitemoe_swa", "GraniteMoeSWAForCausalLM", _read_granitemoe_swa, _MOE_SWA_NAMES),
)

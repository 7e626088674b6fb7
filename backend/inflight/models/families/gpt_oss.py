"""gpt-oss: experts in every layer, learned sinks in attention, a window in every other layer."""

from __future__ import annotations

from dataclasses import replace

from inflight.checkpoint_config import ConfigFile
from inflight.models.decoder_config import ClampedSwiglu, DecoderConfig, ExpertsConfig
from inflight.models.families.family import (
    ExpertNames,
    ExpertStacks,
    Family,
    MlpNames,
    no_window,
    read_layer_types,
    read_positions,
    read_size,
)
from inflight.models.families.llama import LLAMA_ATTENTION, LLAMA_NAMES, read_llama_like
from inflight.models.rope import read_rope, read_rope_section
from inflight.models.rope_config import RopeConfig
from inflight.positions import GPT_OSS_SCALING

_HEAD_DIM, _WINDOW, _THETA = 64, 128, 150000.0  # if the keys are absent


def _read_gpt_oss(config: ConfigFile) -> DecoderConfig:
    num_layers = config.positive_int("num_hidden_layers")
    attention_bias = config.boolean("attention_bias", True)
    if config.text_or_none("hidden_act") not in (None, "silu", "swish"):
        raise config.error("hidden_act", "silu, the activation in this family's clamped SwiGLU")
    experts = ExpertsConfig(
        count=read_size(config, "num_local_experts", "num_experts", 128),
        num_per_token=_read_num_per_token(config),
        intermediate_size=config.positive_int("intermediate_size"),
        is_normalized=True,  # equal to the family's softmax over the scores of the chosen experts
        layers=(True,) * num_layers,
        has_router_bias=True,
        has_bias=True,
    )
    swiglu = ClampedSwiglu(
        alpha=config.number_or_none("swiglu_alpha") or 1.702,
        limit=config.number_or_none("swiglu_limit") or 7.0,
    )
    decoder = read_llama_like(
        config,
        default_kv_heads=8,
        ropes=(_read_rope(config),) * num_layers,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        sliding_windows=_read_windows(config, num_layers),
        norm_eps=config.number_or_none("rms_norm_eps") or 1e-5,
        learned_sinks=True,
        clamped_swiglu=swiglu,
        experts=experts,
    )
    return decoder if "head_dim" in config.values else replace(decoder, head_dim=_HEAD_DIM)


def _read_num_per_token(config: ConfigFile) -> int:
    """Return `num_experts_per_tok`; `experts_per_token`, which transformers ignores, must agree if present."""
    number, other = config.int_or_none("num_experts_per_tok") or 4, config.int_or_none("experts_per_token")
    if other not in (None, number):
        raise config.error("experts_per_token", f"{number}, as num_experts_per_tok, or nothing")
    return number


def _read_rope(config: ConfigFile) -> RopeConfig:
    """Read rotary positions; if the keys are absent, they have the YaRN scaling of the family's first models.

    As in transformers, an empty `rope_scaling` counts as absent, and an empty `rope_parameters` means no scaling.
    """
    positions = read_positions(config)
    if config.has("rope_parameters") or config.value("rope_scaling"):
        return read_rope(config, positions, _THETA)
    theta = config.number_or_none("rope_theta") or _THETA
    return read_rope_section(
        config, ConfigFile(config.path, GPT_OSS_SCALING, "rope_parameters"), positions, theta
    )


def _read_windows(config: ConfigFile, num_layers: int) -> tuple[int | None, ...]:
    """Return a window for the layers that `layer_types` names; without it, for every other layer from the first
    on."""
    types = read_layer_types(config, num_layers) or tuple(
        "full_attention" if index % 2 else "sliding_attention" for index in range(num_layers)
    )
    window = config.int_or_none("sliding_window") if "sliding_window" in config.values else _WINDOW
    if window is None and "sliding_attention" in types:
        raise no_window(config)
    return tuple(window if kind == "sliding_attention" else None for kind in types)


GPT_OSS = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    _read_gpt_oss,
    replace(
        LLAMA_NAMES,
        attention=replace(LLAMA_ATTENTION, sinks="self_attn.sinks"),
        experts=ExpertNames(
            router="mlp.router",
            prefix="mlp.experts.{}.",
            each=MlpNames(up=("gate_proj", "up_proj"), down="down_proj"),
            stacks=ExpertStacks(transposed=True, interleaved=True),
        ),
    ),
    quantizations=("mxfp4",),
)

"""Families with mixtures of experts: Mixtral, Qwen 2 and 3, OLMoE, MiniMax-M2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from inflight.checkpoint_config import ConfigFile
from inflight.json_values import is_list
from inflight.models.decoder_config import DecoderConfig, ExpertsConfig
from inflight.models.families.family import (
    DEFAULT_FULL_LAYERS,
    WINDOWS_UNUSED,
    ExpertNames,
    ExpertStacks,
    Family,
    MlpNames,
    check_derived_head_dim,
    read_head_dim,
    read_layer_types,
    read_size,
    read_window,
    uses_windows,
)
from inflight.models.families.llama import LLAMA_NAMES, NORMED_ATTENTION, read_llama_like
from inflight.models.neutral_keys import ANY, NeutralKeys

_MIXTRAL_NAMES = replace(
    LLAMA_NAMES,
    experts=ExpertNames(
        router="block_sparse_moe.gate",
        prefix="block_sparse_moe.experts.{}.",
        each=MlpNames(up=("w1", "w3"), down="w2"),
        stacks=ExpertStacks(router="mlp.gate"),
    ),
)
QWEN_EXPERT_NAMES = ExpertNames(
    router="mlp.gate",
    prefix="mlp.experts.{}.",
    each=MlpNames(up=("gate_proj", "up_proj"), down="down_proj"),
    stacks=ExpertStacks(),
    shared=MlpNames(
        up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
        down="mlp.shared_expert.down_proj",
    ),
    shared_gate="mlp.shared_expert_gate",
)
_MOE_NAMES = replace(LLAMA_NAMES, experts=QWEN_EXPERT_NAMES)
_MOE_NAMES_WITH_QK_NORM = replace(_MOE_NAMES, attention=NORMED_ATTENTION)
# Files of Qwen3-VL have stacks of transposed matrices, unless transformers has saved them.
_QWEN3_MOE_NAMES = replace(
    _MOE_NAMES_WITH_QK_NORM, experts=replace(QWEN_EXPERT_NAMES, stacks=ExpertStacks(transposed=None))
)
# In this family query and key norms are always used, and either all layers have the window or none has.
_QWEN3_NEUTRAL: NeutralKeys = {"use_qk_norm": (None, True), **WINDOWS_UNUSED}


def _read_mixtral(config: ConfigFile) -> DecoderConfig:
    """Read the config of Mixtral: Mistral with experts in every layer."""
    num_layers = config.positive_int("num_hidden_layers")
    experts = ExpertsConfig(
        count=read_size(config, "num_local_experts", "num_experts", 8),
        num_per_token=config.int_or_none("num_experts_per_tok") or 2,
        intermediate_size=config.positive_int("intermediate_size"),
        is_normalized=True,
        layers=(True,) * num_layers,
    )
    return read_llama_like(
        config,
        default_kv_heads=8,
        default_theta=1e6,
        sliding_windows=(config.int_or_none("sliding_window"),) * num_layers,
        norm_eps=config.number_or_none("rms_norm_eps") or 1e-5,
        experts=experts,
    )


def read_qwen_experts(
    config: ConfigFile, default_count: int, default_per_token: int, default_width: int
) -> ExpertsConfig:
    """Return the experts of a config with Qwen's keys, without the shared MLP; `default_*`: values of absent
    keys."""
    num_layers = config.positive_int("num_hidden_layers")
    step = config.int_or_none("decoder_sparse_step") or 1
    plain: Any = config.value("mlp_only_layers") or []
    if not is_list(plain) or any(type(layer) is not int for layer in plain):
        raise config.error("mlp_only_layers", "a list of layers")
    return ExpertsConfig(
        count=read_size(config, "num_experts", "num_local_experts", default_count),
        num_per_token=config.int_or_none("num_experts_per_tok") or default_per_token,
        intermediate_size=config.int_or_none("moe_intermediate_size") or default_width,
        is_normalized=config.boolean("norm_topk_prob", False),
        layers=tuple(index not in plain and (index + 1) % step == 0 for index in range(num_layers)),
    )


def _read_qwen2_moe(config: ConfigFile) -> DecoderConfig:
    """Read the config of Qwen2-MoE: Qwen2 with experts in some layers, and in these a shared MLP."""
    experts = read_qwen_experts(config, default_count=60, default_per_token=4, default_width=1408)
    shared = config.int_or_none("shared_expert_intermediate_size") or 5632
    return read_llama_like(
        config,
        default_kv_heads=16,
        qkv_bias=config.boolean("qkv_bias", True),
        sliding_windows=_read_qwen2_moe_windows(config),
        experts=replace(experts, shared_intermediate_size=shared, has_shared_gate=True),
    )


def _read_qwen2_moe_windows(config: ConfigFile) -> tuple[int | None, ...]:
    """Return windows, if used: in the layers that `layer_types` names; without it, in every other layer below
    `max_window_layers`."""
    num_layers = config.positive_int("num_hidden_layers")
    types = read_layer_types(config, num_layers)
    if not uses_windows(config, types):
        return (None,) * num_layers
    most = config.count("max_window_layers", DEFAULT_FULL_LAYERS)
    window = read_window(config)
    slides = [kind == "sliding_attention" for kind in types] or [
        index % 2 == 0 and index < most for index in range(num_layers)
    ]
    if window is None and any(slides):
        raise config.error("sliding_window", "an integer >= 1, since use_sliding_window is true")
    return tuple(window if sliding else None for sliding in slides)


def _read_qwen3_moe(config: ConfigFile) -> DecoderConfig:
    """Read the config of Qwen3-MoE: Qwen3 with experts in some layers."""
    attention_bias = config.boolean("attention_bias", False)
    window = config.int_or_none("sliding_window") if config.boolean("use_sliding_window", False) else None
    return read_llama_like(
        config,
        default_kv_heads=4,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm="heads",
        sliding_windows=(window,) * config.positive_int("num_hidden_layers"),
        experts=read_qwen_experts(config, default_count=128, default_per_token=8, default_width=768),
    )


def _read_olmoe(config: ConfigFile) -> DecoderConfig:
    """Read the config of OLMoE: experts in every layer, and norms over all query heads and over all key heads."""
    num_layers, attention_bias = (
        config.positive_int("num_hidden_layers"),
        config.boolean("attention_bias", False),
    )
    check_derived_head_dim(config)
    experts = ExpertsConfig(
        count=read_size(config, "num_experts", "num_local_experts", 64),
        num_per_token=config.int_or_none("num_experts_per_tok") or 8,
        intermediate_size=config.positive_int("intermediate_size"),
        is_normalized=config.boolean("norm_topk_prob", False),
        layers=(True,) * num_layers,
    )
    return read_llama_like(
        config,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm="projection",
        norm_eps=config.number_or_none("rms_norm_eps") or 1e-5,
        experts=experts,
    )


# Keys that the model's original code reads and transformers does not.
_MINIMAX_M2_NEUTRAL: NeutralKeys = {
    "scoring_func": (None, "sigmoid"),
    "use_routing_bias": (None, True),
    "use_qk_norm": (None, True),
    "qk_norm_type": (None, "per_layer"),
    "attn_window_size": (None,),
    "shared_intermediate_size": (None, 0),
    "layernorm_full_attention_beta": (None, 1),
    "layernorm_linear_attention_beta": (None, 1),
    "layernorm_mlp_beta": (None, 1),
    "use_mtp": (None, True, False),
    # Keys of draft layers, which are not read, of an MLP that no layer has, and of shared experts.
    **dict.fromkeys(("mtp_transformer_layers", "mlp_intermediate_size", "shared_moe_mode"), ANY),
}
_MINIMAX_M2_THETA = 5e6  # this and the following are defaults of absent keys
_MINIMAX_M2_HEAD_DIM = 128


def _read_minimax_m2(config: ConfigFile) -> DecoderConfig:
    """Read the config of MiniMax-M2: experts chosen by sigmoids and biases, and norms over all heads together."""
    num_layers = config.positive_int("num_hidden_layers")
    kinds = config.value("attn_type_list")
    if kinds is not None and (not is_list(kinds) or not kinds or any(kind != 1 for kind in kinds)):
        raise config.error("attn_type_list", "1, softmax attention, for every layer, or nothing")
    head_dim = read_head_dim(config, _MINIMAX_M2_HEAD_DIM)
    rotary_dim = config.int_or_none("rotary_dim") or head_dim
    if rotary_dim > head_dim:
        raise config.error("rotary_dim", f"at most head_dim, {head_dim}")
    experts = ExpertsConfig(
        count=read_size(config, "num_local_experts", "num_experts", 256),
        num_per_token=config.int_or_none("num_experts_per_tok") or 8,
        intermediate_size=config.positive_int("intermediate_size"),
        is_normalized=True,
        layers=(True,) * num_layers,
        scoring="sigmoid",
        has_choice_bias=True,
    )
    return read_llama_like(
        config,
        default_kv_heads=8,
        default_theta=_MINIMAX_M2_THETA,
        default_part=rotary_dim / head_dim,
        head_dim=head_dim,
        qk_norm="projection",
        experts=experts,
        num_draft_layers=config.count("num_mtp_modules") if config.has("num_mtp_modules") else 0,
    )


MIXTURE_FAMILIES = (
    Family("mixtral", "MixtralForCausalLM", _read_mixtral, _MIXTRAL_NAMES),
    Family("qwen2_moe", "Qwen2MoeForCausalLM", _read_qwen2_moe, _MOE_NAMES, WINDOWS_UNUSED),
    Family("qwen3_moe", "Qwen3MoeForCausalLM", _read_qwen3_moe, _QWEN3_MOE_NAMES, _QWEN3_NEUTRAL),
    Family(
        "minimax_m2",
        "MiniMaxM2ForCausalLM",
        _read_minimax_m2,
        replace(
            LLAMA_NAMES,
            attention=NORMED_ATTENTION,
            experts=ExpertNames(
                router="block_sparse_moe.gate",
                prefix="block_sparse_moe.experts.{}.",
                each=MlpNames(up=("w1", "w3"), down="w2"),
                choice_bias="block_sparse_moe.e_score_correction_bias",
            ),
        ),
        _MINIMAX_M2_NEUTRAL,
    ),
    Family("olmoe", "OlmoeForCausalLM", _read_olmoe, _MOE_NAMES_WITH_QK_NORM),
)

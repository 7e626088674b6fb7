"""GLM-4 (of 0414), GLM-4.5 to 4.7 with experts, and GLM-4.7-Flash with latent attention."""

from __future__ import annotations

from dataclasses import replace

from inflight.checkpoint_config import ConfigFile
from inflight.json_values import is_list
from inflight.models.decoder_config import DecoderConfig
from inflight.models.families.deepseek import (
    ROUTED_EXPERT_NAMES,
    V3_NAMES,
    V3_NEUTRAL,
    read_expert_groups,
    read_num_draft_layers,
    read_routed_experts,
    read_v3,
)
from inflight.models.families.family import DraftHeadNames, Family, NormNames, read_head_dim
from inflight.models.families.llama import (
    FUSED_LLAMA_NAMES,
    LLAMA_NAMES,
    NORMED_ATTENTION,
    in_interleaved_pairs,
    read_llama_like,
)
from inflight.models.neutral_keys import NeutralKeys

# Defaults of absent keys.
_HEAD_DIM = 128
_ROTARY_PART = 0.5

_GLM4_NAMES = replace(
    LLAMA_NAMES,
    norms=NormNames(
        attention="input_layernorm",
        attention_post="post_self_attn_layernorm",
        mlp="post_attention_layernorm",
        mlp_post="post_mlp_layernorm",
    ),
    mlp=FUSED_LLAMA_NAMES.mlp,
)
_GLM4_MOE_NAMES = replace(
    LLAMA_NAMES,
    attention=NORMED_ATTENTION,
    experts=replace(ROUTED_EXPERT_NAMES, choice_bias="mlp.gate.e_score_correction_bias"),
    draft_head=DraftHeadNames(),
)
# Instead of this key, transformers reads `mlp_layer_types`, whose default is this value.
_LITE_NEUTRAL: NeutralKeys = {**V3_NEUTRAL, "first_k_dense_replace": (None, 1)}


def _read_glm4(config: ConfigFile) -> DecoderConfig:
    """Read GLM-4's config: norms before and after attention and MLP; half of each head is rotated, in neighbouring
    pairs."""
    decoder = read_llama_like(
        config,
        default_kv_heads=2,
        default_part=_ROTARY_PART,
        qkv_bias=config.boolean("attention_bias", True),
        head_dim=read_head_dim(config, _HEAD_DIM),
        norm_placement="around",
        norm_eps=config.number_or_none("rms_norm_eps") or 1.5625e-07,
    )
    return in_interleaved_pairs(decoder)


def _read_glm4_moe(config: ConfigFile) -> DecoderConfig:
    """Read GLM-4.5's config: DeepSeek-V3's experts, and ordinary attention; half of each head is rotated."""
    experts = read_routed_experts(config, "num_local_experts")
    experts = replace(
        read_expert_groups(config, experts, scores_per_group=2),
        scoring="sigmoid",
        has_choice_bias=True,
        is_normalized=config.boolean("norm_topk_prob", True),
    )
    return read_llama_like(
        config,
        default_kv_heads=8,
        default_part=_ROTARY_PART,
        qkv_bias=config.boolean("attention_bias", False),
        qk_norm="heads" if config.boolean("use_qk_norm", False) else None,
        norm_eps=config.number_or_none("rms_norm_eps") or 1e-5,
        experts=experts,
        num_draft_layers=read_num_draft_layers(config),
    )


def _read_glm4_moe_lite(config: ConfigFile) -> DecoderConfig:
    """Read the config of GLM-4.7-Flash: DeepSeek-V3's, but with `mlp_layer_types` for the layers with experts."""
    num_layers = config.positive_int("num_hidden_layers")
    kinds = config.value("mlp_layer_types")
    if kinds is None:
        kinds = ["dense", *["sparse"] * (num_layers - 1)]
    names = ("dense", "sparse")
    if not is_list(kinds) or len(kinds) != num_layers or any(kind not in names for kind in kinds):
        raise config.error("mlp_layer_types", f"dense or sparse for each of num_hidden_layers, {num_layers}")
    layers = tuple(kind == "sparse" for kind in kinds)
    return read_v3(config, layers, norm_eps=config.number_or_none("rms_norm_eps") or 1e-5)


GLM_FAMILIES = (
    Family("glm4", "Glm4ForCausalLM", _read_glm4, _GLM4_NAMES),
    Family("glm4_moe", "Glm4MoeForCausalLM", _read_glm4_moe, _GLM4_MOE_NAMES, V3_NEUTRAL),
    Family("glm4_moe_lite", "Glm4MoeLiteForCausalLM", _read_glm4_moe_lite, V3_NAMES, _LITE_NEUTRAL),
)

"""Hunyuan V1, dense and with experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from inflight.checkpoint_config import ConfigFile
from inflight.json_values import is_list
from inflight.models.decoder_config import DecoderConfig, ExpertsConfig
from inflight.models.families.deepseek import ROUTED_EXPERT_NAMES
from inflight.models.families.family import Family, MlpNames
from inflight.models.families.llama import LLAMA_ATTENTION, LLAMA_NAMES, read_llama_like
from inflight.models.neutral_keys import ANY, NeutralKeys, refuse_unread

_NAMES = replace(
    LLAMA_NAMES,
    attention=replace(
        LLAMA_ATTENTION, query_norm="self_attn.query_layernorm", key_norm="self_attn.key_layernorm"
    ),
)
_MOE_NAMES = replace(
    _NAMES,
    experts=replace(
        ROUTED_EXPERT_NAMES,
        router="mlp.gate.wg",
        shared=MlpNames(
            up=("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj"), down="mlp.shared_mlp.down_proj"
        ),
    ),
)
# Keys of a classifier, of pictures and videos, which these classes do not take, and of features that are off.
_WITHOUT_EFFECT = """
    dense_list pool_type cla_share_factor org_vocab_size attention_head_dim pad_id im_start_id im_end_id
    im_newline_id text_start_id text_end_id mask_init_id video_start_id video_end_id num_media_embeds
    anyres_pooling_size vit_input_resolution vit_mapping_type vit_norm_type vit_patch vit_token
"""
# Keys that the model's original code reads and transformers does not.
_NEUTRAL: NeutralKeys = {
    **dict.fromkeys(_WITHOUT_EFFECT.split(), ANY),
    "use_qk_norm": (None, True),
    "use_rotary_pos_emb": (None, True),
    "norm_type": (None, "rms", "hf_rms"),
    "enable_lm_head_fp32": (None, True, False),
    "class_num": (None, 0),
}
_MOE_NEUTRAL: NeutralKeys = {
    **_NEUTRAL,
    "use_mixed_mlp_moe": (None, True),
    "moe_layer_num_skipped": (None, 0),
    "norm_topk_prob": (None, True),
    "routed_scaling_factor": (None, 1),
}
# Keys of published checkpoints that transformers does not use if the scaling has alpha.
_NEUTRAL_BESIDE_ALPHA: NeutralKeys = dict.fromkeys(
    ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "original_max_position_embeddings"), ANY
)


def _read_hunyuan(config: ConfigFile, **changes: Any) -> DecoderConfig:
    """Read the keys that the dense and the MoE class share: Llama's, with norms on query and key heads after the
    rotation."""
    attention_bias = config.boolean("attention_bias", False)
    return read_llama_like(
        _with_stretched_base(config),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm="heads",
        norms_rotated=True,
        norm_eps=config.number_or_none("rms_norm_eps") or 1e-5,
        **changes,
    )


def _with_stretched_base(config: ConfigFile) -> ConfigFile:
    """Replace "dynamic" scaling with a fixed alpha by the equivalent larger rotary base."""
    for key in ("rope_scaling", "rope_parameters"):
        if not config.value(key):
            continue
        section = config.child(key)
        kind = section.text_or_none("rope_type") or section.text_or_none("type")
        if kind != "dynamic" or not section.value("alpha"):
            continue
        hidden_size, num_heads = (
            config.positive_int("hidden_size"),
            config.positive_int("num_attention_heads"),
        )
        head_dim = config.int_or_none("head_dim") or hidden_size // num_heads
        if head_dim < 3:
            raise config.error("head_dim", "at least 3 if rope_scaling has alpha")
        theta = section.number_or_none("rope_theta") or config.number_or_none("rope_theta") or 10000.0
        theta *= section.number("alpha") ** (head_dim / (head_dim - 2))
        refuse_unread(section, _NEUTRAL_BESIDE_ALPHA)
        config = config.with_values({key: {"rope_type": "default", "rope_theta": theta}})
    return config


def _read_moe(config: ConfigFile) -> DecoderConfig:
    """Read the config with experts: softmax probabilities, normalized, and a shared MLP as wide as an expert."""
    width = config.positive_int("intermediate_size")
    for key, needed in (("moe_intermediate_size", width), ("num_shared_expert", 1)):
        if config.has(key) and _read_of_layers(config, key, needed) != needed:
            raise config.error(key, f"{needed} in every layer, or nothing")
    experts = ExpertsConfig(
        count=_read_of_layers(config, "num_experts", 1, "num_local_experts"),
        num_per_token=_read_of_layers(config, "moe_topk", 1, "num_experts_per_tok"),
        intermediate_size=width,
        is_normalized=True,
        layers=(True,) * config.positive_int("num_hidden_layers"),
        shared_intermediate_size=width,
        has_float32_router=True,
    )
    return _read_hunyuan(config, experts=experts)


def _read_of_layers(config: ConfigFile, key: str, default: int, alias: str | None = None) -> int:
    """Return an integer of at least 1, which config.json may give for each layer if all layers have the same
    value.

    `alias`: other families' name of the key; if both keys are present, their values must be equal.
    """
    given, other = config.value(key), config.int_or_none(alias) if alias else None
    if is_list(given) and given and all(type(one) is int and one == given[0] for one in given):
        given = given[0]
    if given is None:
        return other or default
    if alias and other not in (None, given):
        raise config.error(alias, f"{given} like {key}, or nothing")
    if type(given) is not int or given < 1:
        raise config.error(key, "an integer >= 1, the same in every layer")
    return given


HUNYUAN_FAMILIES = (
    Family("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", _read_hunyuan, _NAMES, _NEUTRAL),
    Family("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", _read_moe, _MOE_NAMES, _MOE_NEUTRAL),
)

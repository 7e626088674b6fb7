"""ERNIE 4.5, dense and with experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from inflight.checkpoint_config import ConfigFile
from inflight.models.decoder_config import DecoderConfig, ExpertsConfig
from inflight.models.families.deepseek import ROUTED_EXPERT_NAMES
from inflight.models.families.family import Family, NoMap, read_head_dim, read_size
from inflight.models.families.llama import LLAMA_NAMES, in_interleaved_pairs, read_llama_like
from inflight.models.neutral_keys import ANY, NeutralKeys

# Defaults of absent keys.
_HEAD_DIM = 128
_THETA = 5e5

_MOE_NAMES = replace(
    LLAMA_NAMES,
    experts=replace(
        ROUTED_EXPERT_NAMES,
        choice_bias="mlp.moe_statics.e_score_correction_bias",
        has_choice_bias_row=True,
    ),
    left_out=("model.mtp_",),
)
# Keys that the model's original code reads and transformers does not.
_MOE_NEUTRAL: NeutralKeys = {
    "moe_gate": (None, "topk"),
    "moe_use_aux_free": (None, True),
    "moe_norm_min": (None, 1e-12),
    "moe_capacity": ANY,  # used in training only
    "num_nextn_predict_layers": ANY,  # draft layers, which are left out
}


def _read_ernie(config: ConfigFile, **changes: Any) -> DecoderConfig:
    """Read the keys common to the dense and the MoE class: Llama's, with interleaved rotary pairs."""
    bias = config.boolean("use_bias", False)
    decoder = read_llama_like(
        config,
        default_theta=_THETA,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        norm_eps=config.number_or_none("rms_norm_eps") or 1e-5,
        tied_embeddings=config.boolean("tie_word_embeddings", True),
        **changes,
    )
    return in_interleaved_pairs(decoder)


def _read_dense(config: ConfigFile) -> DecoderConfig:
    return _read_ernie(config, default_kv_heads=2, head_dim=read_head_dim(config, _HEAD_DIM))


def _read_moe(config: ConfigFile) -> DecoderConfig:
    """Read the config with experts: softmax probabilities, biases for the choice, and a shared MLP."""
    if config.boolean("use_bias", False):
        raise NoMap(config, "use_bias", "false: a bias of lm_head is not supported")
    width = config.int_or_none("moe_intermediate_size") or 1536
    experts = ExpertsConfig(
        count=read_size(config, "moe_num_experts", "num_experts", 64),
        num_per_token=read_size(config, "moe_k", "num_experts_per_tok", 6),
        intermediate_size=width,
        is_normalized=True,
        layers=_read_layers(config),
        shared_intermediate_size=width * config.count("moe_num_shared_experts", 2),
        has_choice_bias=True,
        has_float32_router=True,
    )
    return _read_ernie(config, default_kv_heads=4, experts=experts)


def _read_layers(config: ConfigFile) -> tuple[bool, ...]:
    """Return whether each layer has experts; a moe_layer_end_index of -1 stands for the last layer."""
    num_layers = config.positive_int("num_hidden_layers")
    first, last = config.count("moe_layer_start_index", 1), config.value("moe_layer_end_index")
    if "moe_layer_end_index" not in config.values or last == -1:
        last = num_layers - 1
    if type(last) is not int or last < 0:
        raise config.error("moe_layer_end_index", "the index of a layer, or -1 for the last one")
    step = config.int_or_none("moe_layer_interval") or 1
    return tuple(first <= index <= last and (index + 1) % step == 0 for index in range(num_layers))


ERNIE_FAMILIES = (
    Family("ernie4_5", "Ernie4_5ForCausalLM", _read_dense, LLAMA_NAMES, {"compression_ratio": (None, 1)}),
    Family("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", _read_moe, _MOE_NAMES, _MOE_NEUTRAL),
)

"""Families with LayerNorms and biases: GPT-2, GPT-NeoX (Pythia), OPT, StableLM and StarCoder 2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from inflight.checkpoint_config import ConfigFile
from inflight.models.decoder_config import Activation, DecoderConfig
from inflight.models.families.family import (
    AttentionNames,
    Family,
    MlpNames,
    NoMap,
    NormNames,
    WeightNames,
    check_derived_head_dim,
    derived_head_dim,
    read_activation,
    read_longest,
    read_positions,
    read_size,
)
from inflight.models.families.llama import LLAMA_NAMES, read_llama_like
from inflight.models.neutral_keys import NeutralKeys
from inflight.models.rope import read_rope


def read_gpt_like(
    config: ConfigFile,
    *,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    activation: Activation,
    **changes: Any,
) -> DecoderConfig:
    """Read the config of a family with LayerNorms, an MLP without gate, and a key head for each query head.

    Args:
        config: The whole file.
        hidden_size: Width of the hidden states.
        num_layers: Number of layers.
        num_heads: Number of query heads.
        activation: Activation of the MLP.
        changes: Fields of `DecoderConfig` that are not as here: no positions, biases everywhere, an
            MLP four times as wide as the hidden states, and a tied embedding if the key is absent.
    """
    decoder = DecoderConfig(
        vocab_size=config.positive_int("vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=derived_head_dim(config, hidden_size, num_heads),
        intermediate_size=4 * hidden_size,
        max_positions=read_positions(config),
        norm="layer",
        norm_eps=1e-5,
        activation=activation,
        gated_mlp=False,
        ropes=(None,) * num_layers,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        sliding_windows=(None,) * num_layers,
        tied_embeddings=config.boolean("tie_word_embeddings", True),
    )
    return replace(decoder, **changes)


# ---------------------------------------------------------------------- GPT-2


_GPT2_NAMES = WeightNames(
    base="transformer.",
    embedding="wte",
    position_embedding="wpe",
    final_norm="ln_f",
    layers="h.{}.",
    norms=NormNames(attention="ln_1", mlp="ln_2"),
    attention=AttentionNames(qkv=("attn.c_attn",), output="attn.c_proj"),
    mlp=MlpNames(up=("mlp.c_fc",), down="mlp.c_proj"),
    transposed=True,
    ignored=("attn.bias", "attn.masked_bias"),  # the causal mask, which old versions saved as a buffer
)


def _read_gpt2(config: ConfigFile) -> DecoderConfig:
    """Read the config of GPT-2: learned positions, LayerNorm, biases everywhere, and transposed weights."""
    for key, needed in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("add_cross_attention", False),
    ):
        if config.boolean(key, needed) != needed:
            raise config.error(key, str(needed).lower())
    hidden_size = read_size(config, "n_embd", "hidden_size")
    return read_gpt_like(
        config,
        hidden_size=hidden_size,
        num_layers=read_size(config, "n_layer", "num_hidden_layers"),
        num_heads=read_size(config, "n_head", "num_attention_heads"),
        activation=read_activation(config, "activation_function", "gelu_new"),
        intermediate_size=config.int_or_none("n_inner") or 4 * hidden_size,
        norm_eps=config.number_or_none("layer_norm_epsilon") or 1e-5,
        learned_positions=True,
    )


# ---------------------------------------------------------------------- GPT-NeoX and Pythia


_NEOX_NAMES = WeightNames(
    base="gpt_neox.",
    embedding="embed_in",
    lm_head="embed_out",
    final_norm="final_layer_norm",
    layers="layers.{}.",
    norms=NormNames(attention="input_layernorm", mlp="post_attention_layernorm"),
    attention=AttentionNames(qkv=("attention.query_key_value",), qkv_by_head=True, output="attention.dense"),
    mlp=MlpNames(up=("mlp.dense_h_to_4h",), down="mlp.dense_4h_to_h"),
    # The causal mask and rotary frequencies, which old versions saved as buffers.
    ignored=("attention.bias", "attention.masked_bias", "rotary_emb.inv_freq"),
)
_NEOX_ROTARY_PART = 0.25  # if the key is absent


def _read_neox(config: ConfigFile) -> DecoderConfig:
    """Read the config of GPT-NeoX: parallel attention and MLP, and rotary positions on a part of each head."""
    num_layers = config.positive_int("num_hidden_layers")
    rope = read_rope(
        config,
        read_positions(config),
        default_theta=config.number_or_none("rotary_emb_base") or 10000.0,
        default_part=config.number_or_none("rotary_pct") or _NEOX_ROTARY_PART,
        of_section_alone=True,
    )
    attention_bias = config.boolean("attention_bias", True)
    return read_gpt_like(
        config,
        hidden_size=config.positive_int("hidden_size"),
        num_layers=num_layers,
        num_heads=config.positive_int("num_attention_heads"),
        activation=read_activation(config, "hidden_act", "gelu"),
        intermediate_size=config.positive_int("intermediate_size"),
        max_positions=read_longest(config),
        norm_eps=config.number_or_none("layer_norm_eps") or 1e-5,
        ropes=(rope,) * num_layers,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        tied_embeddings=config.boolean("tie_word_embeddings", False),
        parallel_residual=config.boolean("use_parallel_residual", True),
    )


# ---------------------------------------------------------------------- OPT


_OPT_NAMES = WeightNames(
    base="model.decoder.",
    embedding="embed_tokens",
    position_embedding="embed_positions",
    final_norm="final_layer_norm",
    layers="layers.{}.",
    norms=NormNames(attention="self_attn_layer_norm", mlp="final_layer_norm"),
    attention=AttentionNames(
        qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), output="self_attn.out_proj"
    ),
    mlp=MlpNames(up=("fc1",), down="fc2"),
)


def _read_opt(config: ConfigFile) -> DecoderConfig:
    """Read the config of OPT: learned positions, whose embedding has two rows before the row of position 0."""
    hidden_size = config.positive_int("hidden_size")
    for key, needed in (
        ("do_layer_norm_before", True),
        ("_remove_final_layer_norm", False),
        ("layer_norm_elementwise_affine", True),
    ):
        if config.boolean(key, needed) != needed:
            raise config.error(key, str(needed).lower())
    if (config.int_or_none("word_embed_proj_dim") or hidden_size) != hidden_size:
        raise config.error("word_embed_proj_dim", f"hidden_size, {hidden_size}, or nothing")
    bias = config.boolean("enable_bias", True)
    return read_gpt_like(
        config,
        hidden_size=hidden_size,
        num_layers=config.positive_int("num_hidden_layers"),
        num_heads=config.positive_int("num_attention_heads"),
        activation=read_activation(config, "activation_function", "relu"),
        intermediate_size=config.positive_int("ffn_dim"),
        learned_positions=True,
        position_offset=2,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
    )


# ---------------------------------------------------------------------- StableLM and StarCoder 2


_STABLELM_ROTARY_PART = 0.25  # if the key is absent


def _read_stablelm(config: ConfigFile) -> DecoderConfig:
    """Read the config of StableLM: Llama with LayerNorms, and rotary positions on a part of each head."""
    for key in ("qk_layernorm", "use_parallel_residual"):
        if config.boolean(key, False):
            raise NoMap(config, key, "false: such layers are not supported")
    check_derived_head_dim(config)
    return read_llama_like(
        config,
        default_kv_heads=32,
        default_part=_STABLELM_ROTARY_PART,
        qkv_bias=config.boolean("use_qkv_bias", False),
        norm="layer",
        norm_eps=config.number_or_none("layer_norm_eps") or 1e-5,
    )


# Keys of published files that no code reads.
_STARCODER2_NEUTRAL: NeutralKeys = {
    "activation_function": (None, "gelu", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (None, 1e-5),
    "mlp_type": (None, "default"),
    "norm_type": (None, "layer_norm"),
    "attention_softmax_in_fp32": (None, True),
    "scale_attention_softmax_in_fp32": (None, True),
    "scale_attn_weights": (None, True),
}


def _read_starcoder2(config: ConfigFile) -> DecoderConfig:
    """Read the config of StarCoder 2: LayerNorms, biases everywhere, rotary positions, and an MLP without gate."""
    bias = config.boolean("use_bias", True)
    window = config.int_or_none("sliding_window")
    return read_llama_like(
        config,
        default_kv_heads=2,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        norm="layer",
        norm_eps=config.number_or_none("norm_epsilon") or 1e-5,
        activation=read_activation(config, "hidden_act", "gelu_pytorch_tanh"),
        gated_mlp=False,
        sliding_windows=(window,) * config.positive_int("num_hidden_layers"),
        tied_embeddings=config.boolean("tie_word_embeddings", True),
    )


GPT_FAMILIES = (
    Family("gpt2", "GPT2LMHeadModel", _read_gpt2, _GPT2_NAMES),
    Family("gpt_neox", "GPTNeoXForCausalLM", _read_neox, _NEOX_NAMES),
    Family("opt", "OPTForCausalLM", _read_opt, _OPT_NAMES),
    Family("stablelm", "StableLmForCausalLM", _read_stablelm, LLAMA_NAMES),
    Family(
        "starcoder2",
        "Starcoder2ForCausalLM",
        _read_starcoder2,
        replace(LLAMA_NAMES, mlp=MlpNames(up=("mlp.c_fc",), down="mlp.c_proj")),
        _STARCODER2_NEUTRAL,
    ),
)

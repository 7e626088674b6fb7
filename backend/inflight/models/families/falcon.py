"""Falcon, with rotary positions or linear biases (ALiBi), and BLOOM, which has linear biases."""

from __future__ import annotations

from dataclasses import replace

from inflight.checkpoint_config import ConfigFile
from inflight.models.decoder_config import Alibi, DecoderConfig
from inflight.models.families.family import (
    AttentionNames,
    Family,
    MlpNames,
    NormNames,
    WeightNames,
    derived_head_dim,
    read_activation,
    read_longest,
    read_positions,
    read_size,
)
from inflight.models.families.gpt import read_gpt_like
from inflight.models.neutral_keys import ANY, NeutralKeys
from inflight.models.rope import read_rope

_SEQUENTIAL_NORMS = NormNames(attention="input_layernorm", mlp="post_attention_layernorm")


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """Return the slopes of a model's heads: 2 ** (-8 / n), its square, its cube, …, with the largest power of two
    n that is at most the number of heads; for further heads, every other slope of twice as many heads."""
    power = 1 << (num_heads.bit_length() - 1)
    first, between = 2 ** (-8 / power), 2 ** (-4 / power)
    slopes = [first**exponent for exponent in range(1, power + 1)]
    return (*slopes, *(between**exponent for exponent in range(1, 2 * (num_heads - power), 2)))


# ---------------------------------------------------------------------- Falcon


def _read_falcon_norms(config: ConfigFile) -> NormNames:
    """Return the names of norms; in parallel layers attention and MLP have one norm each, or share one."""
    if not _flag(config, "parallel_attn", True):
        return _SEQUENTIAL_NORMS
    if _has_two_norms(config):
        return NormNames(attention="ln_attn", mlp="ln_mlp")
    return NormNames(attention="input_layernorm", mlp="input_layernorm")


def _has_two_norms(config: ConfigFile) -> bool:
    """Return whether parallel layers have two norms; raise ConfigError for a number that no forward pass has."""
    key, is_new = "num_ln_in_parallel_attn", _flag(config, "new_decoder_architecture", False)
    count = config.int_or_none(key) or (2 if is_new else 1)
    if count > 2 or (count == 2 and not is_new):
        raise config.error(key, "1 or 2" if is_new else "1 without new_decoder_architecture")
    return count == 2


def _flag(config: ConfigFile, key: str, default: bool) -> bool:
    """Return a boolean; as in transformers, null counts as false."""
    return config.boolean(key, default and key not in config.values)


def _read_falcon_kv_heads(config: ConfigFile, num_heads: int) -> int:
    key = "num_kv_heads"
    count = config.int_or_none(key) or num_heads
    is_new = _flag(config, "new_decoder_architecture", False)
    is_multi_query = _flag(config, "multi_query", True)
    if is_new:
        if num_heads % count:
            raise config.error(key, f"a divisor of num_attention_heads, {num_heads}")
        return count
    if not is_multi_query and count != num_heads:
        raise config.error(key, f"num_attention_heads, {num_heads}, or null without new_decoder_architecture")
    return 1 if is_multi_query else num_heads


def _read_falcon(config: ConfigFile) -> DecoderConfig:
    """Read the config of Falcon: LayerNorms, one key head, some or as many as query heads, and attention and MLP
    in parallel or one after the other."""
    hidden_size = read_size(config, "hidden_size", "n_embed")
    num_heads = config.positive_int("num_attention_heads")
    num_layers = config.positive_int("num_hidden_layers")
    bias, is_parallel = config.boolean("bias", False), _flag(config, "parallel_attn", True)
    if not is_parallel and _flag(config, "new_decoder_architecture", False):
        raise config.error("parallel_attn", "true with new_decoder_architecture")
    rope = alibi = None
    if config.boolean("alibi", False):
        scale = derived_head_dim(config, hidden_size, num_heads) ** -0.5
        alibi = Alibi(alibi_slopes(num_heads), scale, is_rounded=True)
    else:
        rope = read_rope(config, read_positions(config))
    width = config.int_or_none("ffn_hidden_size") or 4 * hidden_size
    # ff_factor repeats ffn_hidden_size, and transformers ignores it.
    if config.int_or_none("ff_factor") not in (None, width // hidden_size):
        raise config.error("ff_factor", f"{width // hidden_size}, as ffn_hidden_size says, or nothing")
    return read_gpt_like(
        config,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        activation=read_activation(config, "activation", "gelu"),
        num_kv_heads=_read_falcon_kv_heads(config, num_heads),
        intermediate_size=width,
        max_positions=read_longest(config),
        norm_eps=config.number_or_none("layer_norm_epsilon") or 1e-5,
        ropes=(rope,) * num_layers,
        alibi=alibi,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        parallel_residual=is_parallel,
    )


_FALCON_NAMES = WeightNames(
    base="transformer.",
    embedding="word_embeddings",
    final_norm="ln_f",
    layers="h.{}.",
    norms=_SEQUENTIAL_NORMS,
    attention=AttentionNames(
        qkv=("self_attention.query_key_value",), qkv_by_head=True, output="self_attention.dense"
    ),
    mlp=MlpNames(up=("mlp.dense_h_to_4h",), down="mlp.dense_4h_to_h"),
)
_FALCON_NEUTRAL: NeutralKeys = {
    # Read only in parallel layers.
    "num_ln_in_parallel_attn": ANY,
    # Read only without linear biases.
    "rope_theta": ANY,
    "rope_scaling": ANY,
    "rope_parameters": ANY,
}

# ---------------------------------------------------------------------- BLOOM


def _read_bloom(config: ConfigFile) -> DecoderConfig:
    """Read the config of BLOOM: LayerNorms, also on embeddings, biases everywhere, and linear biases (ALiBi)."""
    num_heads = read_size(config, "n_head", "num_attention_heads")
    return read_gpt_like(
        config,
        hidden_size=read_size(config, "hidden_size", "n_embed"),
        num_layers=read_size(config, "n_layer", "num_hidden_layers"),
        num_heads=num_heads,
        activation="gelu_tanh",
        norm_eps=config.number_or_none("layer_norm_epsilon") or 1e-5,
        alibi=Alibi(alibi_slopes(num_heads)),
        embedding_norm=True,
    )


_BLOOM_NAMES = replace(_FALCON_NAMES, embedding_norm="word_embeddings_layernorm")
# Keys of published files that no code reads.
_BLOOM_NEUTRAL: NeutralKeys = {
    "offset_alibi": ANY,
    "skip_bias_add": ANY,
    "skip_bias_add_qkv": ANY,
    "attention_softmax_in_fp32": (None, True),
    "masked_softmax_fusion": ANY,
    "bias_dropout_fusion": ANY,
}

FALCON_FAMILIES = (
    Family(
        "falcon",
        "FalconForCausalLM",
        _read_falcon,
        _FALCON_NAMES,
        _FALCON_NEUTRAL,
        read_norms=_read_falcon_norms,
    ),
    Family("bloom", "BloomForCausalLM", _read_bloom, _BLOOM_NAMES, _BLOOM_NEUTRAL),
)

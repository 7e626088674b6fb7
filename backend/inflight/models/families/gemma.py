"""Gemma 2 and Gemma 3, the text models."""

from __future__ import annotations

from dataclasses import replace

from inflight.checkpoint_config import ConfigFile
from inflight.models.decoder_config import DecoderConfig, RopeConfig
from inflight.models.families.family import Family, NormNames, read_activation, read_layer_types
from inflight.models.families.llama import LLAMA_NAMES, NORMED_ATTENTION, read_llama_like
from inflight.models.rope import read_layer_type_ropes

_HEAD_DIM = 256  # if the key is absent, like the defaults below
_QUERY_SCALAR = 256
_WINDOW = 4096
_KV_HEADS = 4
_SLIDING_PATTERN = 6  # in Gemma 3, every sixth layer has no window
_THETAS = {"full_attention": 1e6, "sliding_attention": 1e4}  # of Gemma 3

_NAMES = replace(
    LLAMA_NAMES,
    norms=NormNames(
        attention="input_layernorm",
        attention_post="post_attention_layernorm",
        mlp="pre_feedforward_layernorm",
        mlp_post="post_feedforward_layernorm",
    ),
)


def _read_gemma(
    config: ConfigFile,
    default_positions: int,
    types: tuple[str, ...],
    ropes: tuple[RopeConfig, ...] | None = None,
) -> DecoderConfig:
    """Read a config with norms before and after attention and MLP, stored less 1, and scaled embeddings."""
    hidden_size = config.positive_int("hidden_size")
    attention_bias = config.boolean("attention_bias", False)
    window = config.int_or_none("sliding_window") if "sliding_window" in config.values else _WINDOW
    if window is None and "sliding_attention" in types:
        raise config.error("sliding_window", "an integer >= 1, since some layers slide")
    activation = read_activation(config, "hidden_activation", "gelu_pytorch_tanh")
    for key in ("hidden_act", "sliding_window_size"):  # their values are not used
        config.value(key)
    config.value("cache_implementation")
    return read_llama_like(
        config,
        default_positions=default_positions,
        default_kv_heads=_KV_HEADS,
        ropes=ropes,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        sliding_windows=tuple(window if kind == "sliding_attention" else None for kind in types),
        head_dim=config.int_or_none("head_dim") or _HEAD_DIM,
        activation=activation,
        norm_placement="around",
        norm_offset=1.0,
        embedding_scale=hidden_size**0.5,
        attention_scale=(config.number_or_none("query_pre_attn_scalar") or _QUERY_SCALAR) ** -0.5,
        attention_soft_cap=config.number_or_none("attn_logit_softcapping"),
        logits_soft_cap=config.number_or_none("final_logit_softcapping"),
        tied_embeddings=config.boolean("tie_word_embeddings", True),
    )


def _read_gemma2(config: ConfigFile) -> DecoderConfig:
    """Read the config of Gemma 2: windows in every other layer; capped scores and logits."""
    num_layers = config.positive_int("num_hidden_layers")
    alternating = tuple("full_attention" if index % 2 else "sliding_attention" for index in range(num_layers))
    decoder = _read_gemma(config, 8192, read_layer_types(config, num_layers) or alternating)
    caps = {"attention_soft_cap": "attn_logit_softcapping", "logits_soft_cap": "final_logit_softcapping"}
    absent = {
        field: default
        for (field, key), default in zip(caps.items(), (50.0, 30.0))
        if key not in config.values
    }
    return replace(decoder, **absent)


def _read_gemma3(config: ConfigFile) -> DecoderConfig:
    """Read the config of Gemma 3: windows with their own base of positions in most layers; query and key norms.

    Its `max_position_embeddings`, also the default, is the length after linear scaling.
    """
    if config.boolean("use_bidirectional_attention", False):
        raise config.error("use_bidirectional_attention", "false: attention here is causal")
    num_layers = config.positive_int("num_hidden_layers")
    patterns = [config.int_or_none(key) for key in ("sliding_window_pattern", "_sliding_window_pattern")]
    every = next(filter(None, patterns), _SLIDING_PATTERN)
    by_pattern = tuple(
        "sliding_attention" if (index + 1) % every else "full_attention" for index in range(num_layers)
    )
    types = read_layer_types(config, num_layers) or by_pattern
    max_positions = config.int_or_none("max_position_embeddings") or 131072
    ropes = read_layer_type_ropes(config, max_positions, _THETAS)
    decoder = _read_gemma(config, 131072, types, tuple(ropes[kind] for kind in types))
    return replace(decoder, qk_norm="heads", max_positions=max_positions)


GEMMA_FAMILIES = (
    Family("gemma2", "Gemma2ForCausalLM", _read_gemma2, _NAMES),
    Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        _read_gemma3,
        replace(_NAMES, attention=NORMED_ATTENTION),
    ),
)

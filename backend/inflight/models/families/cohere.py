"""Cohere 2 (Command R7B, Command A)."""

from __future__ import annotations

from dataclasses import replace

from inflight.checkpoint_config import ConfigFile
from inflight.models.decoder_config import DecoderConfig
from inflight.models.families.family import (
    Family,
    NormNames,
    check_derived_head_dim,
    read_layer_types,
)
from inflight.models.families.llama import LLAMA_NAMES, in_interleaved_pairs, read_llama_like
from inflight.models.neutral_keys import NeutralKeys

# Defaults of absent keys.
_WINDOW = 4096
_PATTERN = 4  # every fourth layer has no window
_LOGIT_SCALE = 0.0625

# Attention and MLP have the same norm.
_NAMES = replace(LLAMA_NAMES, norms=NormNames(attention="input_layernorm", mlp="input_layernorm"))
# Keys of the model's original code.
_NEUTRAL: NeutralKeys = {
    "position_embedding_type": (None, "rope_gptj"),
    "use_gated_activation": (None, True),
    "use_parallel_block": (None, True),
    "use_parallel_embedding": (None, True, False),
    "use_embedding_sharing": (None, True, False),
    "order_of_interleaved_layers": (None, "local_attn_first"),
    "layer_switch": (None, 4),
}


def _read_cohere2(config: ConfigFile) -> DecoderConfig:
    """Read the config of Cohere 2: parallel attention and MLP, and positions only in layers with windows."""
    check_derived_head_dim(config)
    num_layers = config.positive_int("num_hidden_layers")
    window = config.int_or_none("sliding_window") if "sliding_window" in config.values else _WINDOW
    every = config.int_or_none("sliding_window_pattern") or _PATTERN
    types = read_layer_types(config, num_layers) or tuple(
        "sliding_attention" if (index + 1) % every else "full_attention" for index in range(num_layers)
    )
    if window is None and "sliding_attention" in types:
        raise config.error("sliding_window", "an integer >= 1, since some layers slide")
    attention_bias = config.boolean("attention_bias", False)
    decoder = read_llama_like(
        config,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        norm="layer",
        norm_bias=False,
        norm_eps=config.number_or_none("layer_norm_eps") or 1e-5,
        parallel_residual=True,
        logits_scale=config.number_or_none("logit_scale") or _LOGIT_SCALE,
        tied_embeddings=config.boolean("tie_word_embeddings", True),
    )
    slides = [kind == "sliding_attention" for kind in types]
    decoder = replace(
        decoder,
        sliding_windows=tuple(window if sliding else None for sliding in slides),
        ropes=tuple(rope if sliding else None for rope, sliding in zip(decoder.ropes, slides, strict=True)),
    )
    return in_interleaved_pairs(decoder)


COHERE_FAMILIES = (Family("cohere2", "Cohere2ForCausalLM", _read_cohere2, _NAMES, _NEUTRAL),)

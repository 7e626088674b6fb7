"""Llama 1 to 3, and every checkpoint that says it is one."""

from __future__ import annotations

from inflight.models.config_file import ConfigFile
from inflight.models.decoder_config import DecoderConfig
from inflight.models.families.family import Family, WeightNames, read_llama_like, read_no_windows

LLAMA_NAMES = WeightNames(
    base="model.",
    embedding="embed_tokens",
    final_norm="norm",
    layers="layers.{}.",
    attention_norm="input_layernorm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    output="self_attn.o_proj",
    mlp_norm="post_attention_layernorm",
    up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
    ignored=("rotary_emb.inv_freq",),
)


def _read_config(config: ConfigFile) -> DecoderConfig:
    attention_bias = config.boolean("attention_bias", False)
    return read_llama_like(
        config,
        default_positions=2048,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=config.boolean("mlp_bias", False),
        sliding_windows=read_no_windows(config),
    )


LLAMA = Family("llama", "LlamaForCausalLM", _read_config, LLAMA_NAMES)

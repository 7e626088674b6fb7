"""Qwen3 (dense): Qwen2 without its biases, with a norm over each query and key head."""

from __future__ import annotations

from dataclasses import replace

from inflight.models.config_file import ConfigFile
from inflight.models.decoder_config import DecoderConfig
from inflight.models.families.family import Family, read_llama_like, read_windows_if_used
from inflight.models.families.llama import LLAMA_NAMES

_DEFAULT_HEAD_DIM = 128


def _read_config(config: ConfigFile) -> DecoderConfig:
    attention_bias = config.boolean("attention_bias", False)
    decoder = read_llama_like(
        config,
        default_positions=32768,
        default_kv_heads=32,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm=True,
        sliding_windows=read_windows_if_used(config),
    )
    return replace(decoder, head_dim=config.int_or_none("head_dim") or _DEFAULT_HEAD_DIM)


QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    _read_config,
    replace(LLAMA_NAMES, query_norm="self_attn.q_norm", key_norm="self_attn.k_norm"),
)

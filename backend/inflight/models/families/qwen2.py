"""Qwen2 and Qwen2.5: Llama with biases on query, key and value, and a sliding window in some layers."""

from __future__ import annotations

from inflight.models.config_file import ConfigFile
from inflight.models.decoder_config import DecoderConfig
from inflight.models.families.family import Family, read_llama_like, read_windows_if_used
from inflight.models.families.llama import LLAMA_NAMES

# The biases of query, key and value are there whatever it says.
_NEUTRAL = {"attention_bias": (None, True, False)}


def _read_config(config: ConfigFile) -> DecoderConfig:
    return read_llama_like(
        config,
        default_positions=32768,
        default_kv_heads=32,
        qkv_bias=True,
        sliding_windows=read_windows_if_used(config),
    )


QWEN2 = Family("qwen2", "Qwen2ForCausalLM", _read_config, LLAMA_NAMES, _NEUTRAL)

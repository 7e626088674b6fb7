"""Mistral: Llama with the same sliding window in every layer, unless `sliding_window` is null."""

from __future__ import annotations

from inflight.models.config_file import ConfigFile
from inflight.models.decoder_config import DecoderConfig
from inflight.models.families.family import Family, read_llama_like
from inflight.models.families.llama import LLAMA_NAMES

_DEFAULT_WINDOW = 4096  # transformers' default where the key is absent; null means none


def _read_config(config: ConfigFile) -> DecoderConfig:
    window = config.int_or_none("sliding_window") if "sliding_window" in config.values else _DEFAULT_WINDOW
    return read_llama_like(config, sliding_windows=(window,) * config.positive_int("num_hidden_layers"))


MISTRAL = Family("mistral", "MistralForCausalLM", _read_config, LLAMA_NAMES)

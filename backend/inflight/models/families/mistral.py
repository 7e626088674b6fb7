"""Mistral and Ministral: Llama with a sliding window, in every layer or in those that `layer_types` names.

transformers loads a Mistral that has `layer_types` as a Ministral; without them the two are the same.
"""

from __future__ import annotations

from inflight.models.config_file import ConfigFile
from inflight.models.decoder_config import DecoderConfig
from inflight.models.families.family import Family, read_llama_like, read_windows_of_all
from inflight.models.families.llama import LLAMA_NAMES

# Whatever it says, the window is `sliding_window`.
_NEUTRAL = {"use_sliding_window": (None, True, False)}


def _read_config(config: ConfigFile) -> DecoderConfig:
    windows = read_windows_of_all(config)
    return read_llama_like(config, default_positions=131072, default_kv_heads=8, sliding_windows=windows)


MISTRAL = Family("mistral", "MistralForCausalLM", _read_config, LLAMA_NAMES, _NEUTRAL)
MINISTRAL = Family("ministral", "MinistralForCausalLM", _read_config, LLAMA_NAMES, _NEUTRAL)

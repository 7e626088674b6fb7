"""Qwen2 and Qwen2.5: Llama with biases on query, key and value, and a sliding window in some layers."""

from __future__ import annotations

from inflight.models.config_file import ConfigFile
from inflight.models.decoder_config import DecoderConfig
from inflight.models.families.family import Family, read_llama_like
from inflight.models.families.llama import LLAMA_NAMES

_DEFAULT_WINDOW = 4096  # transformers' default where the key is absent; null means none
_DEFAULT_FULL_LAYERS = 28


def read_sliding_windows(config: ConfigFile) -> tuple[int | None, ...]:
    """Per layer: `layer_types` if it is there, else full attention below `max_window_layers`."""
    num_layers = config.positive_int("num_hidden_layers")
    types = config.texts("layer_types")
    if types and (len(types) != num_layers or set(types) - {"full_attention", "sliding_attention"}):
        raise config.error("layer_types", f"{num_layers} times full_attention or sliding_attention")
    if not config.boolean("use_sliding_window", False):
        if "sliding_attention" in types:
            raise config.error("use_sliding_window", "true, since layer_types has sliding_attention")
        return (None,) * num_layers
    # 0 is a meaningful max_window_layers: every layer slides.
    full = config.values.get("max_window_layers", _DEFAULT_FULL_LAYERS)
    if type(full) is not int or full < 0:
        raise config.error("max_window_layers", "an integer >= 0")
    slides = [kind == "sliding_attention" for kind in types] or [i >= full for i in range(num_layers)]
    window = config.int_or_none("sliding_window") if "sliding_window" in config.values else _DEFAULT_WINDOW
    if window is None and "sliding_attention" in types:
        raise config.error("sliding_window", "an integer >= 1, since layer_types has sliding_attention")
    return tuple(window if sliding else None for sliding in slides)


def _read_config(config: ConfigFile) -> DecoderConfig:
    return read_llama_like(config, qkv_bias=True, sliding_windows=read_sliding_windows(config))


QWEN2 = Family("qwen2", "Qwen2ForCausalLM", _read_config, LLAMA_NAMES)

"""What a family consists of, and what families share when they read config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from inflight.models.config_file import ConfigFile
from inflight.models.decoder_config import Activation, DecoderConfig
from inflight.models.rope_config import longest_sequence, read_rope
from inflight.models.weight_names import WeightNames

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


@dataclass(frozen=True, slots=True)
class Family:
    """A model architecture.

    Attributes:
        model_type: config.json's `model_type`.
        architecture: The class in config.json's `architectures`.
        read_config: Translates config.json; ids and dtype, the same for all families, are filled in later.
        names: Its tensors.
        neutral: Keys that `read_config` does not read, and those of their values that change nothing.
    """

    model_type: str
    architecture: str
    read_config: Callable[[ConfigFile], DecoderConfig]
    names: WeightNames
    neutral: Mapping[str, Sequence[Any]] = field(default_factory=dict)


def read_activation(config: ConfigFile, key: str, default: str) -> Activation:
    """The MLP's activation under `key`."""
    name = config.text_or_none(key) or default
    if name not in _ACTIVATIONS:
        raise config.error(key, f"one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def read_llama_like(
    config: ConfigFile,
    *,
    default_positions: int,
    default_kv_heads: int | None = None,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    sliding_windows: tuple[int | None, ...] | None = None,
) -> DecoderConfig:
    """RMSNorm, rotary positions and a gated MLP, in Llama's spelling of the keys.

    Args:
        config: The whole file.
        default_positions: What transformers takes where `max_position_embeddings` is missing.
        default_kv_heads: What it takes where `num_key_value_heads` is missing; None: as many as there are query
            heads, which is what null means for every family.
    """
    num_layers = config.positive_int("num_hidden_layers")
    num_heads = config.positive_int("num_attention_heads")
    hidden_size = config.positive_int("hidden_size")
    kv_heads_if_absent = num_heads if "num_key_value_heads" in config.values else default_kv_heads
    max_positions = config.int_or_none("max_position_embeddings") or default_positions
    rope = read_rope(config, max_positions)
    return DecoderConfig(
        vocab_size=config.positive_int("vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=config.int_or_none("num_key_value_heads") or kv_heads_if_absent or num_heads,
        head_dim=config.int_or_none("head_dim") or hidden_size // num_heads,
        intermediate_size=config.positive_int("intermediate_size"),
        max_positions=longest_sequence(rope, max_positions),
        norm="rms",
        norm_eps=config.number_or_none("rms_norm_eps") or 1e-6,
        activation=read_activation(config, "hidden_act", "silu"),
        gated_mlp=True,
        rope=rope,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        sliding_windows=sliding_windows or (None,) * num_layers,
        tied_embeddings=config.boolean("tie_word_embeddings", False),
    )

"""What a family consists of, and what families share when they read config.json, sliding windows among it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from inflight.models.config_file import ConfigFile
from inflight.models.decoder_config import Activation, DecoderConfig
from inflight.models.rope import longest_sequence, read_rope

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
_DEFAULT_WINDOW = 4096  # transformers' default where the key is absent; null means none
_DEFAULT_FULL_LAYERS = 28


@dataclass(frozen=True, slots=True)
class WeightNames:
    """Names of modules; `.weight` and `.bias` are added where a tensor is looked up.

    Attributes:
        base: Prefix of everything but lm_head; checkpoints of the bare decoder leave it out.
        embedding: Token embedding, below `base`.
        final_norm: Below `base`.
        layers: Prefix of a layer, below `base`; `{}` stands for its index.
        attention_norm: Below the layer, like all that follow.
        qkv: One module for each of query, key and value, or one for all three.
        output: Output projection of the attention.
        mlp_norm: Norm before the MLP.
        up: Gate and up if the MLP is gated, else up; or one module for both.
        down: Second projection of the MLP.
        position_embedding: Learned positions, below `base`; "" if there are none.
        query_norm: Norm over query heads; "" if there is none.
        key_norm: Norm over key heads; "" if there is none.
        transposed: Linear weights are stored [in, out].
        ignored: Suffixes of tensors that some versions save and that no forward pass needs.
    """

    base: str
    embedding: str
    final_norm: str
    layers: str
    attention_norm: str
    qkv: tuple[str, ...]
    output: str
    mlp_norm: str
    up: tuple[str, ...]
    down: str
    position_embedding: str = ""
    query_norm: str = ""
    key_norm: str = ""
    transposed: bool = False
    ignored: tuple[str, ...] = ()


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


def read_no_windows(config: ConfigFile) -> tuple[None, ...]:
    """Every layer sees everything. ConfigError if a key speaks of windows that would be used."""
    num_layers = config.positive_int("num_hidden_layers")
    if "sliding_attention" in _read_layer_types(config, num_layers):
        raise config.error("layer_types", "full_attention for every layer")
    config.value("max_window_layers")
    if config.has("sliding_window") and config.boolean("use_sliding_window", True):
        raise config.error("sliding_window", "null: this family has no sliding windows")
    return (None,) * num_layers


def read_windows_of_all(config: ConfigFile) -> tuple[int | None, ...]:
    """Mistral's: `sliding_window` in every layer, or in those that `layer_types` has slide."""
    num_layers = config.positive_int("num_hidden_layers")
    types = _read_layer_types(config, num_layers)
    window = _read_window(config)
    if window is None and "sliding_attention" in types:
        raise _no_window(config)
    return tuple(window if kind == "sliding_attention" else None for kind in types) or (window,) * num_layers


def read_windows_if_used(config: ConfigFile) -> tuple[int | None, ...]:
    """Qwen's: if `use_sliding_window`, in layers that `layer_types` names, or from `max_window_layers` on."""
    num_layers = config.positive_int("num_hidden_layers")
    types = _read_layer_types(config, num_layers)
    # 0 is a meaningful max_window_layers: every layer slides.
    full = config.value("max_window_layers") if "max_window_layers" in config.values else _DEFAULT_FULL_LAYERS
    if not config.boolean("use_sliding_window", False):
        config.value("sliding_window")
        if "sliding_attention" in types:
            raise config.error("use_sliding_window", "true, since layer_types has sliding_attention")
        return (None,) * num_layers
    if type(full) is not int or full < 0:
        raise config.error("max_window_layers", "an integer >= 0")
    slides = [kind == "sliding_attention" for kind in types] or [i >= full for i in range(num_layers)]
    window = _read_window(config)
    if window is None and "sliding_attention" in types:
        raise _no_window(config)
    return tuple(window if sliding else None for sliding in slides)


def _read_layer_types(config: ConfigFile, num_layers: int) -> tuple[str, ...]:
    """One a layer; empty if the key is absent."""
    types = config.texts("layer_types")
    if config.has("layer_types") and (
        len(types) != num_layers or set(types) - {"full_attention", "sliding_attention"}
    ):
        raise config.error(
            "layer_types", f"full_attention or sliding_attention for each of num_hidden_layers, {num_layers}"
        )
    return types


def _read_window(config: ConfigFile) -> int | None:
    window = config.int_or_none("sliding_window")
    return window if "sliding_window" in config.values else _DEFAULT_WINDOW


def _no_window(config: ConfigFile) -> Exception:
    return config.error("sliding_window", "an integer >= 1, since layer_types has sliding_attention")

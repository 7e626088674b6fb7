"""A family of models: how its config.json is read, and the names of its tensors.

What families share when they read config.json, sliding windows among it, is here too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from inflight.checkpoint_config import ConfigFile
from inflight.models.decoder_config import Activation, DecoderConfig

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",  # the same polynomial, its factors in another order
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
_DEFAULT_WINDOW = 4096  # transformers' default where the key is absent; null means none
DEFAULT_FULL_LAYERS = 28

FUSED_QKV, FUSED_GATE_UP = "self_attn.qkv_proj", "mlp.gate_up_proj"
"""Llama's projections where a checkpoint, or an adapter, has them as one module."""


@dataclass(frozen=True, slots=True)
class ExpertStacks:
    """Tensors that have a matrix of each expert of a layer, by their whole names below the layer.

    Their biases, if experts have any, have the same names with `_bias`.

    Attributes:
        up: Gate and up.
        down: The second projection.
        router: What the router beside them is called, if it is called otherwise than beside single experts.
        transposed: Each matrix is stored [in, out]; else [out, in].
        interleaved: Outputs of `up` are of gate and up in turn; else first all of gate.
    """

    up: str = "mlp.experts.gate_up_proj"
    down: str = "mlp.experts.down_proj"
    router: str = ""
    transposed: bool = False
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class NormNames:
    """Norms of a layer, below the layer; "" for one that the family does not have.

    Attributes:
        attention: Before attention.
        mlp: Before the MLP.
        attention_post: On what attention gives.
        mlp_post: On what the MLP gives.
    """

    attention: str = ""
    mlp: str = ""
    attention_post: str = ""
    mlp_post: str = ""


@dataclass(frozen=True, slots=True)
class LatentNames:
    """Latent attention's modules, below the layer.

    Attributes:
        query: Queries projected from hidden states, where the model has no `query_rank`.
        query_down: What queries are projected from, where it has one.
        query_down_norm: Norm over that.
        query_up: Queries projected from it.
        kv_down: Compressed latent and shared key.
        kv_down_norm: Norm over the compressed latent.
        kv_up: Keys and values, head by head.
    """

    query: str
    query_down: str
    query_down_norm: str
    query_up: str
    kv_down: str
    kv_down_norm: str
    kv_up: str


@dataclass(frozen=True, slots=True)
class AttentionNames:
    """Attention's modules, below the layer.

    Attributes:
        output: Output projection.
        qkv: One module for each of query, key and value, or one for all three; none of latent attention.
        qkv_by_head: The one module for query, key and value has one head's three, then the next head's.
        query_norm: Norm over query heads; "" if there is none.
        key_norm: Norm over key heads; "" if there is none.
        sinks: The learned scores of heads, by the tensor's whole name; "" if there are none.
        latent: None unless attention is latent.
    """

    output: str
    qkv: tuple[str, ...] = ()
    qkv_by_head: bool = False
    query_norm: str = ""
    key_norm: str = ""
    sinks: str = ""
    latent: LatentNames | None = None


@dataclass(frozen=True, slots=True)
class MlpNames:
    """The modules of an MLP.

    Attributes:
        up: Gate and up if the MLP is gated, else up; or one module for both.
        down: Second projection.
    """

    up: tuple[str, ...]
    down: str


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """The modules of a layer that has experts, below the layer.

    Attributes:
        router: Scores of the experts.
        prefix: Of an expert; `{}` stands for its index.
        each: An expert's modules, below `prefix`.
        stacks: What checkpoints have that keep all experts of a layer in one tensor; None: there are none.
        shared: The MLP beside the experts; None if there is none.
        shared_gate: What multiplies its result; "" if nothing does.
        choice_bias: What is added to probabilities where experts are chosen, by the tensor's whole name; "" if
            nothing is.
    """

    router: str
    prefix: str
    each: MlpNames
    stacks: ExpertStacks | None = None
    shared: MlpNames | None = None
    shared_gate: str = ""
    choice_bias: str = ""


@dataclass(frozen=True, slots=True)
class WeightNames:
    """Names of modules; `.weight` and `.bias` are added where a tensor is looked up.

    Attributes:
        base: Prefix of everything but lm_head; checkpoints of the bare decoder leave it out.
        embedding: Token embedding, below `base`.
        final_norm: Below `base`.
        layers: Prefix of a layer, below `base`; `{}` stands for its index.
        norms: Of each layer.
        attention: Of each layer.
        mlp: Of each layer that has no experts.
        experts: Of the layers that have experts; None if there are none.
        lm_head: Output projection, by its whole name.
        position_embedding: Learned positions, below `base`; "" if there are none.
        transposed: Linear weights are stored [in, out].
        ignored: Suffixes of tensors that some versions save and that no forward pass needs.
    """

    base: str
    embedding: str
    final_norm: str
    layers: str
    norms: NormNames
    attention: AttentionNames
    mlp: MlpNames
    experts: ExpertNames | None = None
    lm_head: str = "lm_head"
    position_embedding: str = ""
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
        quantizations: What `quant_method` may be in its checkpoints; their weights are dequantized when loaded.
    """

    model_type: str
    architecture: str
    read_config: Callable[[ConfigFile], DecoderConfig]
    names: WeightNames
    neutral: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    quantizations: tuple[str, ...] = ()


def read_activation(config: ConfigFile, key: str, default: str) -> Activation:
    """Return the MLP's activation under `key`."""
    name = config.text_or_none(key) or default
    if name not in _ACTIVATIONS:
        raise config.error(key, f"one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def read_size(config: ConfigFile, key: str, alias: str, default: int | None = None) -> int:
    """An integer of at least 1, under the family's own key or under the name that other families have for it."""
    own, other = config.int_or_none(key), config.int_or_none(alias)
    if own is not None and other is not None and own != other:
        raise config.error(alias, f"{own}, as {key} says, or no such key")
    return own or other or default or config.positive_int(key)


def read_no_windows(config: ConfigFile) -> tuple[None, ...]:
    """Return every layer sees everything. ConfigError if a key speaks of windows that would be used."""
    num_layers = config.positive_int("num_hidden_layers")
    if "sliding_attention" in read_layer_types(config, num_layers):
        raise config.error("layer_types", "full_attention for every layer")
    config.value("max_window_layers")
    if config.value("sliding_window") and config.boolean("use_sliding_window", True):
        raise config.error("sliding_window", "null: this family has no sliding windows")
    return (None,) * num_layers


def read_windows_of_all(config: ConfigFile) -> tuple[int | None, ...]:
    """Mistral's: `sliding_window` in every layer, or in those that `layer_types` has slide."""
    num_layers = config.positive_int("num_hidden_layers")
    types = read_layer_types(config, num_layers)
    window = read_window(config)
    if window is None and "sliding_attention" in types:
        raise no_window(config)
    return tuple(window if kind == "sliding_attention" else None for kind in types) or (window,) * num_layers


def read_windows_if_used(config: ConfigFile) -> tuple[int | None, ...]:
    """Qwen's: if `use_sliding_window`, in layers that `layer_types` names, or from `max_window_layers` on."""
    num_layers = config.positive_int("num_hidden_layers")
    types = read_layer_types(config, num_layers)
    # 0 is a meaningful max_window_layers: every layer slides.
    full = config.value("max_window_layers") if "max_window_layers" in config.values else DEFAULT_FULL_LAYERS
    if not config.boolean("use_sliding_window", False):
        config.value("sliding_window")
        if "sliding_attention" in types:
            raise config.error("use_sliding_window", "true, since layer_types has sliding_attention")
        return (None,) * num_layers
    if type(full) is not int or full < 0:
        raise config.error("max_window_layers", "an integer >= 0")
    slides = [kind == "sliding_attention" for kind in types] or [i >= full for i in range(num_layers)]
    window = read_window(config)
    if window is None and "sliding_attention" in types:
        raise no_window(config)
    return tuple(window if sliding else None for sliding in slides)


def read_layer_types(config: ConfigFile, num_layers: int) -> tuple[str, ...]:
    """One a layer; empty if the key is absent."""
    types = config.texts("layer_types")
    if config.has("layer_types") and (
        len(types) != num_layers or set(types) - {"full_attention", "sliding_attention"}
    ):
        raise config.error(
            "layer_types", f"full_attention or sliding_attention for each of num_hidden_layers, {num_layers}"
        )
    return types


def read_window(config: ConfigFile) -> int | None:
    window = config.int_or_none("sliding_window")
    return window if "sliding_window" in config.values else _DEFAULT_WINDOW


def no_window(config: ConfigFile) -> Exception:
    return config.error("sliding_window", "an integer >= 1, since layer_types has sliding_attention")

"""A family of models: the reader of its config.json, and the names of its tensors.

This module also has the shared parts of the readers, such as sliding windows.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from inflight.checkpoint_config import ConfigFile
from inflight.errors import ConfigError
from inflight.models.decoder_config import Activation, DecoderConfig
from inflight.models.neutral_keys import ANY, NeutralKeys
from inflight.positions import longest_sequence, position_keys, stated_positions

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",  # the same polynomial with its factors in another order
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
_DEFAULT_WINDOW = 4096  # transformers' default if the key is absent; null means no window
DEFAULT_FULL_LAYERS = 28
WINDOWS_UNUSED: NeutralKeys = {"sliding_window": ANY, "max_window_layers": ANY}
"""The keys, in families with Qwen's keys, that have no effect with `use_sliding_window: false`."""

# Prefixes of tensors of multimodal models' other parts: encoders and projectors before the text part, draft
# layers.
OTHER_PARTS = (
    "vision_tower.",
    "vision_model.",
    "connector.",
    "visual.",
    "multi_modal_projector.",
    "embed_vision.",
    "embed_audio.",
    "vision_embedder.",
    "mm_projector.",
    "audio_tower.",
    "image_newline",
    "mtp.",
)
"""Beginnings of the names of tensors that multimodal models have beside the text part."""
# transformers writes layers of Kimi K2.5's text part as blocks, like those of its vision tower.
_KIMI_BLOCKS = (r"^language_model\.model\.blocks\.", "language_model.model.layers.")


@dataclass(frozen=True, slots=True)
class ExpertStacks:
    """Names of the tensors that contain the matrices of all experts of a layer: whole names below the layer.

    The tensors of experts' biases, if there are any, have these names with `_bias` appended.

    Attributes:
        up: Gate and up projections.
        down: Down projection.
        router: Name of the router in such checkpoints; "": the same as in checkpoints with single experts.
        transposed: Whether each matrix is stored [in, out] instead of [out, in]; None: decided by its shape.
        interleaved: Whether outputs of `up` alternate between gate and up; otherwise all outputs of gate come
            first.
    """

    up: str = "mlp.experts.gate_up_proj"
    down: str = "mlp.experts.down_proj"
    router: str = ""
    transposed: bool | None = False
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class NormNames:
    """Names of a layer's norms, below the layer; "" for a norm that the family does not have.

    Attributes:
        attention: Norm before attention.
        mlp: Norm before the MLP.
        attention_post: Norm on attention's output.
        mlp_post: Norm on the MLP's output.
    """

    attention: str = ""
    mlp: str = ""
    attention_post: str = ""
    mlp_post: str = ""


@dataclass(frozen=True, slots=True)
class LatentNames:
    """Names of latent attention's modules, below the layer.

    Attributes:
        query: Projection of hidden states to queries, if the model has no `query_rank`.
        query_down: Projection of hidden states to the vector of width `query_rank`.
        query_down_norm: Norm over the vector of width `query_rank`.
        query_up: Projection of the vector of width `query_rank` to queries.
        kv_down: Projection to the compressed latent and the shared key.
        kv_down_norm: Norm over the compressed latent.
        kv_up: Projection to keys and values, head by head.
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
    """Names of attention's modules, below the layer.

    Attributes:
        output: Output projection.
        qkv: One module for each of query, key and value, or one module for all three; empty with latent attention.
        qkv_by_head: Whether one module for all three has the first key head's queries, its key and its value,
            then those of the next key head.
        query_norm: Norm over query heads; "" if there is none.
        key_norm: Norm over key heads; "" if there is none.
        sinks: Whole name of the tensor with the heads' learned scores; "" if there are none.
        head_gates: Projection to the gates of heads; "" if there are none.
        latent: Names of latent attention's modules; None for other attention.
    """

    output: str
    qkv: tuple[str, ...] = ()
    qkv_by_head: bool = False
    query_norm: str = ""
    key_norm: str = ""
    sinks: str = ""
    head_gates: str = ""
    latent: LatentNames | None = None


@dataclass(frozen=True, slots=True)
class MlpNames:
    """Names of an MLP's modules.

    Attributes:
        up: Modules of gate and up, or one module for both; of up alone if the MLP is not gated.
        down: Down projection.
        fused: Whether `up` is one module that fuses gate and up, in this order.
    """

    up: tuple[str, ...]
    down: str
    fused: bool = False


@dataclass(frozen=True, slots=True)
class ExpertNormNames:
    """Names of the norms of a layer with both experts and an MLP, below the layer.

    Attributes:
        router: Whole name of the weight of the norm on the router's input.
        before: Norm on the experts' input.
        after: Norm on the experts' result.
        shared_after: Norm on the shared MLP's result.
    """

    router: str
    before: str
    after: str
    shared_after: str


@dataclass(frozen=True, slots=True)
class LayerInputNames:
    """Names of the modules of per-layer embeddings.

    Attributes:
        embedding: The table with per-layer embeddings of all layers, below the model's `base`.
        projection: The projection of ordinary embeddings, below `base`.
        norm: The norm on each layer's part of the projection's result, below `base`.
        gate: The projection of the residual stream, below each layer.
        output: The projection of the product with the per-layer embedding, below each layer.
        output_norm: The norm on the output projection's result, below each layer.
    """

    embedding: str
    projection: str
    norm: str
    gate: str
    output: str
    output_norm: str


@dataclass(frozen=True, slots=True)
class AltUpNames:
    """Names of the modules of several residual streams.

    Attributes:
        split: The projections of the embedding, below the model's `base`; `{}` stands for the index.
        join: The projections before the final norm, below `base`; `{}` stands for the index.
        router: The projection of the active stream, below each layer.
        router_norm: The norm on the router's input, below each layer.
        prediction: The projection to the weights of predictions, below each layer.
        correction: The projection to the factors of corrections, below each layer.
        output_scale: Whole name, below each layer, of the factors of the active stream.
    """

    split: str
    join: str
    router: str
    router_norm: str
    prediction: str
    correction: str
    output_scale: str


@dataclass(frozen=True, slots=True)
class LaurelNames:
    """Names of the modules of a low-rank branch beside attention, below the layer.

    Attributes:
        down: The projection of attention's input.
        up: The projection back to hidden states.
        norm: The norm on the result.
    """

    down: str
    up: str
    norm: str


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names of the modules of a layer with experts, below the layer.

    Attributes:
        router: The router.
        prefix: Prefix of an expert; `{}` stands for its index.
        each: Modules of an expert, below `prefix`.
        stacks: Tensors of checkpoints that store all experts of a layer in one tensor; None: no such checkpoints.
        shared: The shared MLP; None if there is none.
        shared_gate: The gate that multiplies the shared MLP's result; "" if there is none.
        choice_bias: Whole name of the biases that are added to probabilities when experts are chosen; "" if there
            are none.
        has_choice_bias_row: Whether these biases are stored as a row, [1, experts], instead of a vector.
        norms: Names of the norms of router, experts and shared MLP; None if there are none.
        scales: Whole name of the factors by which experts' weights are multiplied; "" if there are none.
        latent: The projections of hidden states to the experts' inputs, and of the experts' outputs to
            hidden states; empty if there are none.
    """

    router: str
    prefix: str
    each: MlpNames
    stacks: ExpertStacks | None = None
    shared: MlpNames | None = None
    shared_gate: str = ""
    choice_bias: str = ""
    has_choice_bias_row: bool = False
    norms: ExpertNormNames | None = None
    scales: str = ""
    latent: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RecurrentNames:
    """Names of a recurrent layer's modules, below the layer.

    Attributes:
        product: Modules of the input projection, each with its number of `RecurrentConfig.sections`, in order.
        conv: The convolution, or one module for each of `RecurrentConfig.conv_sections`.
        output: Output projection.
        decay: Whole name of the tensor with the logarithm of the negated decay; "" if there is none.
        step_bias: Whole name of the bias of step sizes; "" if there is none.
        skip: Whole name of the factor of values that are added to the output; "" if there is none.
        norm: Norm on the output; "" if there is none.
        conv_parts: Modules of checkpoints that store the rows of the single module in `conv` in several; empty: no
            such checkpoints.
        step_up: Second projection of step sizes; "" if there is none.
        gate_up: Second projection of the output's gates; "" if there is none.
        by_key_head: Whether a module of the input projection has all sections of the first key head, then
            of the next key head.
    """

    product: tuple[tuple[str, int], ...]
    conv: tuple[str, ...]
    output: str
    decay: str = ""
    step_bias: str = ""
    skip: str = ""
    norm: str = ""
    conv_parts: tuple[str, ...] = ()
    step_up: str = ""
    gate_up: str = ""
    by_key_head: bool = False


@dataclass(frozen=True, slots=True)
class DraftHeadNames:
    """Names of the modules of a draft head (multi-token prediction), which shares embedding and output projection.

    Attributes:
        prefix: Prefix of all names of the head; "": that of the layer after the model's last one.
        layer: Prefix of the head's layer, below `prefix`.
        embedding_norm: Norm on the embedding of the newest token, below `prefix`.
        hidden_norm: Norm on the hidden state before that token, below `prefix`.
        projection: Projection of both, the embedding first, to the layer's input, below `prefix`.
        final_norm: Norm on the layer's output, below `prefix`.
    """

    prefix: str = ""
    layer: str = ""
    embedding_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    projection: str = "eh_proj"
    final_norm: str = "shared_head.norm"


@dataclass(frozen=True, slots=True)
class WeightNames:
    """Names of modules; with `.weight` or `.bias` appended they are names of tensors.

    Attributes:
        base: Prefix of all names except lm_head's; checkpoints of a decoder without lm_head omit it.
        embedding: Token embedding, below `base`.
        final_norm: Norm before the output projection, below `base`.
        layers: Prefix of a layer, below `base`; `{}` stands for its index.
        norms: Norms of each layer.
        attention: Attention of each layer.
        mlp: MLP of each layer without experts.
        experts: Experts of the layers that have them; None if there are none.
        recurrent: Modules of the recurrent layers; None if there are none.
        recurrent_norms: Norms of the recurrent layers; None: they have the names in `norms`.
        lm_head: Whole name of the output projection.
        position_embedding: Learned positions, below `base`; "" if there are none.
        embedding_norm: Norm on embeddings, below `base`; "" if there is none.
        transposed: Whether linear weights are stored [in, out].
        layer_inputs: Modules of per-layer embeddings; None if there are none.
        altup: Modules of several residual streams; None if there is one.
        laurel: Modules of a low-rank branch beside attention; None if there is none.
        activation: Prefix, below the layer, of the learned parameters of xIELU; "" if the activation has none.
        layer_scale: Whole name, below the layer, of the factor of the residual stream after the layer; ""
            if there is none.
        draft_head: Modules of the draft head that checkpoints may have; None if there is none.
        ignored: Suffixes of tensors that some versions save but no forward pass needs.
        left_out: Prefixes of tensors that are not read, such as tensors of draft layers.
        other_names: Patterns of names that some checkpoints have, such as those that transformers writes, and what
            `re.sub` replaces them by to get the names above.
    """

    base: str
    embedding: str
    final_norm: str
    layers: str
    norms: NormNames
    attention: AttentionNames
    mlp: MlpNames
    experts: ExpertNames | None = None
    recurrent: RecurrentNames | None = None
    recurrent_norms: NormNames | None = None
    lm_head: str = "lm_head"
    position_embedding: str = ""
    embedding_norm: str = ""
    transposed: bool = False
    layer_inputs: LayerInputNames | None = None
    altup: AltUpNames | None = None
    laurel: LaurelNames | None = None
    activation: str = ""
    layer_scale: str = ""
    draft_head: DraftHeadNames | None = None
    ignored: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    other_names: tuple[tuple[str, str], ...] = ()

    def of_family(self, name: str) -> str:
        """Return a tensor's name, with the family's names instead of `other_names`."""
        for pattern, replacement in self.other_names:
            name = re.sub(pattern, replacement, name)
        return name


class NoMap(ConfigError):
    """The error for a feature of a checkpoint that this package does not implement, but transformers' code may.

    Attributes:
        key: The key of config.json that requires the feature.
    """

    def __init__(self, config: ConfigFile, key: str, expected: str) -> None:
        super().__init__(str(config.error(key, expected)))
        self.key = key


@dataclass(frozen=True, slots=True)
class Family:
    """How checkpoints of one class of transformers are read: their keys in config.json and names of tensors.

    Attributes:
        model_type: config.json's `model_type`.
        architecture: The class in config.json's `architectures`.
        read_config: Translates config.json; end ids and dtype, which are read in the same way for all
            families, are added later. Raises NoMap for a checkpoint that is to be treated as one of an unknown
            family.
        names: Names of the family's tensors.
        neutral: Keys that `read_config` does not read, each with its values that change nothing; `ANY` for
            a key that never matters, or that another key switches off. Neutral keys of all families are in
            `neutral_keys.py`.
        quantizations: Further values of `quant_method` that the family's checkpoints may have, for stacked
            experts.
        read_norms: Returns the names of a layer's norms, in a family in which they depend on config.json; None:
            they are those of `names`.
        other_types: Further values of `model_type` that published checkpoints of the class have.
    """

    model_type: str
    architecture: str
    read_config: Callable[[ConfigFile], DecoderConfig]
    names: WeightNames
    neutral: NeutralKeys = field(default_factory=dict[str, tuple[Any, ...]])
    quantizations: tuple[str, ...] = ()
    read_norms: Callable[[ConfigFile], NormNames] | None = None
    other_types: tuple[str, ...] = ()


def names_in_multimodal(names: WeightNames) -> WeightNames:
    """Return the names of a family's tensors in a multimodal model, where tensors of other parts are left out."""
    others = tuple(prefix + part for prefix in ("model.", "") for part in OTHER_PARTS)
    return replace(
        names,
        left_out=(*(name for name in names.left_out if name not in others), *others),
        other_names=(*names.other_names, _KIMI_BLOCKS),
    )


def bases_in_multimodal(names: WeightNames) -> tuple[str, ...]:
    """Return the prefixes that replace `names.base` in layouts of multimodal models, the most specific first.

    The first prefix is used by transformers' modules, the second by Idefics3 and SmolVLM, the third by most
    published files, the fourth by models without an output projection. The last three are prefixes of text models,
    which files of Qwen2-VL use too: in files, in modules, and in models without an output projection.
    """
    bases = (
        "model.language_model.",
        "model.text_model.",
        f"language_model.{names.base}",
        "language_model.",
        names.base,
        "model.",
        "",
    )
    return tuple(dict.fromkeys(bases))


def heads_in_multimodal(names: WeightNames) -> tuple[str, ...]:
    """Return the names of the output projection in layouts of multimodal models."""
    return names.lm_head, f"language_model.{names.lm_head}"


def read_activation(config: ConfigFile, key: str, default: str) -> Activation:
    """Return the MLP's activation, read from `key`."""
    name = config.text_or_none(key) or default
    if name not in _ACTIVATIONS:
        raise config.error(key, f"one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def read_size(config: ConfigFile, key: str, alias: str, default: int | None = None) -> int:
    """Return an integer of at least 1, from the family's own key or from `alias`, other families' name of the
    key."""
    own, other = config.int_or_none(key), config.int_or_none(alias)
    if own is not None and other is not None and own != other:
        raise config.error(alias, f"{own} like {key}, or nothing")
    return own or other or default or config.positive_int(key)


def read_positions(config: ConfigFile) -> int:
    """Return the number of positions before scaling, or the family's value if the key is absent."""
    key, *others = position_keys(config.values)
    config.int_or_none(key)
    for other in others:
        read_size(config, key, other, 1)
    positions = stated_positions(config.values)
    assert positions is not None, "inflight.positions has every family"
    return positions


def read_longest(config: ConfigFile) -> int:
    """Return the longest sequence in tokens, with scaled positions."""
    longest = longest_sequence(config.values)
    assert longest is not None, "inflight.positions has every family"
    return longest


def derived_head_dim(config: ConfigFile, hidden_size: int, num_heads: int) -> int:
    """Return the width of a head if no key says it; raise ConfigError if there are more heads than columns."""
    if num_heads > hidden_size:
        key = next(filter(config.has, ("n_head", "n_heads", "num_heads")), "num_attention_heads")
        raise config.error(key, f"at most the hidden size, {hidden_size}")
    return hidden_size // num_heads


def read_head_dim(config: ConfigFile, default: int) -> int:
    """Return the width of a head: `default` if the key is absent; hidden_size over num_attention_heads if it is
    null."""
    if "head_dim" in config.values and config.value("head_dim") is None:
        num_heads = config.positive_int("num_attention_heads")
        return derived_head_dim(config, config.positive_int("hidden_size"), num_heads)
    return config.int_or_none("head_dim") or default


def check_derived_head_dim(config: ConfigFile) -> None:
    """Raise ConfigError if `head_dim` is not hidden_size over num_attention_heads, in a family without the key."""
    derived = config.positive_int("hidden_size") // config.positive_int("num_attention_heads")
    if config.int_or_none("head_dim") not in (None, derived):
        raise config.error("head_dim", f"hidden_size over num_attention_heads, {derived}, or nothing")


def read_no_windows(config: ConfigFile) -> tuple[None, ...]:
    """Return no window for any layer; raise ConfigError if a key asks for a window."""
    num_layers = config.positive_int("num_hidden_layers")
    if "sliding_attention" in read_layer_types(config, num_layers):
        raise config.error("layer_types", "full_attention for every layer")
    if config.value("sliding_window") and config.boolean("use_sliding_window", True):
        raise config.error("sliding_window", "null: this family has no sliding windows")
    return (None,) * num_layers


def read_windows_of_all(config: ConfigFile) -> tuple[int | None, ...]:
    """Return Mistral's windows: `sliding_window` in every layer, or in the layers that `layer_types` names."""
    num_layers = config.positive_int("num_hidden_layers")
    types = read_layer_types(config, num_layers)
    window = read_window(config)
    if window is None and "sliding_attention" in types:
        raise no_window(config)
    return tuple(window if kind == "sliding_attention" else None for kind in types) or (window,) * num_layers


def read_windows_if_used(config: ConfigFile) -> tuple[int | None, ...]:
    """Return Qwen's windows, if used: in layers that `layer_types` names, or from `max_window_layers` on."""
    num_layers = config.positive_int("num_hidden_layers")
    types = read_layer_types(config, num_layers)
    if not uses_windows(config, types):
        return (None,) * num_layers
    full = config.count("max_window_layers", DEFAULT_FULL_LAYERS)
    slides = [kind == "sliding_attention" for kind in types] or [i >= full for i in range(num_layers)]
    window = read_window(config)
    if window is None and "sliding_attention" in types:
        raise no_window(config)
    return tuple(window if sliding else None for sliding in slides)


def uses_windows(config: ConfigFile, types: tuple[str, ...]) -> bool:
    """Return Qwen's `use_sliding_window`; if it is false, the keys `WINDOWS_UNUSED` have no effect."""
    if config.boolean("use_sliding_window", False):
        return True
    if "sliding_attention" in types:
        raise config.error("use_sliding_window", "true, since layer_types has sliding_attention")
    return False


def read_layer_types(config: ConfigFile, num_layers: int) -> tuple[str, ...]:
    """Return the type of each layer; empty if the key is absent."""
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

"""A family of models: the reader of its config.json, and the names of its tensors.

Shared parts of the readers, such as sliding windows, are here too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from inflight.checkpoint_config import ConfigFile
from inflight.errors import ConfigError
from inflight.models.decoder_config import Activation, DecoderConfig
from inflight.models.neutral_keys import ANY, NeutralKeys
from inflight.positions import position_keys, stated_positions

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
"""Keys that `use_sliding_window: false` switches off, in families with Qwen's keys."""

# Prefixes of tensors of the other parts of multimodal models: what comes before the text part, and draft layers.
_OTHER_PARTS = (
    "vision_tower.",
    "vision_model.",
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


@dataclass(frozen=True, slots=True)
class ExpertStacks:
    """Tensors that contain a matrix of each expert of a layer, by their whole names below the layer.

    Their biases, if experts have any, have the same names with `_bias`.

    Attributes:
        up: Gate and up projections.
        down: Down projection.
        router: Name of the router in such checkpoints, if it differs from that beside single experts.
        transposed: Whether each matrix is stored [in, out] instead of [out, in]; None: if its shape is not that of
            the latter.
        interleaved: Whether outputs of `up` alternate between gate and up; otherwise all of gate come first.
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
        query_down_norm: Norm over that vector.
        query_up: Projection of that vector to queries.
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
        qkv: One module for each of query, key and value, or one for all three; empty with latent attention.
        qkv_by_head: Whether that one module has query, key and value of one head, then those of the next head.
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
        up: Gate and up if the MLP is gated, else up; or one module for both.
        down: Down projection.
        fused: Whether `up` is one module that fuses gate and up, in this order.
    """

    up: tuple[str, ...]
    down: str
    fused: bool = False


@dataclass(frozen=True, slots=True)
class ExpertNormNames:
    """Names of the norms of a layer whose experts are beside its MLP, below the layer.

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
        embedding: The embedding of all layers' inputs, below the model's `base`, as are the next two.
        projection: The projection of ordinary embeddings.
        norm: The norm on each layer's part of that projection.
        gate: In each layer, the projection of the residual stream, below the layer, as are the next two.
        output: The projection of the product with the layer's input.
        output_norm: The norm on that.
    """

    embedding: str
    projection: str
    norm: str
    gate: str
    output: str
    output_norm: str


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names of the modules of a layer with experts, below the layer.

    Attributes:
        router: The router.
        prefix: Prefix of an expert; `{}` stands for its index.
        each: Modules of an expert, below `prefix`.
        stacks: Tensors of checkpoints that store all experts of a layer in one; None: the family has none.
        shared: The shared MLP; None if there is none.
        shared_gate: The gate that multiplies the shared MLP's result; "" if there is none.
        choice_bias: Whole name of the biases that are added to probabilities when experts are chosen; "" if there
            are none.
        has_choice_bias_row: Whether these biases are stored as a row, [1, experts], instead of a vector.
        norms: Names of norms of their own; None if there are none.
        scales: Whole name of the factors of the experts' weights; "" if there are none.
        latent: The projections to the vectors that experts read, and from those that they write; empty if there
            are none.
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
        conv: The convolution; or one module for each of `RecurrentConfig.conv_sections`.
        output: Output projection.
        decay: Whole name of the tensor with the logarithm of the negated decay; "" if there is none.
        step_bias: Whole name of the bias of step sizes; "" if there is none.
        skip: Whole name of the factor of values that are added to the output; "" if there is none.
        norm: Norm on the output; "" if there is none.
        step_up: Second projection of step sizes; "" if there is none.
        gate_up: Second projection of the output's gates; "" if there is none.
        by_key_head: Whether a module of the input projection has all sections of one key head, then those of the
            next head.
    """

    product: tuple[tuple[str, int], ...]
    conv: tuple[str, ...]
    output: str
    decay: str = ""
    step_bias: str = ""
    skip: str = ""
    norm: str = ""
    step_up: str = ""
    gate_up: str = ""
    by_key_head: bool = False


@dataclass(frozen=True, slots=True)
class WeightNames:
    """Names of modules; `.weight` and `.bias` are appended to look a tensor up.

    Attributes:
        base: Prefix of everything but lm_head; checkpoints of the bare decoder omit it.
        embedding: Token embedding, below `base`.
        final_norm: Norm before the output projection, below `base`.
        layers: Prefix of a layer, below `base`; `{}` stands for its index.
        norms: Norms of each layer.
        attention: Attention of each layer.
        mlp: MLP of each layer without experts.
        experts: Experts of the layers that have them; None if there are none.
        recurrent: Modules of the recurrent layers; None if there are none.
        recurrent_norms: Norms of the recurrent layers, if they differ from those of other layers.
        lm_head: Whole name of the output projection.
        position_embedding: Learned positions, below `base`; "" if there are none.
        transposed: Whether linear weights are stored [in, out].
        layer_inputs: Modules of per-layer embeddings; None if there are none.
        activation: Prefix, below the layer, of the learned parameters of xIELU; "" if the activation has none.
        layer_scale: Whole name of the number, below the layer, by which its output is multiplied; "" if there is
            none.
        ignored: Suffixes of tensors that some versions save but no forward pass needs.
        left_out: Prefixes of tensors that are not read, such as those of draft layers.
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
    transposed: bool = False
    layer_inputs: LayerInputNames | None = None
    activation: str = ""
    layer_scale: str = ""
    ignored: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


class NoMap(ConfigError):
    """A feature of a family's checkpoint that is not implemented here, and may be in transformers' own code.

    Attributes:
        key: The key of config.json that asks for it.
    """

    def __init__(self, config: ConfigFile, key: str, expected: str) -> None:
        super().__init__(str(config.error(key, expected)))
        self.key = key


@dataclass(frozen=True, slots=True)
class Family:
    """How checkpoints of one class of transformers are read: its keys of config.json and names of tensors.

    Attributes:
        model_type: config.json's `model_type`.
        architecture: The class in config.json's `architectures`.
        read_config: Translates config.json; end ids and dtype, read alike for all families, are added later.
            Raises NoMap for a checkpoint that is to be treated as one of an unknown family.
        names: Names of its tensors.
        neutral: Keys with the values that change nothing where `read_config` does not read the key; `ANY` for a
            key that never matters, or that another key switches off. Those of all families are in
            `neutral_keys.py`.
        quantizations: Further values of `quant_method` that its checkpoints may have, for stacked experts.
    """

    model_type: str
    architecture: str
    read_config: Callable[[ConfigFile], DecoderConfig]
    names: WeightNames
    neutral: NeutralKeys = field(default_factory=dict[str, tuple[Any, ...]])
    quantizations: tuple[str, ...] = ()


def names_in_multimodal(names: WeightNames) -> WeightNames:
    """Return the names of a family's tensors in a multimodal model, where tensors of other parts are left out."""
    others = tuple(prefix + part for prefix in ("model.", "") for part in _OTHER_PARTS)
    return replace(names, left_out=(*(name for name in names.left_out if name not in others), *others))


def bases_in_multimodal(names: WeightNames) -> tuple[str, ...]:
    """Return the prefixes that replace `names.base` in layouts of multimodal models, the most specific first.

    The first two are those of transformers' modules and of most published files, the third that of models without
    an output projection. The last ones are those of text models, which files of Qwen2-VL have too: of files, of
    modules, and of models without an output projection.
    """
    bases = (
        "model.language_model.",
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
    """Return an integer of at least 1, from the family's own key or from other families' name of it."""
    own, other = config.int_or_none(key), config.int_or_none(alias)
    if own is not None and other is not None and own != other:
        raise config.error(alias, f"{own}, as {key} says, or no such key")
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


def read_head_dim(config: ConfigFile, default: int) -> int:
    """Return the width of a head: `default` if the key is absent, and if it is null what the heads divide."""
    if "head_dim" in config.values and config.value("head_dim") is None:
        return config.positive_int("hidden_size") // config.positive_int("num_attention_heads")
    return config.int_or_none("head_dim") or default


def check_derived_head_dim(config: ConfigFile) -> None:
    """Raise ConfigError if `head_dim` is not hidden_size over num_attention_heads, in a family without the key."""
    derived = config.positive_int("hidden_size") // config.positive_int("num_attention_heads")
    if config.int_or_none("head_dim") not in (None, derived):
        raise config.error("head_dim", f"hidden_size over num_attention_heads, {derived}, or no such key")


def read_no_windows(config: ConfigFile) -> tuple[None, ...]:
    """Return no window for any layer; raise ConfigError if a key asks for a window."""
    num_layers = config.positive_int("num_hidden_layers")
    if "sliding_attention" in read_layer_types(config, num_layers):
        raise config.error("layer_types", "full_attention for every layer")
    if config.value("sliding_window") and config.boolean("use_sliding_window", True):
        raise config.error("sliding_window", "null: this family has no sliding windows")
    return (None,) * num_layers


def read_windows_of_all(config: ConfigFile) -> tuple[int | None, ...]:
    """Return Mistral's windows: `sliding_window` in every layer, or in those that `layer_types` names."""
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
    """Return Qwen's `use_sliding_window`; without windows `WINDOWS_UNUSED` change nothing."""
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

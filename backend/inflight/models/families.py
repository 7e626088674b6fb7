"""The families of models: what each one's config.json means, and what its tensors are called.

A new family is a section here and an entry in `FAMILIES`. What families share when they read config.json, sliding
windows among it, stands before them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
_QWEN3_HEAD_DIM = 128  # where the key is absent
_GPT2_POSITIONS = 1024  # likewise
# Whatever it says, the window is `sliding_window`.
_WINDOW_IS_USED = {"use_sliding_window": (None, True, False)}
# Those of query, key and value are, whatever it says.
_BIASES_ARE_THERE = {"attention_bias": (None, True, False)}


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


def _read_activation(config: ConfigFile, key: str, default: str) -> Activation:
    """The MLP's activation under `key`."""
    name = config.text_or_none(key) or default
    if name not in _ACTIVATIONS:
        raise config.error(key, f"one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _read_llama_like(
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
        activation=_read_activation(config, "hidden_act", "silu"),
        gated_mlp=True,
        rope=rope,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        sliding_windows=sliding_windows or (None,) * num_layers,
        tied_embeddings=config.boolean("tie_word_embeddings", False),
    )


def _read_no_windows(config: ConfigFile) -> tuple[None, ...]:
    """Every layer sees everything. ConfigError if a key speaks of windows that would be used."""
    num_layers = config.positive_int("num_hidden_layers")
    if "sliding_attention" in _read_layer_types(config, num_layers):
        raise config.error("layer_types", "full_attention for every layer")
    config.value("max_window_layers")
    if config.has("sliding_window") and config.boolean("use_sliding_window", True):
        raise config.error("sliding_window", "null: this family has no sliding windows")
    return (None,) * num_layers


def _read_windows_of_all(config: ConfigFile) -> tuple[int | None, ...]:
    """Mistral's: `sliding_window` in every layer, or in those that `layer_types` has slide."""
    num_layers = config.positive_int("num_hidden_layers")
    types = _read_layer_types(config, num_layers)
    window = _read_window(config)
    if window is None and "sliding_attention" in types:
        raise _no_window(config)
    return tuple(window if kind == "sliding_attention" else None for kind in types) or (window,) * num_layers


def _read_windows_if_used(config: ConfigFile) -> tuple[int | None, ...]:
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


# ---------------------------------------------------------------------- Llama 1 to 3, and what says that it is one


_LLAMA_NAMES = WeightNames(
    base="model.",
    embedding="embed_tokens",
    final_norm="norm",
    layers="layers.{}.",
    attention_norm="input_layernorm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    output="self_attn.o_proj",
    mlp_norm="post_attention_layernorm",
    up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
    ignored=("rotary_emb.inv_freq",),
)


def _read_llama(config: ConfigFile) -> DecoderConfig:
    attention_bias = config.boolean("attention_bias", False)
    return _read_llama_like(
        config,
        default_positions=2048,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=config.boolean("mlp_bias", False),
        sliding_windows=_read_no_windows(config),
    )


# ---------------------------------------------------------------------- Mistral and Ministral


def _read_mistral(config: ConfigFile) -> DecoderConfig:
    """Llama with a sliding window, in every layer or in those that `layer_types` names.

    transformers loads a Mistral that has `layer_types` as a Ministral; without them the two are the same.
    """
    windows = _read_windows_of_all(config)
    return _read_llama_like(config, default_positions=131072, default_kv_heads=8, sliding_windows=windows)


# ---------------------------------------------------------------------- Qwen


def _read_qwen2(config: ConfigFile) -> DecoderConfig:
    """Qwen2 and Qwen2.5: Llama with biases on query, key and value, and a sliding window in some layers."""
    return _read_llama_like(
        config,
        default_positions=32768,
        default_kv_heads=32,
        qkv_bias=True,
        sliding_windows=_read_windows_if_used(config),
    )


def _read_qwen3(config: ConfigFile) -> DecoderConfig:
    """Qwen3 (dense): Qwen2 without its biases, with a norm over each query and key head."""
    attention_bias = config.boolean("attention_bias", False)
    decoder = _read_llama_like(
        config,
        default_positions=32768,
        default_kv_heads=32,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm=True,
        sliding_windows=_read_windows_if_used(config),
    )
    return replace(decoder, head_dim=config.int_or_none("head_dim") or _QWEN3_HEAD_DIM)


# ---------------------------------------------------------------------- GPT-2


_GPT2_NAMES = WeightNames(
    base="transformer.",
    embedding="wte",
    position_embedding="wpe",
    final_norm="ln_f",
    layers="h.{}.",
    attention_norm="ln_1",
    qkv=("attn.c_attn",),
    output="attn.c_proj",
    mlp_norm="ln_2",
    up=("mlp.c_fc",),
    down="mlp.c_proj",
    transposed=True,
    ignored=("attn.bias", "attn.masked_bias"),  # the causal mask, saved as a buffer by old versions
)


def _read_gpt2(config: ConfigFile) -> DecoderConfig:
    """Learned positions, LayerNorm, biases everywhere, and weights stored the other way around."""
    for key, needed in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("add_cross_attention", False),
    ):
        if config.boolean(key, needed) != needed:
            raise config.error(key, str(needed).lower())
    hidden_size = _read_size(config, "n_embd", "hidden_size")
    num_heads = _read_size(config, "n_head", "num_attention_heads")
    num_layers = _read_size(config, "n_layer", "num_hidden_layers")
    return DecoderConfig(
        vocab_size=config.positive_int("vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        intermediate_size=config.int_or_none("n_inner") or 4 * hidden_size,
        max_positions=_read_size(config, "n_positions", "max_position_embeddings", _GPT2_POSITIONS),
        norm="layer",
        norm_eps=config.number_or_none("layer_norm_epsilon") or 1e-5,
        activation=_read_activation(config, "activation_function", "gelu_new"),
        gated_mlp=False,
        rope=None,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        qk_norm=False,
        sliding_windows=(None,) * num_layers,
        tied_embeddings=config.boolean("tie_word_embeddings", True),
    )


def _read_size(config: ConfigFile, key: str, alias: str, default: int | None = None) -> int:
    """An integer of at least 1, under the family's own key or under the name that other families have for it."""
    own, other = config.int_or_none(key), config.int_or_none(alias)
    if own is not None and other is not None and own != other:
        raise config.error(alias, f"{own}, as {key} says, or no such key")
    return own or other or default or config.positive_int(key)


FAMILIES: tuple[Family, ...] = (
    Family("llama", "LlamaForCausalLM", _read_llama, _LLAMA_NAMES),
    Family("mistral", "MistralForCausalLM", _read_mistral, _LLAMA_NAMES, _WINDOW_IS_USED),
    Family("ministral", "MinistralForCausalLM", _read_mistral, _LLAMA_NAMES, _WINDOW_IS_USED),
    Family("qwen2", "Qwen2ForCausalLM", _read_qwen2, _LLAMA_NAMES, _BIASES_ARE_THERE),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        _read_qwen3,
        replace(_LLAMA_NAMES, query_norm="self_attn.q_norm", key_norm="self_attn.k_norm"),
    ),
    Family("gpt2", "GPT2LMHeadModel", _read_gpt2, _GPT2_NAMES),
)

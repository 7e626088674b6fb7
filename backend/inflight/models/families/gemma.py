"""Gemma 2, 3, 3n and 4, the text models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from inflight.checkpoint_config import ConfigFile
from inflight.json_values import is_list, is_object
from inflight.models.decoder_config import (
    AltUpConfig,
    DecoderConfig,
    ExpertsConfig,
    LayerInputsConfig,
    LayerSizes,
)
from inflight.models.families.family import (
    AltUpNames,
    ExpertNames,
    ExpertNormNames,
    ExpertStacks,
    Family,
    LaurelNames,
    LayerInputNames,
    MlpNames,
    NormNames,
    read_activation,
    read_layer_types,
    read_positions,
)
from inflight.models.families.llama import LLAMA_NAMES, NORMED_ATTENTION, read_llama_like
from inflight.models.neutral_keys import ANY, NeutralKeys
from inflight.models.rope import read_layer_type_ropes
from inflight.models.rope_config import RopeConfig

_HEAD_DIM = 256  # this and the following are defaults of absent keys
_QUERY_SCALAR = 256
_WINDOW = 4096
_KV_HEADS = 4
_KEYS_OF_EXPERTS4 = ("num_experts", "top_k_experts", "moe_intermediate_size")
_SLIDING_PATTERN = 6  # in Gemma 3, every sixth layer has no window
_THETAS = {"full_attention": 1e6, "sliding_attention": 1e4}  # Gemma 3's defaults

_NAMES = replace(
    LLAMA_NAMES,
    norms=NormNames(
        attention="input_layernorm",
        attention_post="post_attention_layernorm",
        mlp="pre_feedforward_layernorm",
        mlp_post="post_feedforward_layernorm",
    ),
)


def _read_gemma(
    config: ConfigFile,
    types: tuple[str, ...],
    ropes: tuple[RopeConfig, ...] | None = None,
) -> DecoderConfig:
    """Read the config of a model with scaled embeddings, and with norms before and after attention and MLP. The
    weights of the norms are stored minus 1."""
    hidden_size = config.positive_int("hidden_size")
    attention_bias = config.boolean("attention_bias", False)
    window = config.int_or_none("sliding_window") if "sliding_window" in config.values else _WINDOW
    if window is None and "sliding_attention" in types:
        raise config.error("sliding_window", "an integer >= 1, since some layers slide")
    activation = read_activation(config, "hidden_activation", "gelu_pytorch_tanh")
    return read_llama_like(
        config,
        default_kv_heads=_KV_HEADS,
        ropes=ropes,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        sliding_windows=tuple(window if kind == "sliding_attention" else None for kind in types),
        head_dim=config.int_or_none("head_dim") or _HEAD_DIM,
        activation=activation,
        norm_placement="around",
        norm_offset=1.0,
        embedding_scale=hidden_size**0.5,
        attention_scale=(config.number_or_none("query_pre_attn_scalar") or _QUERY_SCALAR) ** -0.5,
        attention_soft_cap=config.number_or_none("attn_logit_softcapping"),
        logits_soft_cap=config.number_or_none("final_logit_softcapping"),
        tied_embeddings=config.boolean("tie_word_embeddings", True),
    )


def _read_gemma2(config: ConfigFile) -> DecoderConfig:
    """Read the config of Gemma 2: windows in every other layer; capped scores and logits."""
    num_layers = config.positive_int("num_hidden_layers")
    alternating = tuple("full_attention" if index % 2 else "sliding_attention" for index in range(num_layers))
    decoder = _read_gemma(config, read_layer_types(config, num_layers) or alternating)
    caps = {"attention_soft_cap": "attn_logit_softcapping", "logits_soft_cap": "final_logit_softcapping"}
    absent = {
        field: default
        for (field, key), default in zip(caps.items(), (50.0, 30.0))
        if key not in config.values
    }
    return replace(decoder, **absent)


def _read_gemma3(config: ConfigFile) -> DecoderConfig:
    """Read the config of Gemma 3: windows with their own base of positions in most layers; query and key norms.

    `max_position_embeddings`, and its default, are the length after linear scaling.
    """
    if config.boolean("use_bidirectional_attention", False):
        raise config.error("use_bidirectional_attention", "false: attention here is causal")
    num_layers = config.positive_int("num_hidden_layers")
    patterns = [config.int_or_none(key) for key in ("sliding_window_pattern", "_sliding_window_pattern")]
    every = next(filter(None, patterns), _SLIDING_PATTERN)
    by_pattern = tuple(
        "sliding_attention" if (index + 1) % every else "full_attention" for index in range(num_layers)
    )
    types = read_layer_types(config, num_layers) or by_pattern
    ropes = read_layer_type_ropes(config, read_positions(config), _THETAS)
    decoder = _read_gemma(config, types, tuple(ropes[kind] for kind in types))
    return replace(decoder, qk_norm="heads")


# ---------------------------------------------------------------------- Gemma 4

_NAMES4 = replace(
    _NAMES,
    attention=NORMED_ATTENTION,
    experts=ExpertNames(
        router="router.proj",
        prefix="experts.{}.",
        each=MlpNames(up=("gate_proj", "up_proj"), down="down_proj"),
        stacks=ExpertStacks(up="experts.gate_up_proj", down="experts.down_proj"),
        shared=_NAMES.mlp,
        norms=ExpertNormNames(
            router="router.scale",
            before="pre_feedforward_layernorm_2",
            after="post_feedforward_layernorm_2",
            shared_after="post_feedforward_layernorm_1",
        ),
        scales="router.per_expert_scale",
    ),
    layer_inputs=LayerInputNames(
        embedding="embed_tokens_per_layer",
        projection="per_layer_model_projection",
        norm="per_layer_projection_norm",
        gate="per_layer_input_gate",
        output="per_layer_projection",
        output_norm="post_per_layer_input_norm",
    ),
    layer_scale="layer_scalar",
)
# Defaults of absent keys.
_HEAD_DIM4, _GLOBAL_HEAD_DIM4, _WINDOW4, _INPUT_SIZE4, _VOCAB_SIZE4 = 256, 512, 512, 256, 262144
_WINDOW4_UNIFIED = 1024
_ROPES4: dict[str, Any] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


def _read_gemma4(config: ConfigFile) -> DecoderConfig:
    """Read the config of Gemma 4: full layers with wider and fewer heads, whose keys may be values.

    The last layers may read an earlier layer's keys and values; layers may have per-layer embeddings, and experts
    besides the MLP.
    """
    if config.text_or_none("use_bidirectional_attention") not in (None, "vision"):
        raise config.error("use_bidirectional_attention", "null or vision: attention here is causal")
    num_layers = config.positive_int("num_hidden_layers")
    types = _read_types4(config, num_layers)
    if not config.has("rope_parameters"):
        config = config.with_values({"rope_parameters": _ROPES4})
    ropes = read_layer_type_ropes(config, read_positions(config), _THETAS)
    window = config.int_or_none("sliding_window") if config.has("sliding_window") else _WINDOW4
    bias = config.boolean("attention_bias", False)
    kv_layers = _read_kv_layers4(config, types)
    sizes = _read_sizes4(config, types, kv_layers)
    decoder = read_llama_like(
        config,
        default_kv_heads=_KV_HEADS,
        ropes=tuple(ropes[kind] for kind in types),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="heads",
        value_norm=True,
        sliding_windows=tuple(window if kind == "sliding_attention" else None for kind in types),
        activation=read_activation(config, "hidden_activation", "gelu_pytorch_tanh"),
        norm_placement="around",
        embedding_scale=config.positive_int("hidden_size") ** 0.5,
        attention_scale=1.0,
        logits_soft_cap=config.number_or_none("final_logit_softcapping"),
        tied_embeddings=config.boolean("tie_word_embeddings", True),
        experts=_read_experts4(config, num_layers),
        layer_scales=True,
        layer_inputs=_read_inputs4(config),
        head_dim=max(each.head_dim for each in sizes),
        num_kv_heads=max(each.num_kv_heads for each in sizes),
    )
    are_same = config.boolean("attention_k_eq_v", False)
    return replace(
        decoder,
        intermediate_size=max(each.intermediate_size for each in sizes),
        layer_sizes=sizes,
        keys_are_values=tuple(kind == "full_attention" for kind in types) if are_same else (),
        kv_layers=kv_layers,
    )


def _read_gemma4_unified(config: ConfigFile) -> DecoderConfig:
    """Read the config of Gemma 4 12B: Gemma 4 without per-layer embeddings and experts."""
    if config.boolean("enable_moe_block", False):
        raise config.error("enable_moe_block", "false: this family has no experts")
    if config.has("hidden_size_per_layer_input") and config.count("hidden_size_per_layer_input"):
        raise config.error("hidden_size_per_layer_input", "0: this family has no per-layer embeddings")
    window = config.int_or_none("sliding_window") or _WINDOW4_UNIFIED
    return _read_gemma4(config.with_values({"hidden_size_per_layer_input": 0, "sliding_window": window}))


def _read_types4(config: ConfigFile, num_layers: int) -> tuple[str, ...]:
    """Return the types of layers: without the key, every sixth has full attention; the last one always has."""
    types = read_layer_types(config, num_layers) or tuple(
        "full_attention" if (layer + 1) % _SLIDING_PATTERN == 0 else "sliding_attention"
        for layer in range(num_layers)
    )
    return (*types[:-1], "full_attention")


def _read_kv_layers4(config: ConfigFile, types: tuple[str, ...]) -> tuple[int, ...]:
    """Return the layer whose keys and values each layer reads; empty if every layer has its own.

    Each of the last `num_kv_shared_layers` layers reads from the last layer before all of them that has its type.
    """
    num_shared = config.count("num_kv_shared_layers", 0) if config.has("num_kv_shared_layers") else 0
    if num_shared >= len(types):
        raise config.error("num_kv_shared_layers", f"an integer >= 0, at most {len(types) - 1}")
    own = types[: len(types) - num_shared]
    if missing := set(types) - set(own):
        raise config.error(
            "num_kv_shared_layers", f"so many that a layer of type {min(missing)} has its own keys and values"
        )
    last = {kind: layer for layer, kind in enumerate(own)}
    return (*range(len(own)), *(last[kind] for kind in types[len(own) :])) if num_shared else ()


def _read_sizes4(
    config: ConfigFile, types: tuple[str, ...], kv_layers: tuple[int, ...]
) -> tuple[LayerSizes, ...]:
    """Return the sizes of each layer. Heads depend on the layer's type; in layers that read another layer's
    keys and values, the MLP may be twice as wide."""
    heads = {
        "sliding_attention": (
            config.int_or_none("num_key_value_heads") or _KV_HEADS,
            config.int_or_none("head_dim") or _HEAD_DIM4,
        )
    }
    heads["full_attention"] = _read_full_heads4(config, types, *heads["sliding_attention"])
    num_heads = config.positive_int("num_attention_heads")
    if any(num_heads % heads[kind][0] for kind in types):
        keys = "per_layer_config", "num_global_key_value_heads"
        key = next(filter(config.has, keys), "num_key_value_heads")
        raise config.error(key, f"divisors of num_attention_heads, {num_heads}")
    inner = config.positive_int("intermediate_size")
    wide = 2 * inner if config.boolean("use_double_wide_mlp", False) else inner
    shared = [kv_layers[layer] != layer if kv_layers else False for layer in range(len(types))]
    return tuple(
        LayerSizes(*heads[kind], wide if is_shared else inner)
        for kind, is_shared in zip(types, shared, strict=True)
    )


def _read_full_heads4(
    config: ConfigFile, types: tuple[str, ...], kv_heads: int, head_dim: int
) -> tuple[int, int]:
    """Return the number and width of KV heads in layers with full attention, which configs name in two ways.

    transformers 5 writes `per_layer_config`, and then ignores the two other keys. null counts as an empty object.
    """
    wide = config.int_or_none("global_head_dim") or _GLOBAL_HEAD_DIM4
    few = config.int_or_none("num_global_key_value_heads")
    of_layers: Any = config.value("per_layer_config") if config.has("per_layer_config") else {}
    if "per_layer_config" not in config.values:
        return (few if few and config.boolean("attention_k_eq_v", False) else kv_heads), wide
    expected = "head_dim and num_key_value_heads of full_attention layers, the same for all of them"
    if not is_object(of_layers):
        raise config.error("per_layer_config", expected)
    found = {int(key): value for key, value in of_layers.items() if key.isdecimal() and is_object(value)}
    full = {layer for layer, kind in enumerate(types) if kind == "full_attention"}
    forms = [found.get(layer, {}) for layer in full]
    first = forms[0]
    is_read = set(first) <= {"head_dim", "num_key_value_heads"} and all(
        type(size) is int and size > 0 for size in first.values()
    )
    if (
        len(found) != len(of_layers)
        or set(found) - full
        or any(each != first for each in forms)
        or not is_read
    ):
        raise config.error("per_layer_config", expected)
    return first.get("num_key_value_heads", kv_heads), first.get("head_dim", head_dim)


def _read_experts4(config: ConfigFile, num_layers: int) -> ExpertsConfig | None:
    """Return the experts that every layer has besides the MLP; None if there are none."""
    if not config.boolean("enable_moe_block", False):
        return None
    if missing := [key for key in _KEYS_OF_EXPERTS4 if not config.has(key)]:
        raise config.error(
            "enable_moe_block", f"false, or the keys {', '.join(_KEYS_OF_EXPERTS4)}: {missing[0]} is missing"
        )
    count, per_token, inner = (config.positive_int(key) for key in _KEYS_OF_EXPERTS4)
    if per_token > count:
        raise config.error("top_k_experts", f"at most num_experts, which is {count}")
    if config.boolean("use_double_wide_mlp", False) and config.value("num_kv_shared_layers"):
        raise config.error("use_double_wide_mlp", "false beside experts and num_kv_shared_layers")
    return ExpertsConfig(
        count=count,
        num_per_token=per_token,
        intermediate_size=inner,
        is_normalized=True,
        layers=(True,) * num_layers,
        shared_intermediate_size=config.positive_int("intermediate_size"),
        has_norms=True,
        has_expert_scales=True,
    )


def _read_inputs4(config: ConfigFile) -> LayerInputsConfig | None:
    """Return the per-layer embeddings; None if their width is 0."""
    size = _INPUT_SIZE4
    if config.has("hidden_size_per_layer_input"):
        size = config.count("hidden_size_per_layer_input")
    vocab_size = config.int_or_none("vocab_size_per_layer_input") or _VOCAB_SIZE4
    if not size:
        return None
    if vocab_size < config.positive_int("vocab_size"):
        raise config.error("vocab_size_per_layer_input", "at least vocab_size, a row for every token")
    virtual_id = config.count("pad_token_id", 0) if config.has("pad_token_id") else 0
    if virtual_id >= vocab_size:
        raise config.error("pad_token_id", f"an id below vocab_size_per_layer_input, {vocab_size}")
    return LayerInputsConfig(size, vocab_size, virtual_id)


# ---------------------------------------------------------------------- Gemma 3n

_NAMES3N = replace(
    _NAMES,
    attention=NORMED_ATTENTION,
    layer_inputs=_NAMES4.layer_inputs,
    altup=AltUpNames(
        split="altup_projections.{}",
        join="altup_unembed_projections.{}",
        router="altup.modality_router",
        router_norm="altup.router_norm",
        prediction="altup.prediction_coefs",
        correction="altup.correction_coefs",
        output_scale="altup.correct_output_scale",
    ),
    laurel=LaurelNames(down="laurel.linear_left", up="laurel.linear_right", norm="laurel.post_laurel_norm"),
)
_FULL_EVERY3N = 5  # without `layer_types`, every fifth layer has no window
_NUM_SPARSE3N, _SPARSITY3N = 10, 0.95  # without `activation_sparsity_pattern`, in models with more layers
# Defaults of absent keys.
_DEFAULTS3N: dict[str, Any] = {
    "num_kv_shared_layers": 15,
    "sliding_window": 512,
    "final_logit_softcapping": 30.0,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
    "altup_num_inputs": 4,
    "altup_active_idx": 0,
    "laurel_rank": 64,
}
_KV_HEADS3N = 2


def _read_gemma3n(config: ConfigFile) -> DecoderConfig:
    """Read the config of Gemma 3n: several residual streams, a low-rank branch beside attention, per-layer
    embeddings, and sparse gates in the first MLPs.

    The last layers read an earlier layer's keys and values.
    """
    config = config.with_values(
        {key: value for key, value in _DEFAULTS3N.items() if key not in config.values}
    )
    num_layers = config.positive_int("num_hidden_layers")
    types = read_layer_types(config, num_layers) or tuple(
        "sliding_attention" if (layer + 1) % _FULL_EVERY3N else "full_attention"
        for layer in range(num_layers)
    )
    ropes = read_layer_type_ropes(config, read_positions(config), _THETAS)
    window, bias = config.positive_int("sliding_window"), config.boolean("attention_bias", False)
    widths = _read_widths3n(config, num_layers)
    decoder = read_llama_like(
        config.with_values({"intermediate_size": max(widths)}),
        default_kv_heads=_KV_HEADS3N,
        ropes=tuple(ropes[kind] for kind in types),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="heads",
        value_norm=True,
        sliding_windows=tuple(window if kind == "sliding_attention" else None for kind in types),
        head_dim=config.int_or_none("head_dim") or _HEAD_DIM,
        activation=read_activation(config, "hidden_activation", "gelu_pytorch_tanh"),
        norm_placement="around",
        embedding_scale=config.positive_int("hidden_size") ** 0.5,
        attention_scale=1.0,
        logits_soft_cap=config.number_or_none("final_logit_softcapping"),
        tied_embeddings=config.boolean("tie_word_embeddings", True),
        kv_layers=_read_kv_layers4(config, types),
        altup=_read_altup(config),
        laurel_rank=config.positive_int("laurel_rank"),
        gate_sparsity=_read_sparsity3n(config, num_layers),
        # In transformers too, tokens without a row of the table have the row of token 0.
        layer_inputs=LayerInputsConfig(
            config.positive_int("hidden_size_per_layer_input"),
            config.positive_int("vocab_size_per_layer_input"),
            virtual_id=0,
        ),
    )
    if len(set(widths)) == 1:
        return decoder
    sizes = tuple(LayerSizes(decoder.num_kv_heads, decoder.head_dim, width) for width in widths)
    return replace(decoder, layer_sizes=sizes)


def _read_widths3n(config: ConfigFile, num_layers: int) -> tuple[int, ...]:
    """Return the inner width of each layer's MLP, from a list or a number for all."""
    widths: Any = config.value("intermediate_size")
    if type(widths) is int:
        widths = [widths] * num_layers
    is_valid = is_list(widths) and len(widths) == num_layers
    if not is_valid or not all(type(width) is int and width > 0 for width in widths):
        raise config.error(
            "intermediate_size", f"an integer >= 1, or one for each of num_hidden_layers, {num_layers}"
        )
    return tuple(widths)


def _read_sparsity3n(config: ConfigFile, num_layers: int) -> tuple[float, ...]:
    """Return the expected fraction of zeros among the gates of each layer's MLP."""
    if not config.has("activation_sparsity_pattern"):
        num_sparse = _NUM_SPARSE3N if num_layers > _NUM_SPARSE3N else 0
        return (_SPARSITY3N,) * num_sparse + (0.0,) * (num_layers - num_sparse)
    found: Any = config.value("activation_sparsity_pattern")
    is_valid = is_list(found) and len(found) == num_layers
    if not is_valid or not all(type(each) in (int, float) and 0 <= each < 1 for each in found):
        raise config.error(
            "activation_sparsity_pattern",
            f"a number >= 0 and < 1 for each of num_hidden_layers, {num_layers}",
        )
    return tuple(map(float, found))


def _read_altup(config: ConfigFile) -> AltUpConfig:
    """Read the configuration of AltUp's residual streams."""
    num_streams, active = config.positive_int("altup_num_inputs"), config.count("altup_active_idx")
    if num_streams < 2:
        raise config.error("altup_num_inputs", "an integer >= 2")
    if active >= num_streams:
        raise config.error("altup_active_idx", f"an integer >= 0 and < altup_num_inputs, {num_streams}")
    return AltUpConfig(num_streams, active, config.boolean("altup_correct_scale", True))


# Older names of keys, which transformers does not read.
_NEUTRAL: NeutralKeys = {"hidden_act": ANY, "sliding_window_size": ANY}
# Keys that only matter for training, and one that transformers does not read, because queries are not scaled.
_NEUTRAL3N: NeutralKeys = {
    **_NEUTRAL,
    "altup_coef_clip": ANY,
    "altup_lr_multiplier": ANY,
    "query_pre_attn_scalar": ANY,
}

GEMMA_FAMILIES = (
    Family("gemma2", "Gemma2ForCausalLM", _read_gemma2, _NAMES, _NEUTRAL),
    Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        _read_gemma3,
        replace(_NAMES, attention=NORMED_ATTENTION),
        _NEUTRAL,
    ),
    Family("gemma3n_text", "Gemma3nForCausalLM", _read_gemma3n, _NAMES3N, _NEUTRAL3N),
    # Keys of experts are read if enable_moe_block is true.
    Family("gemma4_text", "Gemma4ForCausalLM", _read_gemma4, _NAMES4, dict.fromkeys(_KEYS_OF_EXPERTS4, ANY)),
    Family(
        "gemma4_unified_text",
        "Gemma4UnifiedForCausalLM",
        _read_gemma4_unified,
        _NAMES4,
        dict.fromkeys(_KEYS_OF_EXPERTS4, ANY),
    ),
)

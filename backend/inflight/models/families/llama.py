"""Llama, and families that differ little from it and have the same names of keys and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from inflight.checkpoint_config import ConfigFile
from inflight.json_values import is_list
from inflight.models.decoder_config import AttentionTemperature, DecoderConfig, QkNorm
from inflight.models.families.family import (
    WINDOWS_UNUSED,
    AttentionNames,
    Family,
    MlpNames,
    NormNames,
    WeightNames,
    derived_head_dim,
    no_window,
    read_activation,
    read_head_dim,
    read_layer_types,
    read_longest,
    read_no_windows,
    read_positions,
    read_windows_if_used,
    read_windows_of_all,
)
from inflight.models.neutral_keys import ANY, NeutralKeys
from inflight.models.rope import read_layer_type_ropes, read_rope, section_key
from inflight.models.rope_config import RopeConfig
from inflight.positions import MINISTRAL3_SCALING

_GROWTH = "llama_4_scaling_beta"
_QWEN3_HEAD_DIM = _MINISTRAL3_HEAD_DIM = 128  # if the key is absent
# Any value is accepted, because in these families only `sliding_window` matters.
_WINDOW_IS_USED: NeutralKeys = {"use_sliding_window": (None, True, False)}
# Any value is accepted, because in this family query, key and value always have biases.
_BIASES_ARE_THERE: NeutralKeys = {"attention_bias": (None, True, False)}
_QWEN2_NEUTRAL: NeutralKeys = {
    **_BIASES_ARE_THERE,
    **WINDOWS_UNUSED,
    "dual_chunk_attention_config": ANY,  # of other implementations, for longer sequences
}
_NO_WINDOW_LAYERS: NeutralKeys = {"max_window_layers": ANY}  # a key of Qwen


def read_llama_like(
    config: ConfigFile,
    *,
    default_kv_heads: int | None = None,
    default_theta: float = 10000.0,
    default_part: float | None = None,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: QkNorm | None = None,
    ropes: tuple[RopeConfig, ...] | None = None,
    sliding_windows: tuple[int | None, ...] | None = None,
    **changes: Any,
) -> DecoderConfig:
    """Read a config with Llama's keys: RMSNorm, rotary positions and a gated MLP.

    Args:
        config: The whole file.
        default_kv_heads: transformers' default of `num_key_value_heads`; None: the number of query heads. In every
            family, null in the file means the number of query heads too.
        default_theta: transformers' default of `rope_theta`.
        default_part: Rotated fraction of a head if the key is absent; None: all dimensions are rotated.
        ropes: Rotary positions of each layer; None: read from the file, the same for all layers.
        changes: Other fields of the DecoderConfig.
    """
    num_layers = config.positive_int("num_hidden_layers")
    num_heads = config.positive_int("num_attention_heads")
    hidden_size = config.positive_int("hidden_size")
    kv_heads_if_absent = num_heads if "num_key_value_heads" in config.values else default_kv_heads
    max_positions = read_positions(config)
    ropes = ropes or (read_rope(config, max_positions, default_theta, default_part),) * num_layers
    decoder = DecoderConfig(
        vocab_size=config.positive_int("vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=config.int_or_none("num_key_value_heads") or kv_heads_if_absent or num_heads,
        head_dim=config.int_or_none("head_dim") or derived_head_dim(config, hidden_size, num_heads),
        intermediate_size=config.positive_int("intermediate_size"),
        max_positions=read_longest(config),
        norm="rms",
        norm_eps=config.number_or_none("rms_norm_eps") or 1e-6,
        activation=read_activation(config, "hidden_act", "silu"),
        gated_mlp=True,
        ropes=ropes,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        sliding_windows=sliding_windows or (None,) * num_layers,
        tied_embeddings=config.boolean("tie_word_embeddings", False),
    )
    return replace(decoder, **changes)


LLAMA_ATTENTION = AttentionNames(
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), output="self_attn.o_proj"
)
LLAMA_NAMES = WeightNames(
    base="model.",
    embedding="embed_tokens",
    final_norm="norm",
    layers="layers.{}.",
    norms=NormNames(attention="input_layernorm", mlp="post_attention_layernorm"),
    attention=LLAMA_ATTENTION,
    mlp=MlpNames(up=("mlp.gate_proj", "mlp.up_proj"), down="mlp.down_proj"),
    ignored=("rotary_emb.inv_freq",),
)
FUSED_LLAMA_NAMES = replace(
    LLAMA_NAMES,
    attention=replace(LLAMA_ATTENTION, qkv=("self_attn.qkv_proj",)),
    mlp=MlpNames(up=("mlp.gate_up_proj",), down="mlp.down_proj", fused=True),
)
"""Llama's names where one module is query, key and value, and one is gate and up."""
NORMED_ATTENTION = replace(LLAMA_ATTENTION, query_norm="self_attn.q_norm", key_norm="self_attn.k_norm")
"""Llama's attention with norms over queries and keys."""


def in_interleaved_pairs(decoder: DecoderConfig) -> DecoderConfig:
    """Return the decoder with rotary positions that rotate dimensions 2i and 2i + 1 together."""
    return replace(decoder, ropes=tuple(rope and replace(rope, interleaved=True) for rope in decoder.ropes))


def _read_llama(config: ConfigFile) -> DecoderConfig:
    attention_bias = config.boolean("attention_bias", False)
    return read_llama_like(
        config,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=config.boolean("mlp_bias", False),
        sliding_windows=read_no_windows(config),
    )


# ---------------------------------------------------------------------- Mistral and Ministral


def _read_mistral(config: ConfigFile) -> DecoderConfig:
    """Read the config of Mistral: Llama with a sliding window in every layer, or in the layers that `layer_types`
    names.

    transformers loads a Mistral with `layer_types` as a Ministral; without `layer_types` the families do not
    differ.
    """
    windows = read_windows_of_all(config)
    return read_llama_like(config, default_kv_heads=8, sliding_windows=windows)


def take_temperature(
    config: ConfigFile, default: Mapping[str, Any], also: tuple[str, ...] = ()
) -> tuple[ConfigFile, AttentionTemperature | None]:
    """Return two values: a Mistral AI config without the keys of the attention temperature, and this temperature,
    which is None if it does not depend on the position.

    `default`: `rope_parameters` of files that have none. `also`: further keys of `rope_parameters` to leave out.
    """
    key = section_key(config)
    if not config.has(key):
        config = config.with_values({key: default})
    scaling = config.child(key)
    growth: Any = scaling.value(_GROWTH)
    if type(growth) not in (int, float) or not 0 <= growth < float("inf"):
        raise scaling.error(_GROWTH, "a number >= 0, the growth of queries with their position")
    original = "original_max_position_embeddings"  # the one beside the object counts, if there are two
    interval = (config if config.has(original) else scaling).positive_int(original)
    # max_position_embeddings has no effect in this object.
    outside = (_GROWTH, "max_position_embeddings", *also)
    config = config.with_values({key: {k: v for k, v in scaling.values.items() if k not in outside}})
    return config, AttentionTemperature(growth, interval, 0, True) if growth else None


def _read_ministral3(config: ConfigFile) -> DecoderConfig:
    """Read the config of Ministral 3: Mistral without windows by layer, YaRN, and a temperature of attention."""
    config, temperature = take_temperature(config, MINISTRAL3_SCALING)
    return read_llama_like(
        config,
        default_kv_heads=8,
        default_theta=1e6,
        attention_temperature=temperature,
        norm_eps=config.number_or_none("rms_norm_eps") or 1e-5,
        head_dim=config.int_or_none("head_dim") or _MINISTRAL3_HEAD_DIM,
        sliding_windows=(config.int_or_none("sliding_window"),) * config.positive_int("num_hidden_layers"),
    )


# ---------------------------------------------------------------------- Qwen


def _read_qwen2(config: ConfigFile) -> DecoderConfig:
    """Read the config of Qwen2 or 2.5: Llama with biases on query, key, value, and windows in some layers."""
    return read_llama_like(
        config,
        default_kv_heads=32,
        qkv_bias=True,
        sliding_windows=read_windows_if_used(config),
    )


def _read_qwen3(config: ConfigFile) -> DecoderConfig:
    """Read the config of Qwen3 (dense): Qwen2 without biases, with a norm over each query and key head."""
    attention_bias = config.boolean("attention_bias", False)
    decoder = read_llama_like(
        config,
        default_kv_heads=32,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm="heads",
        sliding_windows=read_windows_if_used(config),
    )
    return replace(decoder, head_dim=config.int_or_none("head_dim") or _QWEN3_HEAD_DIM)


# ---------------------------------------------------------------------- Arcee, Apertus and Seed-OSS


def _read_arcee(config: ConfigFile) -> DecoderConfig:
    """Read the config of Arcee: Llama with squared relu and without a gate in the MLP."""
    attention_bias = config.boolean("attention_bias", False)
    return read_llama_like(
        config,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=config.boolean("mlp_bias", False),
        norm_eps=config.number_or_none("rms_norm_eps") or 1e-5,
        activation=read_activation(config, "hidden_act", "relu2"),
        gated_mlp=False,
    )


# transformers' `rope_parameters` of an Apertus that has none.
_APERTUS_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 12e6,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def _read_apertus(config: ConfigFile) -> DecoderConfig:
    """Read the config of Apertus: Arcee with xIELU, whose parameters are learned, and norms over heads."""
    attention_bias = config.boolean("attention_bias", False)
    if config.value("hidden_act") not in (None, "xielu"):
        raise config.error("hidden_act", "xielu")
    if not config.has("rope_parameters") and not config.value("rope_scaling"):
        config = config.with_values({"rope_parameters": _APERTUS_ROPE})
    return read_llama_like(
        config.with_values({"hidden_act": None}),
        default_theta=12e6,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm="heads",
        norm_eps=config.number_or_none("rms_norm_eps") or 1e-5,
        activation="xielu",
        gated_mlp=False,
    )


_SEED_OSS_HEAD_DIM = 128  # if the key is absent


def _read_seed_oss(config: ConfigFile) -> DecoderConfig:
    """Read the config of Seed-OSS: Llama with a key for the biases of query, key and value, and one for the
    output's."""
    return read_llama_like(
        config,
        default_kv_heads=8,
        qkv_bias=config.boolean("attention_bias", True),
        output_bias=config.boolean("attention_out_bias", False),
        mlp_bias=config.boolean("mlp_bias", False),
        head_dim=read_head_dim(config, _SEED_OSS_HEAD_DIM),
    )


# ---------------------------------------------------------------------- Phi-3 and Phi-4


def _read_phi3(config: ConfigFile) -> DecoderConfig:
    """Read the config of Phi-3: Llama with fused qkv, fused gate and up, and LongRoPE."""
    window = config.int_or_none("sliding_window")
    num_layers = config.positive_int("num_hidden_layers")
    return read_llama_like(
        config,
        default_part=1.0,
        sliding_windows=(window,) * num_layers,
        norm_eps=config.number_or_none("rms_norm_eps") or 1e-5,
    )


# ---------------------------------------------------------------------- OLMo 2 and 3, EXAONE 4


_OLMO2_NAMES = replace(
    LLAMA_NAMES,
    norms=NormNames(attention_post="post_attention_layernorm", mlp_post="post_feedforward_layernorm"),
    attention=NORMED_ATTENTION,
)


def _read_olmo2(config: ConfigFile) -> DecoderConfig:
    """Read the config of OLMo 2: norms on attention's and the MLP's outputs, over all query and all key heads."""
    attention_bias = config.boolean("attention_bias", False)
    return read_llama_like(
        config,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm="projection",
        norm_placement="after",
        norm_eps=config.number_or_none("rms_norm_eps") or 1e-5,
    )


_OLMO3_THETAS = {"full_attention": 5e5, "sliding_attention": 5e5}  # if the keys are absent
_WINDOW = 4096  # if the key is absent
_PATTERN = 4  # if the key is absent: every fourth layer has no window


def _read_olmo3(config: ConfigFile) -> DecoderConfig:
    """Read the config of OLMo 3: OLMo 2 with windows in most layers, whose rotary embedding is not scaled."""
    attention_bias = config.boolean("attention_bias", False)
    types = read_layer_types(config, config.positive_int("num_hidden_layers")) or _by_pattern(
        config, _PATTERN
    )
    if config.has("rope_local_base_freq"):
        raise config.error("rope_local_base_freq", "no such key in this family")
    ropes = read_layer_type_ropes(config, read_positions(config), _OLMO3_THETAS)
    window = config.int_or_none("sliding_window") if "sliding_window" in config.values else _WINDOW
    if window is None and "sliding_attention" in types:
        raise no_window(config)
    return read_llama_like(
        config,
        ropes=tuple(ropes[kind] for kind in types),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm="projection",
        norm_placement="after",
        norm_eps=config.number_or_none("rms_norm_eps") or 1e-5,
        sliding_windows=tuple(window if kind == "sliding_attention" else None for kind in types),
    )


def _by_pattern(config: ConfigFile, every: int) -> tuple[str, ...]:
    """Return the types of layers in a model where every `every`-th layer has no window."""
    layers = range(1, config.positive_int("num_hidden_layers") + 1)
    return tuple("sliding_attention" if index % every else "full_attention" for index in layers)


def _read_exaone4(config: ConfigFile) -> DecoderConfig:
    """Read the config of EXAONE 4: norms on outputs and heads; in models with windows, layers without a window
    have no positions."""
    num_layers = config.positive_int("num_hidden_layers")
    window = config.int_or_none("sliding_window") if "sliding_window" in config.values else _WINDOW
    types = read_layer_types(config, num_layers)
    if window is None and "sliding_attention" in types:
        raise no_window(config)
    if not types and window is not None:
        is_given = "sliding_window_pattern" in config.values
        types = _by_pattern(config, config.positive_int("sliding_window_pattern") if is_given else _PATTERN)
    decoder = read_llama_like(
        config,
        default_kv_heads=32,
        qk_norm="heads",
        norm_placement="after",
        norm_eps=config.number_or_none("rms_norm_eps") or 1e-5,
    )
    if window is None:
        return decoder
    slides = [kind == "sliding_attention" for kind in types]
    return replace(
        decoder,
        sliding_windows=tuple(window if sliding else None for sliding in slides),
        ropes=tuple(rope if sliding else None for rope, sliding in zip(decoder.ropes, slides, strict=True)),
    )


# ---------------------------------------------------------------------- SmolLM 3


_SMOLLM3_INTERVAL = 4  # if `no_rope_layer_interval` is absent: every fourth layer has no positions


def _read_smollm3(config: ConfigFile) -> DecoderConfig:
    """Read the config of SmolLM3: Llama with some layers that have no position embeddings (NoPE)."""
    num_layers = config.positive_int("num_hidden_layers")
    rotates = _read_rotating_layers(config, num_layers)
    attention_bias = config.boolean("attention_bias", False)
    decoder = read_llama_like(
        config,
        default_kv_heads=4,
        default_theta=2e6,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=config.boolean("mlp_bias", False),
        sliding_windows=_read_smollm3_windows(config, num_layers, rotates),
        tied_embeddings=config.boolean("tie_word_embeddings", True),
    )
    ropes = tuple(rope if rotated else None for rope, rotated in zip(decoder.ropes, rotates, strict=True))
    return replace(decoder, ropes=ropes)


def _read_rotating_layers(config: ConfigFile, num_layers: int) -> tuple[bool, ...]:
    """Return whether each layer has rotary positions: 1 or true in `no_rope_layers`, despite the key's name."""
    interval = config.int_or_none("no_rope_layer_interval") or _SMOLLM3_INTERVAL
    listed = config.value("no_rope_layers")
    if listed is None:
        return tuple((index + 1) % interval != 0 for index in range(num_layers))
    if not is_list(listed) or len(listed) != num_layers or any(one not in (0, 1) for one in listed):
        raise config.error("no_rope_layers", f"0 or 1 for each of num_hidden_layers, {num_layers}")
    return tuple(bool(one) for one in listed)


def _read_smollm3_windows(
    config: ConfigFile, num_layers: int, rotates: tuple[bool, ...]
) -> tuple[int | None, ...]:
    """Return windows, if used, for the layers that `layer_types` names; without it, for the layers without
    positions."""
    types, window = read_layer_types(config, num_layers), config.int_or_none("sliding_window")
    if not config.boolean("use_sliding_window", False) or window is None:
        if "sliding_attention" in types:
            raise config.error("use_sliding_window", "true, since layer_types has sliding_attention")
        return (None,) * num_layers
    slides = [kind == "sliding_attention" for kind in types] or [not rotated for rotated in rotates]
    return tuple(window if sliding else None for sliding in slides)


LLAMA_FAMILIES = (
    Family("llama", "LlamaForCausalLM", _read_llama, LLAMA_NAMES, _NO_WINDOW_LAYERS),
    Family("mistral", "MistralForCausalLM", _read_mistral, LLAMA_NAMES, _WINDOW_IS_USED),
    Family("ministral", "MinistralForCausalLM", _read_mistral, LLAMA_NAMES, _WINDOW_IS_USED),
    Family("ministral3", "Ministral3ForCausalLM", _read_ministral3, LLAMA_NAMES),
    Family("qwen2", "Qwen2ForCausalLM", _read_qwen2, LLAMA_NAMES, _QWEN2_NEUTRAL),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        _read_qwen3,
        replace(LLAMA_NAMES, attention=NORMED_ATTENTION),
        WINDOWS_UNUSED,
    ),
    Family(
        "phi3",
        "Phi3ForCausalLM",
        _read_phi3,
        FUSED_LLAMA_NAMES,
        {"full_attn_mod": (None, 1), "interpolate_factor": (None, 1)},
    ),
    Family(
        "arcee",
        "ArceeForCausalLM",
        _read_arcee,
        replace(LLAMA_NAMES, mlp=MlpNames(up=("mlp.up_proj",), down="mlp.down_proj")),
    ),
    Family(
        "apertus",
        "ApertusForCausalLM",
        _read_apertus,
        replace(
            LLAMA_NAMES,
            norms=NormNames(attention="attention_layernorm", mlp="feedforward_layernorm"),
            attention=NORMED_ATTENTION,
            mlp=MlpNames(up=("mlp.up_proj",), down="mlp.down_proj"),
            activation="mlp.act_fn.",
        ),
        {"qk_norm": (None, True)},
    ),
    Family("seed_oss", "SeedOssForCausalLM", _read_seed_oss, LLAMA_NAMES),
    Family("olmo2", "Olmo2ForCausalLM", _read_olmo2, _OLMO2_NAMES),
    Family("olmo3", "Olmo3ForCausalLM", _read_olmo3, _OLMO2_NAMES),
    Family("exaone4", "Exaone4ForCausalLM", _read_exaone4, _OLMO2_NAMES, {"sliding_window_pattern": ANY}),
    Family("smollm3", "SmolLM3ForCausalLM", _read_smollm3, LLAMA_NAMES, _NO_WINDOW_LAYERS),
)

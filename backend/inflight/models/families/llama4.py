"""Llama 4: attention in chunks, some layers without position embeddings, and experts with weighted inputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from inflight.checkpoint_config import ConfigFile
from inflight.json_values import is_list
from inflight.models.decoder_config import AttentionTemperature, DecoderConfig, ExpertsConfig
from inflight.models.families.family import (
    ExpertNames,
    ExpertStacks,
    Family,
    MlpNames,
    read_head_dim,
    read_size,
)
from inflight.models.families.llama import LLAMA_NAMES, in_interleaved_pairs, read_llama_like

# Values of keys that are absent.
_KV_HEADS = 8
_THETA = 5e5
_HEAD_DIM = 128
_EXPERTS = 16
_INNER, _DENSE_INNER = 8192, 16384
_NO_ROPE_INTERVAL = 4
_CHUNK = 8192
_INTERVAL, _GROWTH = 8192, 0.1  # fields of `AttentionTemperature`

_CHUNKED, _FULL = "chunked_attention", "full_attention"


def _read_llama4(config: ConfigFile) -> DecoderConfig:
    """Read the config of Llama 4's text part: `no_rope_layers` has 1 or true for layers with positions."""
    num_layers = config.positive_int("num_hidden_layers")
    rotates = _read_rotating_layers(config, num_layers)
    attention_bias = config.boolean("attention_bias", False)
    dense_inner = config.int_or_none("intermediate_size_mlp") or _DENSE_INNER
    decoder = read_llama_like(
        config.with_values({"intermediate_size": dense_inner}),
        default_kv_heads=_KV_HEADS,
        default_theta=_THETA,
        head_dim=read_head_dim(config, _HEAD_DIM),
        norm_eps=config.number_or_none("rms_norm_eps") or 1e-5,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm="unweighted" if config.boolean("use_qk_norm", True) else None,
        norms_rotated=True,
        attention_chunks=_read_chunks(config, rotates),
        attention_temperature=_read_temperature(config),
        experts=_read_experts(config, num_layers),
    )
    decoder = in_interleaved_pairs(decoder)
    ropes = tuple(rope if rotated else None for rope, rotated in zip(decoder.ropes, rotates, strict=True))
    return replace(decoder, ropes=ropes)


def _read_rotating_layers(config: ConfigFile, num_layers: int) -> tuple[bool, ...]:
    """Return whether each layer has rotary positions; an empty list stands for the interval."""
    interval = config.int_or_none("no_rope_layer_interval") or _NO_ROPE_INTERVAL
    listed: Any = config.value("no_rope_layers")
    if listed in (None, []):
        return tuple((index + 1) % interval != 0 for index in range(num_layers))
    if not is_list(listed) or len(listed) != num_layers or any(one not in (0, 1) for one in listed):
        raise config.error("no_rope_layers", f"0 or 1 for each of num_hidden_layers, {num_layers}")
    return tuple(bool(one) for one in listed)


def _read_chunks(config: ConfigFile, rotates: tuple[bool, ...]) -> tuple[int | None, ...]:
    """Return the length of chunks for the layers that `layer_types` names; without it, for the layers with rotary
    positions."""
    types = config.texts("layer_types")
    if config.has("layer_types") and (len(types) != len(rotates) or set(types) - {_CHUNKED, _FULL}):
        expected = f"{_CHUNKED} or {_FULL} for each of num_hidden_layers, {len(rotates)}"
        raise config.error("layer_types", expected)
    types = types or tuple(_CHUNKED if rotated else _FULL for rotated in rotates)
    length = config.int_or_none("attention_chunk_size")
    if "attention_chunk_size" not in config.values:
        length = _CHUNK
    if length is None and _CHUNKED in types:
        raise config.error("attention_chunk_size", "an integer >= 1, since some layers attend in chunks")
    return tuple(length if kind == _CHUNKED else None for kind in types)


def _read_temperature(config: ConfigFile) -> AttentionTemperature | None:
    interval = config.number_or_none("floor_scale") or _INTERVAL
    growth = config.number_or_none("attn_scale") or _GROWTH
    tuned = config.value("attn_temperature_tuning")  # a number in some files
    if tuned is not None and type(tuned) not in (bool, int):
        raise config.error("attn_temperature_tuning", "true or false")
    return None if tuned in (False, 0) else AttentionTemperature(growth, interval, 1, False)


def _read_experts(config: ConfigFile, num_layers: int) -> ExpertsConfig | None:
    """Return the experts and shared MLP, in the layers that `moe_layers` lists or `interleave_moe_layer_step`
    selects."""
    step = config.int_or_none("interleave_moe_layer_step") or 1
    listed: Any = config.value("moe_layers")
    if listed is not None and (not is_list(listed) or any(type(each) is not int for each in listed)):
        raise config.error("moe_layers", "a list of layers")
    layers = range(step - 1, num_layers, step) if listed is None else listed
    inner = config.int_or_none("intermediate_size") or _INNER
    count = read_size(config, "num_local_experts", "num_experts", _EXPERTS)
    num_per_token = config.int_or_none("num_experts_per_tok") or 1
    if not any(index in layers for index in range(num_layers)):
        return None
    return ExpertsConfig(
        count=count,
        num_per_token=num_per_token,
        intermediate_size=inner,
        is_normalized=False,
        layers=tuple(index in layers for index in range(num_layers)),
        shared_intermediate_size=inner,
        scoring="sigmoid",
        weighs_inputs=True,
    )


def _mlp(prefix: str) -> MlpNames:
    return MlpNames(up=(f"{prefix}gate_proj", f"{prefix}up_proj"), down=f"{prefix}down_proj")


_NAMES = replace(
    LLAMA_NAMES,
    mlp=_mlp("feed_forward."),
    experts=ExpertNames(
        router="feed_forward.router",
        prefix="feed_forward.experts.{}.",
        each=_mlp(""),
        stacks=ExpertStacks(
            up="feed_forward.experts.gate_up_proj", down="feed_forward.experts.down_proj", transposed=True
        ),
        shared=_mlp("feed_forward.shared_expert."),
    ),
)

LLAMA4 = Family("llama4_text", "Llama4ForCausalLM", _read_llama4, _NAMES)

"""Kimi Linear: Kimi Delta Attention in most layers, latent attention without position embeddings in the rest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from inflight.checkpoint_config import ConfigFile
from inflight.json_values import is_list
from inflight.models.decoder_config import DecoderConfig
from inflight.models.families.deepseek import V3_NAMES, read_v3
from inflight.models.families.family import ExpertNames, Family, MlpNames, RecurrentNames
from inflight.models.neutral_keys import ANY, NeutralKeys, refuse_unread
from inflight.models.recurrent import KimiDelta

_INTERVAL = 4  # by default, every fourth layer from the fifth on has attention
# Names of keys in files of Kimi Linear, with DeepSeek-V3's names of these keys.
_SAME = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
# transformers' values of absent keys.
_DEFAULTS: dict[str, Any] = {
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1024,
    "routed_scaling_factor": 2.446,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "rms_norm_eps": 1e-5,
    "num_nextn_predict_layers": 0,
}


def _read_kimi_linear(config: ConfigFile) -> DecoderConfig:
    """Read the config of Kimi Linear, whose keys of attention and experts are DeepSeek-V3's, some under other
    names."""
    num_layers = config.positive_int("num_hidden_layers")
    recurrent_layers = _read_layers(config, num_layers)
    renamed = _renamed(config)
    absent = {key: value for key, value in _DEFAULTS.items() if key not in {*config.values, *renamed}}
    kinds = config.texts("mlp_layer_types")
    if kinds and (len(kinds) != num_layers or set(kinds) - {"dense", "sparse"}):
        raise config.error("mlp_layer_types", f"dense or sparse for each of num_hidden_layers, {num_layers}")
    decoder = read_v3(config.with_values({**absent, **renamed, "head_dim": None}))
    if decoder.experts is not None and kinds:
        sparse = tuple(kind == "sparse" for kind in kinds)
        decoder = replace(decoder, experts=replace(decoder.experts, layers=sparse) if any(sparse) else None)
    assert decoder.latent is not None, "the family has latent attention"
    return replace(
        decoder,
        ropes=(None,) * num_layers,
        attention_scale=decoder.latent.query_head_dim**-0.5,
        recurrent=_read_mixer(config, decoder.norm_eps),
        recurrent_layers=recurrent_layers,
    )


def _renamed(config: ConfigFile) -> dict[str, Any]:
    """Return the values of the keys that this family has under other names, by DeepSeek-V3's names."""
    found: dict[str, Any] = {}
    for own, theirs in _SAME.items():
        value, others = config.value(own), (found.get(theirs), config.value(theirs))
        if value is None:
            continue
        if any(other not in (None, value) for other in others):
            same = ", ".join(key for key in (*_SAME, theirs) if _SAME.get(key, key) == theirs and key != own)
            raise config.error(own, f"the same as {same}")
        found[theirs] = value
    return found


def _read_layers(config: ConfigFile, num_layers: int) -> tuple[bool, ...]:
    """Return whether each layer is recurrent: by `layer_types`, otherwise by the lists in `linear_attn_config`,
    which count layers from 1.
    """
    types = config.texts("layer_types")
    section = config.child("linear_attn_config") if config.has("linear_attn_config") else None
    lists: list[Any] = [section and section.value(key) for key in ("full_attn_layers", "kda_layers")]
    if types:
        if len(types) != num_layers or set(types) - {"full_attention", "linear_attention"}:
            expected = f"full_attention or linear_attention for each of num_hidden_layers, {num_layers}"
            raise config.error("layer_types", expected)
        return tuple(kind == "linear_attention" for kind in types)
    if not all(map(is_list, lists)):
        return tuple(not index or index % _INTERVAL != 0 for index in range(num_layers))
    attend, recur = lists
    layers = [*attend, *recur]
    if any(type(layer) is not int for layer in layers) or sorted(layers) != list(range(1, num_layers + 1)):
        expected = f"kda_layers and full_attn_layers with each of num_hidden_layers, {num_layers}, once"
        raise config.error("linear_attn_config", expected)
    return tuple(index + 1 in recur for index in range(num_layers))


def _read_mixer(config: ConfigFile, norm_eps: float) -> KimiDelta:
    """Read the sizes of a recurrent layer, from `linear_attn_config` or from keys at the top level."""
    section = config.child("linear_attn_config") if config.has("linear_attn_config") else None

    def read(key: str, beside: str, default: int) -> int:
        own = None if section is None else section.int_or_none(key)
        return own or config.int_or_none(beside) or default

    num_heads, head_dim = read("num_heads", "linear_num_heads", 32), read("head_dim", "linear_head_dim", 128)
    conv_width = read("short_conv_kernel_size", "linear_conv_kernel_dim", 4)
    if section is not None:
        refuse_unread(section, _LISTS)
    return KimiDelta(num_heads, head_dim, conv_width, norm_eps)


# Keys of `linear_attn_config` that are not read if there is `layer_types`.
_LISTS: NeutralKeys = {"full_attn_layers": ANY, "kda_layers": ANY}
_NEUTRAL: NeutralKeys = {
    "head_dim": ANY,  # of ordinary attention
    "moe_layer_freq": (None, 1),
    "moe_router_activation_func": (None, "sigmoid"),
    "mla_use_nope": (None, True),
    "use_grouped_topk": ANY,
    "rope_theta": (None, 10000),
}
_EACH = MlpNames(up=("w1", "w3"), down="w2")
_EXPERTS = "block_sparse_moe."
_NAMES = replace(
    V3_NAMES,
    experts=ExpertNames(
        router=f"{_EXPERTS}gate",
        prefix=f"{_EXPERTS}experts.{{}}.",
        each=_EACH,
        shared=MlpNames(
            up=(f"{_EXPERTS}shared_experts.gate_proj", f"{_EXPERTS}shared_experts.up_proj"),
            down=f"{_EXPERTS}shared_experts.down_proj",
        ),
        choice_bias=f"{_EXPERTS}gate.e_score_correction_bias",
    ),
    recurrent=RecurrentNames(
        product=tuple((f"self_attn.{each}_proj", 1) for each in ("q", "k", "v", "f_a", "b", "g_a")),
        conv=tuple(f"self_attn.{each}_conv1d" for each in "qkv"),
        output="self_attn.o_proj",
        decay="self_attn.A_log",
        step_bias="self_attn.dt_bias",
        norm="self_attn.o_norm",
        step_up="self_attn.f_b_proj",
        gate_up="self_attn.g_b_proj",
    ),
    # transformers writes MLPs of layers without experts below the name of experts.
    other_names=((r"\.block_sparse_moe\.((?:gate|up|down)_proj)\.", r".mlp.\1."),),
)

KIMI_LINEAR = Family("kimi_linear", "KimiLinearForCausalLM", _read_kimi_linear, _NAMES, _NEUTRAL)

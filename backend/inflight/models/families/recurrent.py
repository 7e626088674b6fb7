"""Families with recurrent layers: Qwen3-Next, Qwen3.5, OLMo Hybrid, Granite 4 hybrids, LFM2, LFM2-MoE and LFM3."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from inflight.checkpoint_config import ConfigFile
from inflight.json_values import is_list
from inflight.models.decoder_config import DecoderConfig, ExpertsConfig
from inflight.models.families.family import (
    DraftHeadNames,
    ExpertNames,
    ExpertStacks,
    Family,
    MlpNames,
    NormNames,
    RecurrentNames,
    read_activation,
    read_head_dim,
    read_positions,
)
from inflight.models.families.granite import GRANITE_MLP, read_granite_scales
from inflight.models.families.llama import LLAMA_ATTENTION, LLAMA_NAMES, NORMED_ATTENTION, read_llama_like
from inflight.models.families.mixtures import QWEN_EXPERT_NAMES, read_qwen_experts
from inflight.models.neutral_keys import ANY, NeutralKeys
from inflight.models.recurrent import GatedDelta, Mamba2, ShortConv
from inflight.models.rope import read_layer_type_ropes

# Values of Qwen's keys `full_attention_interval`, `partial_rotary_factor` and `head_dim` if they are absent.
_FULL_ATTENTION_INTERVAL = 4
_QWEN_PART = 0.25
_QWEN_HEAD_DIM = 256
_GRANITE_EXPERTS = 8  # Granite's num_local_experts if the key is absent
_OLMO_GATED_NORM_EPS = 1e-5  # not in the config
INFINITE = {"__float__": "Infinity"}  # as transformers writes an infinite number
_ATTENTION = ("full_attention", "attention")


def _read_recurrent_layers(config: ConfigFile, *names: str, key: str = "layer_types") -> tuple[bool, ...]:
    """Return for each layer whether it is recurrent: its type is one of `names`, not full_attention or
    attention."""
    num_layers, types = config.positive_int("num_hidden_layers"), config.texts(key)
    if len(types) != num_layers or set(types) - {*names, *_ATTENTION}:
        kinds = ", ".join((*_ATTENTION, *names))
        raise config.error(key, f"one of {kinds} for each of num_hidden_layers, {num_layers}")
    return tuple(kind not in _ATTENTION for kind in types)


# ---------------------------------------------------------------------- Qwen3-Next and Qwen3.5


def _read_qwen_delta(config: ConfigFile, default_kv_heads: int = 4) -> DecoderConfig:
    """Read the config of Qwen3.5: gated DeltaNet in most layers, and attention with gates and partial rotation."""
    num_layers = config.positive_int("num_hidden_layers")
    interval = config.int_or_none("full_attention_interval") or _FULL_ATTENTION_INTERVAL
    if config.has("layer_types"):
        recurrent_layers = _read_recurrent_layers(config, "linear_attention")
    else:
        recurrent_layers = tuple((index + 1) % interval != 0 for index in range(num_layers))
    norm_eps = config.number_or_none("rms_norm_eps") or 1e-6
    attention_bias = config.boolean("attention_bias", False)
    return read_llama_like(
        config,
        default_kv_heads=default_kv_heads,
        default_part=_QWEN_PART,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm="heads",
        norm_eps=norm_eps,
        norm_offset=1.0,
        head_dim=config.int_or_none("head_dim") or _QWEN_HEAD_DIM,
        attention_gate=True,
        recurrent=_read_gated_delta(
            config, GatedDelta(16, 32, key_dim=128, value_dim=128, conv_width=4, norm_eps=norm_eps)
        ),
        recurrent_layers=recurrent_layers,
    )


def _read_gated_delta(config: ConfigFile, defaults: GatedDelta) -> GatedDelta:
    """Read the sizes of a layer of gated DeltaNet; `defaults` has the values of absent keys and of all other
    fields."""
    found = replace(
        defaults,
        num_key_heads=config.int_or_none("linear_num_key_heads") or defaults.num_key_heads,
        num_value_heads=config.int_or_none("linear_num_value_heads") or defaults.num_value_heads,
        key_dim=config.int_or_none("linear_key_head_dim") or defaults.key_dim,
        value_dim=config.int_or_none("linear_value_head_dim") or defaults.value_dim,
        conv_width=config.int_or_none("linear_conv_kernel_dim") or defaults.conv_width,
    )
    if found.num_value_heads % found.num_key_heads:
        raise config.error(
            "linear_num_value_heads", f"a multiple of linear_num_key_heads, {found.num_key_heads}"
        )
    return found


def _read_qwen3_next(config: ConfigFile) -> DecoderConfig:
    """Read the config of Qwen3-Next: Qwen3.5 with experts in some layers, and in these a shared MLP."""
    experts = read_qwen_experts(config, default_count=512, default_per_token=10, default_width=512)
    return _with_shared_expert(config, replace(experts, is_normalized=config.boolean("norm_topk_prob", True)))


def _read_qwen3_5_moe(config: ConfigFile) -> DecoderConfig:
    """Read the config of Qwen3.5-MoE: Qwen3.5 with experts and a shared MLP in every layer."""
    experts = ExpertsConfig(
        count=config.int_or_none("num_experts") or 256,
        num_per_token=config.int_or_none("num_experts_per_tok") or 8,
        intermediate_size=config.int_or_none("moe_intermediate_size") or 512,
        is_normalized=True,
        layers=(True,) * config.positive_int("num_hidden_layers"),
    )
    return _with_shared_expert(config, experts)


def _with_shared_expert(config: ConfigFile, experts: ExpertsConfig) -> DecoderConfig:
    """Read the config of Qwen3.5 or Qwen3-Next with these experts and a shared MLP."""
    shared = config.int_or_none("shared_expert_intermediate_size") or 512
    if not config.has("intermediate_size"):  # such models have experts in every layer
        config = config.with_values({"intermediate_size": shared})
    decoder = _read_qwen_delta(config, default_kv_heads=2)
    return replace(decoder, experts=replace(experts, shared_intermediate_size=shared, has_shared_gate=True))


_DELTA_NAMES = RecurrentNames(
    product=(
        ("linear_attn.in_proj_qkv", 3),
        ("linear_attn.in_proj_z", 1),
        ("linear_attn.in_proj_b", 1),
        ("linear_attn.in_proj_a", 1),
    ),
    conv=("linear_attn.conv1d",),
    output="linear_attn.out_proj",
    decay="linear_attn.A_log",
    step_bias="linear_attn.dt_bias",
    norm="linear_attn.norm",
)
_QWEN3_5_NAMES = replace(
    LLAMA_NAMES,
    attention=NORMED_ATTENTION,
    recurrent=_DELTA_NAMES,
    draft_head=DraftHeadNames(
        prefix="mtp.",
        layer="layers.0.",
        embedding_norm="pre_fc_norm_embedding",
        hidden_norm="pre_fc_norm_hidden",
        projection="fc",
        final_norm="norm",
    ),
    left_out=("mtp.",),
)
_QWEN3_NEXT_NAMES = replace(
    _QWEN3_5_NAMES,
    experts=QWEN_EXPERT_NAMES,
    recurrent=replace(
        _DELTA_NAMES,
        product=(("linear_attn.in_proj_qkvz", 4), ("linear_attn.in_proj_ba", 2)),
        by_key_head=True,
    ),
)


# ---------------------------------------------------------------------- OLMo Hybrid


def _read_olmo_hybrid(config: ConfigFile) -> DecoderConfig:
    """Read the config of OLMo Hybrid: gated DeltaNet in most layers, and attention as in OLMo 2.

    Published models have no rotary positions.
    """
    num_layers, num_heads = (
        config.positive_int("num_hidden_layers"),
        config.positive_int("num_attention_heads"),
    )
    if config.has("layer_types"):
        recurrent_layers = _read_recurrent_layers(config, "linear_attention")
    else:
        last = num_layers - 1 if num_layers < _FULL_ATTENTION_INTERVAL else None
        recurrent_layers = tuple(
            (index + 1) % _FULL_ATTENTION_INTERVAL != 0 and index != last for index in range(num_layers)
        )
    num_key_heads = config.int_or_none("linear_num_key_heads") or num_heads
    key_dim = config.int_or_none("linear_key_head_dim")
    key_dim = key_dim or int(0.75 * config.positive_int("hidden_size") / num_key_heads)
    delta = GatedDelta(
        num_key_heads,
        num_heads,
        key_dim,
        value_dim=2 * key_dim,
        conv_width=4,
        norm_eps=_OLMO_GATED_NORM_EPS,
        beta_scale=2.0 if config.boolean("linear_allow_neg_eigval", True) else 1.0,
    )
    attention_bias = config.boolean("attention_bias", False)
    decoder = read_llama_like(
        config,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm="projection",
        recurrent=_read_gated_delta(config, delta),
        recurrent_layers=recurrent_layers,
    )
    parameters: Any = config.value("rope_parameters") or {}
    rotates = config.has("rope_theta") or parameters.get("rope_theta") is not None
    return decoder if rotates else replace(decoder, ropes=(None,) * num_layers)


_OLMO_HYBRID_NAMES = replace(
    LLAMA_NAMES,
    norms=NormNames(attention_post="post_attention_layernorm", mlp_post="post_feedforward_layernorm"),
    attention=NORMED_ATTENTION,
    recurrent=replace(
        _DELTA_NAMES,
        product=tuple((f"linear_attn.{each}_proj", 1) for each in "qkvgba"),
        # Three modules in published checkpoints; transformers writes them with a third of all rows each.
        conv_parts=tuple(f"linear_attn.{each}_conv1d" for each in "qkv"),
        output="linear_attn.o_proj",
        norm="linear_attn.o_norm",
    ),
    recurrent_norms=NormNames(attention="input_layernorm", mlp="post_attention_layernorm"),
    # The recurrent layers' norms in published checkpoints; transformers writes all layers' norms so.
    other_names=(
        (r"\.attention_layer_norm\.", ".input_layernorm."),
        (r"\.feedforward_layer_norm\.", ".post_attention_layernorm."),
    ),
)


# ---------------------------------------------------------------------- Granite 4 hybrids


def _read_granite_hybrid(config: ConfigFile) -> DecoderConfig:
    """Read the config of a Granite 4 hybrid: Mamba-2 in most layers, Granite's four scales, and a shared MLP.

    Some models also have experts in every layer.
    """
    types = "layers_block_type" if config.has("layers_block_type") else "layer_types"
    attention_bias = config.boolean("attention_bias", False)
    num_layers = config.positive_int("num_hidden_layers")
    shared = config.int_or_none("shared_intermediate_size") or 1024
    decoder = read_llama_like(
        config,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        **read_granite_scales(config),
        experts=_read_granite_experts(config, shared),
        recurrent=read_mamba2(config),
        recurrent_layers=_read_recurrent_layers(config, "mamba", "linear_attention", key=types),
    )
    rotates = config.text_or_none("position_embedding_type") == "rope"
    return replace(
        decoder, intermediate_size=shared, ropes=decoder.ropes if rotates else (None,) * num_layers
    )


def _read_granite_experts(config: ConfigFile, shared: int) -> ExpertsConfig | None:
    """Read the experts of layers with a shared MLP of width `shared`; None if `num_local_experts` is 0 or null."""
    count = config.value("num_local_experts")
    if "num_local_experts" not in config.values:
        count = _GRANITE_EXPERTS
    if not count:
        return None
    return ExpertsConfig(
        count=config.with_values({"num_local_experts": count}).positive_int("num_local_experts"),
        num_per_token=config.int_or_none("num_experts_per_tok") or 2,
        intermediate_size=config.positive_int("intermediate_size"),
        is_normalized=True,
        layers=(True,) * config.positive_int("num_hidden_layers"),
        shared_intermediate_size=shared,
    )


def read_mamba2(config: ConfigFile, width: int | None = None) -> Mamba2:
    """Read the sizes of a layer of Mamba-2.

    `width` is the width of all heads together; None: `mamba_expand` * hidden_size.
    """
    num_heads = config.int_or_none("mamba_n_heads") or 128
    expanded = config.positive_int("hidden_size") * (config.int_or_none("mamba_expand") or 2)
    width = width or expanded
    stated = config.value("mamba_d_head")
    head_dim = width // num_heads if stated in (None, "auto") else config.positive_int("mamba_d_head")
    if head_dim * num_heads != width:
        expected = f"mamba_d_ssm, else mamba_expand * hidden_size, over mamba_n_heads: {width // num_heads}"
        raise config.error("mamba_d_head", expected)
    num_groups = config.int_or_none("mamba_n_groups") or 1
    if num_heads % num_groups:
        raise config.error("mamba_n_groups", f"a divisor of mamba_n_heads, {num_heads}")
    return Mamba2(
        num_heads=num_heads,
        head_dim=head_dim,
        state_dim=config.int_or_none("mamba_d_state") or 256,
        num_groups=num_groups,
        conv_width=config.int_or_none("mamba_d_conv") or 4,
        norm_eps=config.number_or_none("rms_norm_eps") or 1e-6,
        step_limit=read_step_limit(config),
        has_conv_bias=config.boolean("mamba_conv_bias", "mamba_conv_bias" not in config.values),
        has_bias=config.boolean("mamba_proj_bias", False),
    )


def read_step_limit(config: ConfigFile) -> tuple[float, float]:
    """Return the minimum and maximum step size."""
    limit: Any = config.value("time_step_limit")
    if limit is None:
        return 0.0, float("inf")
    numbers = [float("inf") if each == INFINITE else each for each in limit] if is_list(limit) else []
    if len(numbers) != 2 or any(type(each) not in (int, float) for each in numbers):
        raise config.error("time_step_limit", "the least and the largest step size")
    return float(numbers[0]), float(numbers[1])


def mamba2_names(prefix: str) -> RecurrentNames:
    """Return the names of the modules of Mamba-2 below `prefix`."""
    return RecurrentNames(
        product=((f"{prefix}in_proj", 5),),
        conv=(f"{prefix}conv1d",),
        output=f"{prefix}out_proj",
        decay=f"{prefix}A_log",
        step_bias=f"{prefix}dt_bias",
        skip=f"{prefix}D",
        norm=f"{prefix}norm",
    )


_GRANITE_HYBRID_NAMES = replace(
    LLAMA_NAMES,
    mlp=GRANITE_MLP,
    experts=ExpertNames(
        router="block_sparse_moe.router.layer",
        prefix="block_sparse_moe.experts.{}.",
        each=MlpNames(up=("w1", "w3"), down="w2"),
        stacks=ExpertStacks(
            up="block_sparse_moe.input_linear.weight", down="block_sparse_moe.output_linear.weight"
        ),
        shared=GRANITE_MLP,
    ),
    recurrent=mamba2_names("mamba."),
)


# ---------------------------------------------------------------------- LFM2


def _read_lfm2(config: ConfigFile) -> DecoderConfig:
    """Read the config of LFM2: gated short convolutions in most layers, norms over each query and key head."""
    inner = config.int_or_none("block_ff_dim") or config.positive_int("intermediate_size")
    if config.boolean("block_auto_adjust_ff_dim", True):
        multiple = config.int_or_none("block_multiple_of") or 256
        inner = int(2 * inner / 3)
        factor = config.number_or_none("block_ffn_dim_multiplier")
        inner = inner if factor is None else int(factor * inner)
        inner = multiple * -(-inner // multiple)
    return _read_short_conv(config.with_values({"intermediate_size": inner}))


def _read_lfm2_moe(config: ConfigFile) -> DecoderConfig:
    """Read the config of LFM2-MoE: LFM2 with experts in all layers but the first."""
    num_dense = config.count("num_dense_layers") if config.has("num_dense_layers") else 2
    experts = ExpertsConfig(
        count=config.int_or_none("num_experts") or 32,
        num_per_token=config.int_or_none("num_experts_per_tok") or 4,
        intermediate_size=config.int_or_none("moe_intermediate_size") or 1792,
        is_normalized=config.boolean("norm_topk_prob", True),
        layers=tuple(index >= num_dense for index in range(config.positive_int("num_hidden_layers"))),
        scoring="sigmoid",
        has_choice_bias=config.boolean("use_expert_bias", True),
        result_scale=config.number_or_none("routed_scaling_factor") or 1.0,
    )
    return _read_short_conv(config, experts)


def _read_short_conv(config: ConfigFile, experts: ExpertsConfig | None = None) -> DecoderConfig:
    """Read the keys that LFM2 and LFM2-MoE share."""
    for key, read in _LFM2_COPIES.items():
        if config.value(key) not in (None, config.value(read)):
            raise config.error(key, f"{config.value(read)} like {read}, or nothing")
    hidden = config.positive_int("hidden_size")
    if config.has("layer_types"):
        recurrent_layers = _read_recurrent_layers(config, "conv")
    else:
        num_layers, attend = config.positive_int("num_hidden_layers"), config.value("full_attn_idxs")
        if not is_list(attend):
            raise config.error("full_attn_idxs", "a list of layers, or layer_types")
        recurrent_layers = tuple(index not in attend for index in range(num_layers))
    if read_activation(config, "hidden_act", "silu") != "silu":
        raise config.error("hidden_act", "silu, which this family always has")
    has_bias = config.boolean("conv_bias", False)
    return read_llama_like(
        config,
        default_kv_heads=8,
        default_theta=1e6,
        qk_norm="heads",
        norm_eps=config.number_or_none("norm_eps") or 1e-5,
        tied_embeddings=config.boolean("tie_embedding", config.boolean("tie_word_embeddings", True)),
        recurrent=ShortConv(hidden, config.int_or_none("conv_L_cache") or 3, has_bias, has_bias),
        recurrent_layers=recurrent_layers,
        experts=experts,
    )


_LFM3_HEAD_DIM, _LFM3_KV_HEADS, _LFM3_WINDOW, _LFM3_CONV = 128, 4, 256, 7  # if the keys are absent
_LFM3_INTERVAL = 4
_LFM3_THETAS = {"full_attention": 1e6, "sliding_attention": 1e4}
_LFM3_ROPE: dict[str, Any] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
}


def _read_lfm3(config: ConfigFile) -> DecoderConfig:
    """Read the config of LFM3: LFM2 with windows, gates of heads, and additional norms on layers' results."""
    num_layers, hidden = config.positive_int("num_hidden_layers"), config.positive_int("hidden_size")
    types = config.texts("layer_types") or tuple(map(_lfm3_type, range(num_layers)))
    known = ("full_attention", "sliding_attention", "conv")
    if len(types) != num_layers or set(types) - {*known}:
        raise config.error(
            "layer_types", f"one of {', '.join(known)} for each of num_hidden_layers, {num_layers}"
        )
    if not config.boolean("use_sandwich_norm", True):
        raise config.error("use_sandwich_norm", "true")
    if read_activation(config, "hidden_act", "silu") != "silu":
        raise config.error("hidden_act", "silu, which this family always has")
    norm_eps = config.number_or_none("norm_eps") or 1e-5
    if config.number_or_none("rms_norm_eps") not in (None, norm_eps):
        raise config.error("rms_norm_eps", f"norm_eps, {norm_eps:g}")
    window = config.int_or_none("sliding_window") if "sliding_window" in config.values else _LFM3_WINDOW
    if window is None and "sliding_attention" in types:
        raise config.error("sliding_window", "an integer >= 1, since layer_types has sliding_attention")
    if not config.has("rope_parameters"):
        config = config.with_values({"rope_parameters": _LFM3_ROPE})
    ropes = read_layer_type_ropes(config, read_positions(config), _LFM3_THETAS)
    attention_bias, has_bias = config.boolean("attention_bias", False), config.boolean("conv_bias", False)
    return read_llama_like(
        config,
        default_kv_heads=_LFM3_KV_HEADS,
        ropes=tuple(ropes["full_attention" if kind == "conv" else kind] for kind in types),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm="heads",
        head_dim=read_head_dim(config, _LFM3_HEAD_DIM),
        norm_eps=norm_eps,
        norm_placement="around",
        sliding_windows=tuple(window if kind == "sliding_attention" else None for kind in types),
        tied_embeddings=config.boolean("tie_word_embeddings", True),
        head_gates=config.boolean("use_attention_gate", True),
        recurrent=ShortConv(hidden, config.int_or_none("conv_L_cache") or _LFM3_CONV, has_bias, has_bias),
        recurrent_layers=tuple(kind == "conv" for kind in types),
    )


def _lfm3_type(layer: int) -> str:
    """Return the type of a layer in a model without `layer_types`."""
    place = layer % _LFM3_INTERVAL
    return {0: "sliding_attention" if layer else "conv", 2: "full_attention"}.get(place, "conv")


_LFM2_NAMES = replace(
    LLAMA_NAMES,
    final_norm="embedding_norm",
    norms=NormNames(attention="operator_norm", mlp="ffn_norm"),
    attention=replace(
        LLAMA_ATTENTION,
        output="self_attn.out_proj",
        query_norm="self_attn.q_layernorm",
        key_norm="self_attn.k_layernorm",
    ),
    mlp=MlpNames(up=("feed_forward.w1", "feed_forward.w3"), down="feed_forward.w2"),
    recurrent=RecurrentNames(product=(("conv.in_proj", 3),), conv=("conv.conv",), output="conv.out_proj"),
)
_LFM3_NAMES = replace(
    _LFM2_NAMES,
    norms=NormNames(
        attention="operator_norm",
        attention_post="post_operator_norm",
        mlp="ffn_norm",
        mlp_post="post_ffn_norm",
    ),
    attention=replace(NORMED_ATTENTION, head_gates="self_attn.gate_proj"),
)
_LFM2_MOE_NAMES = replace(
    _LFM2_NAMES,
    experts=ExpertNames(
        router="feed_forward.gate",
        prefix="feed_forward.experts.{}.",
        each=MlpNames(up=("w1", "w3"), down="w2"),
        stacks=ExpertStacks(up="feed_forward.experts.gate_up_proj", down="feed_forward.experts.down_proj"),
        choice_bias="feed_forward.expert_bias",
    ),
)


# Keys of Qwen3.5's files that transformers does not read: for gates, which it always uses, and for draft layers.
_QWEN3_5_NEUTRAL: NeutralKeys = {
    "attn_output_gate": (None, True),
    "output_gate_type": (None, "swish"),
    "mamba_ssm_dtype": (None, "float32"),
    "mtp_num_hidden_layers": (None, *range(10)),
    "mtp_use_dedicated_embeddings": (None, True, False),
}
# Keys for the initialization.
_OLMO_HYBRID_NEUTRAL: NeutralKeys = dict.fromkeys(
    ("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor"), ANY
)
_GRANITE_HYBRID_NEUTRAL: NeutralKeys = {
    "mamba_chunk_size": ANY,  # how the computation is divided
    "init_method": ANY,
    "normalization_function": (None, "rmsnorm"),  # transformers always has this one
    "num_experts_per_tok": ANY,  # in models without experts
}
# Keys of published files that transformers does not read, and the keys that it reads instead.
_LFM2_COPIES = {
    "block_dim": "hidden_size",
    "conv_dim": "hidden_size",
    "conv_dim_out": "hidden_size",
    "num_heads": "num_attention_heads",
    "block_norm_eps": "norm_eps",
    "theta": "rope_theta",
}
_LFM2_MOE_NEUTRAL: NeutralKeys = {
    "full_attn_idxs": ANY,  # not used if there is layer_types
    "block_use_swiglu": (None, True),
    "use_pos_enc": (None, True),
    **dict.fromkeys(  # for the initialization
        ("block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init", "conv_use_xavier_init"), ANY
    ),
}
# These have no effect unless block_auto_adjust_ff_dim is true.
_LFM2_NEUTRAL: NeutralKeys = {**_LFM2_MOE_NEUTRAL, "block_multiple_of": ANY, "block_ffn_dim_multiplier": ANY}

RECURRENT_FAMILIES = (
    Family("qwen3_5_text", "Qwen3_5ForCausalLM", _read_qwen_delta, _QWEN3_5_NAMES, _QWEN3_5_NEUTRAL),
    Family(
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        _read_qwen3_5_moe,
        replace(_QWEN3_5_NAMES, experts=QWEN_EXPERT_NAMES),
        _QWEN3_5_NEUTRAL,
    ),
    Family("qwen3_next", "Qwen3NextForCausalLM", _read_qwen3_next, _QWEN3_NEXT_NAMES),
    Family(
        "olmo_hybrid", "OlmoHybridForCausalLM", _read_olmo_hybrid, _OLMO_HYBRID_NAMES, _OLMO_HYBRID_NEUTRAL
    ),
    Family(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        _read_granite_hybrid,
        _GRANITE_HYBRID_NAMES,
        _GRANITE_HYBRID_NEUTRAL,
    ),
    Family("lfm2", "Lfm2ForCausalLM", _read_lfm2, _LFM2_NAMES, _LFM2_NEUTRAL),
    Family("lfm2_moe", "Lfm2MoeForCausalLM", _read_lfm2_moe, _LFM2_MOE_NAMES, _LFM2_MOE_NEUTRAL),
    Family("lfm3", "Lfm3ForCausalLM", _read_lfm3, _LFM3_NAMES),
)

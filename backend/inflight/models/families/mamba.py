"""Families with Mamba-2 and attention, except Granite's hybrids: Nemotron-H and Falcon-H1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from inflight.checkpoint_config import ConfigFile
from inflight.models.decoder_config import DecoderConfig, ExpertsConfig, Multipliers
from inflight.models.families.deepseek import read_expert_groups
from inflight.models.families.family import (
    ExpertNames,
    ExpertStacks,
    Family,
    MlpNames,
    NormNames,
    read_activation,
    read_head_dim,
    read_size,
)
from inflight.models.families.llama import LLAMA_NAMES, read_llama_like
from inflight.models.families.recurrent import INFINITE, mamba2_names, read_mamba2
from inflight.models.neutral_keys import ANY, NeutralKeys
from inflight.models.recurrent import Mamba2

# ---------------------------------------------------------------------- Nemotron-H

_KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_OLD_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}
# Values of keys that are absent.
_HEAD_DIM = 128
_KV_HEADS = 8
_INNER = 21504
_EXPERT_INNER = 7688
_EPS = 1e-5
_MIN_STEP = 0.001


def _read_nemotron_h(config: ConfigFile) -> DecoderConfig:
    """Read the config of Nemotron-H: a layer is Mamba-2, attention without rotation, an MLP or experts."""
    kinds = _read_kinds(config)
    eps = config.number_or_none("layer_norm_epsilon") or _EPS
    for key in ("rms_norm_eps", "norm_eps"):
        if config.number_or_none(key) not in (None, eps):
            raise config.error(key, f"layer_norm_epsilon, {eps:g}")
    head_dim = read_head_dim(config, _HEAD_DIM)
    kv_heads = config.int_or_none("num_key_value_heads") or _KV_HEADS
    for key, size in (("attention_head_dim", head_dim), ("num_query_groups", kv_heads)):
        if config.int_or_none(key) not in (None, size):
            raise config.error(key, f"{size}, as other keys say")
    activation = read_activation(config, "mlp_hidden_act", "relu2")
    inner = config.int_or_none("intermediate_size") or _INNER
    decoder = read_llama_like(
        config.with_values({"intermediate_size": inner, "num_hidden_layers": len(kinds)}),
        default_kv_heads=_KV_HEADS,
        head_dim=head_dim,
        norm_eps=eps,
        mlp_bias=config.boolean("mlp_bias", False),
        activation=activation,
        gated_mlp=False,
        experts=_read_experts(config, kinds) if "moe" in kinds else None,
        recurrent=_read_mixer(config, eps),
        recurrent_layers=tuple(kind == "linear_attention" for kind in kinds),
        recurrent_activation=read_activation(config, "mamba_hidden_act", "silu"),
        attention_layers=tuple(kind == "full_attention" for kind in kinds),
        mlp_layers=tuple(kind in ("mlp", "moe") for kind in kinds),
    )
    return replace(decoder, ropes=(None,) * len(kinds))


def _read_kinds(config: ConfigFile) -> tuple[str, ...]:
    """Return the kind of each layer, given by `layers_block_type` or by the letters of
    `hybrid_override_pattern`."""
    key = next(filter(config.has, ("layers_block_type", "layer_types")), "layers_block_type")
    pattern = config.text_or_none("hybrid_override_pattern")
    if config.has(key):
        kinds = tuple(_OLD_KINDS.get(kind, kind) for kind in config.texts(key))
    elif pattern is not None:
        key, kinds = "hybrid_override_pattern", tuple(_KINDS.get(letter, letter) for letter in pattern)
    else:
        raise config.error(key, "the kind of each layer")
    if not kinds or set(kinds) - {*_KINDS.values()}:
        raise config.error(key, f"{', '.join(_KINDS.values())}, or of these {', '.join(_KINDS)}")
    if config.int_or_none("num_hidden_layers") not in (None, len(kinds)):
        raise config.error("num_hidden_layers", f"{len(kinds)}, the number of layers in {key}")
    return kinds


def _read_mixer(config: ConfigFile, eps: float) -> Mamba2:
    """Read the sizes of Mamba-2; as in transformers, step sizes are at least `time_step_min`, without an upper
    limit."""

    def read(key: str, old_key: str, default: int) -> int:
        return config.int_or_none(old_key) or config.int_or_none(key) or default

    num_heads = config.int_or_none("mamba_num_heads") or 128
    num_groups = read("n_groups", "mamba_n_groups", 8)
    if num_heads % num_groups:
        raise config.error("n_groups", f"a divisor of mamba_num_heads, {num_heads}")
    return Mamba2(
        num_heads=num_heads,
        head_dim=config.int_or_none("mamba_head_dim") or 64,
        state_dim=config.int_or_none("ssm_state_size") or 128,
        num_groups=num_groups,
        conv_width=read("conv_kernel", "mamba_d_conv", 4),
        norm_eps=eps,
        step_limit=(config.number_or_none("time_step_min") or _MIN_STEP, float("inf")),
        has_conv_bias=config.boolean("use_conv_bias", True),
        has_bias=config.boolean("use_bias", False),
    )


def _read_experts(config: ConfigFile, kinds: Sequence[str]) -> ExpertsConfig:
    """Read the experts, which have no gates, and the shared MLP, which has another width."""
    experts = ExpertsConfig(
        count=read_size(config, "n_routed_experts", "num_local_experts", 8),
        num_per_token=config.int_or_none("num_experts_per_tok") or 2,
        intermediate_size=config.int_or_none("moe_intermediate_size") or _EXPERT_INNER,
        is_normalized=config.boolean("norm_topk_prob", True),
        layers=tuple(kind == "moe" for kind in kinds),
        shared_intermediate_size=config.int_or_none("moe_shared_expert_intermediate_size") or _EXPERT_INNER,
        scoring="sigmoid",
        has_choice_bias=True,
        result_scale=config.number_or_none("routed_scaling_factor") or 1.0,
        has_float32_router=True,
        latent_size=config.int_or_none("moe_latent_size") or 0,
    )
    groups = {key: config.int_or_none(key) or 1 for key in ("n_group", "topk_group")}
    return read_expert_groups(config.with_values(groups), experts, scores_per_group=2)


# Keys without effect in transformers: for initialization, for draft layers, and for experts if there are none.
_NEMOTRON_H_UNUSED = (
    "time_step_max",
    "time_step_floor",
    "time_step_rank",
    "expand",
    "mamba_expand",
    "chunk_size",
    "mamba_chunk_size",
    "rescale_prenorm_residual",
    "use_mamba_kernels",
    "num_logits_to_keep",
    "moe_shared_expert_overlap",
    "num_nextn_predict_layers",
    "mtp_layers_block_type",
    "mtp_hybrid_override_pattern",
    "rope_theta",
    "n_routed_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "moe_latent_size",
    "n_group",
    "topk_group",
    "norm_topk_prob",
    "routed_scaling_factor",
)
_NEMOTRON_H_NEUTRAL: NeutralKeys = {
    **dict.fromkeys(_NEMOTRON_H_UNUSED, ANY),
    "n_shared_experts": (None, 1),
    "mamba_ssm_cache_dtype": (None, "float32"),
    "time_step_limit": (None, [0.0, float("inf")], [0.0, INFINITE]),
}
_MLP = MlpNames(up=("mixer.up_proj",), down="mixer.down_proj")
_NEMOTRON_H_NAMES = replace(
    LLAMA_NAMES,
    base="backbone.",
    embedding="embeddings",
    final_norm="norm_f",
    norms=NormNames(attention="norm", mlp="norm"),
    attention=replace(
        LLAMA_NAMES.attention, qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"), output="mixer.o_proj"
    ),
    mlp=_MLP,
    experts=ExpertNames(
        router="mixer.gate",
        prefix="mixer.experts.{}.",
        each=MlpNames(up=("up_proj",), down="down_proj"),
        stacks=ExpertStacks(up="mixer.experts.up_proj", down="mixer.experts.down_proj"),
        shared=MlpNames(up=("mixer.shared_experts.up_proj",), down="mixer.shared_experts.down_proj"),
        choice_bias="mixer.gate.e_score_correction_bias",
        latent=("mixer.fc1_latent_proj", "mixer.fc2_latent_proj"),
    ),
    recurrent=mamba2_names("mixer."),
    left_out=("mtp.",),
)


# ---------------------------------------------------------------------- Falcon-H1

_MAMBA_WIDTH = 1024  # if the key is absent


def _read_falcon_h1(config: ConfigFile) -> DecoderConfig:
    """Read the config of Falcon-H1: Mamba-2 and attention in every layer, and fixed factors of activations."""
    num_layers, attention_bias = (
        config.positive_int("num_hidden_layers"),
        config.boolean("attention_bias", False),
    )
    eps = config.number_or_none("rms_norm_eps") or 1e-5
    width = config.int_or_none("mamba_d_ssm")
    width = width if "mamba_d_ssm" in config.values else _MAMBA_WIDTH
    mixer = read_mamba2(config, width)
    has_norm = config.boolean("mamba_rms_norm", False)
    if config.boolean("mamba_norm_before_gate", True) and has_norm:
        raise config.error("mamba_norm_before_gate", "false, since mamba_rms_norm is true")
    if config.boolean("projectors_bias", False) != mixer.has_bias:
        raise config.error("projectors_bias", f"{mixer.has_bias}, as mamba_proj_bias".lower())

    def factor(key: str) -> float:
        return config.number_or_none(key) or 1.0

    gate, down = _read_factors(config, "mlp_multipliers", 2)
    decoder = read_llama_like(
        config,
        default_kv_heads=8,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=config.boolean("mlp_bias", False),
        norm_eps=eps,
        embedding_scale=factor("embedding_multiplier"),
        logits_scale=factor("lm_head_multiplier"),
        recurrent=replace(mixer, norm_eps=eps, has_norm=has_norm),
        recurrent_layers=(True,) * num_layers,
        attention_layers=(True,) * num_layers,
        multipliers=Multipliers(
            attention_input=factor("attention_in_multiplier"),
            attention_output=factor("attention_out_multiplier"),
            recurrent_input=factor("ssm_in_multiplier"),
            recurrent_sections=_read_factors(config, "ssm_multipliers", 5),
            recurrent_output=factor("ssm_out_multiplier"),
            mlp_gate=gate,
            mlp_output=down,
        ),
    )
    return replace(decoder, attention_scale=decoder.head_dim**-0.5 * factor("key_multiplier"))


def _read_factors(config: ConfigFile, key: str, count: int) -> tuple[float, ...]:
    """Return the list of `count` factors in `key`; all are 1 if the key is absent."""
    found = config.numbers(key) if config.has(key) else (1.0,) * count
    if len(found) != count:
        raise config.error(key, f"{count} numbers > 0")
    return found


_FALCON_H1_NEUTRAL: NeutralKeys = {
    "num_logits_to_keep": ANY,
    "mamba_chunk_size": ANY,
    "mamba_use_mlp": (None, True),
    "mlp_expansion_factor": ANY,
}
_FALCON_H1_NAMES = replace(
    LLAMA_NAMES,
    final_norm="final_layernorm",
    norms=NormNames(attention="input_layernorm", mlp="pre_ff_layernorm"),
    mlp=MlpNames(up=("feed_forward.gate_proj", "feed_forward.up_proj"), down="feed_forward.down_proj"),
    recurrent=mamba2_names("mamba."),
)

MAMBA_FAMILIES = (
    Family("nemotron_h", "NemotronHForCausalLM", _read_nemotron_h, _NEMOTRON_H_NAMES, _NEMOTRON_H_NEUTRAL),
    Family("falcon_h1", "FalconH1ForCausalLM", _read_falcon_h1, _FALCON_H1_NAMES, _FALCON_H1_NEUTRAL),
)

"""DeepSeek-V2 and V3 and Mistral 4: latent attention, and mixtures of experts whose router chooses among groups of
experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from inflight.checkpoint_config import ConfigFile
from inflight.models.decoder_config import DecoderConfig, ExpertsConfig, LatentAttention
from inflight.models.families.family import (
    AttentionNames,
    DraftHeadNames,
    ExpertNames,
    ExpertStacks,
    Family,
    LatentNames,
    MlpNames,
    read_size,
)
from inflight.models.families.llama import LLAMA_NAMES, read_llama_like, take_temperature
from inflight.models.neutral_keys import ANY, NeutralKeys
from inflight.models.rope import section_key
from inflight.models.rope_config import YarnScaling
from inflight.positions import MISTRAL4_SCALING

_ATTENTION = AttentionNames(
    output="self_attn.o_proj",
    latent=LatentNames(
        query="self_attn.q_proj",
        query_down="self_attn.q_a_proj",
        query_down_norm="self_attn.q_a_layernorm",
        query_up="self_attn.q_b_proj",
        kv_down="self_attn.kv_a_proj_with_mqa",
        kv_down_norm="self_attn.kv_a_layernorm",
        kv_up="self_attn.kv_b_proj",
    ),
)
ROUTED_EXPERT_NAMES = ExpertNames(
    router="mlp.gate",
    prefix="mlp.experts.{}.",
    each=MlpNames(up=("gate_proj", "up_proj"), down="down_proj"),
    stacks=ExpertStacks(),
    shared=MlpNames(
        up=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
        down="mlp.shared_experts.down_proj",
    ),
)
_V2_NAMES = replace(LLAMA_NAMES, attention=_ATTENTION, experts=ROUTED_EXPERT_NAMES)
V3_NAMES = replace(
    _V2_NAMES,
    experts=replace(ROUTED_EXPERT_NAMES, choice_bias="mlp.gate.e_score_correction_bias"),
    draft_head=DraftHeadNames(),
)
# Keys that the model's original code reads and transformers does not.
_V2_NEUTRAL: NeutralKeys = {
    "moe_layer_freq": (None, 1),
    "scoring_func": (None, "softmax"),
    "norm_topk_prob": (None, False),
    # Unused by topk_method "greedy".
    "n_group": ANY,
    "topk_group": ANY,
}
V3_NEUTRAL: NeutralKeys = {
    "moe_layer_freq": (None, 1),
    "scoring_func": (None, "sigmoid"),
    "topk_method": (None, "noaux_tc"),
}


def _read_latent(config: ConfigFile, *, interleaved: bool, head_is_whole: bool = False) -> LatentAttention:
    """Read the sizes of latent attention; `head_is_whole`: whether the key `head_dim` counts both parts of a head
    instead of the rotated part."""
    if "q_lora_rank" not in config.values:
        raise config.error("q_lora_rank", "an integer >= 1 or null")
    latent = LatentAttention(
        query_rank=config.int_or_none("q_lora_rank"),
        kv_rank=config.positive_int("kv_lora_rank"),
        nope_head_dim=config.positive_int("qk_nope_head_dim"),
        rope_head_dim=config.positive_int("qk_rope_head_dim"),
        value_head_dim=config.positive_int("v_head_dim"),
        interleaved=interleaved,
    )
    if latent.rope_head_dim % 2:
        raise config.error("qk_rope_head_dim", "an even number")
    head_dim = latent.query_head_dim if head_is_whole else latent.rope_head_dim
    for key, size in (("qk_head_dim", latent.query_head_dim), ("head_dim", head_dim)):
        if config.int_or_none(key) not in (None, size):
            raise config.error(key, f"{size}, which follows from qk_nope_head_dim and qk_rope_head_dim")
    num_heads = config.positive_int("num_attention_heads")
    if config.int_or_none("num_key_value_heads") not in (None, num_heads):
        raise config.error(
            "num_key_value_heads", f"num_attention_heads, {num_heads}: all heads share the latent"
        )
    return latent


def read_routed_experts(
    config: ConfigFile, alias: str, layers: tuple[bool, ...] | None = None
) -> ExpertsConfig:
    """Read the keys of experts, except keys of groups of experts; `alias` is another name of n_routed_experts.

    `layers`: whether each layer has experts; None: read from `first_k_dense_replace`.
    """
    width = config.positive_int("moe_intermediate_size")
    if layers is None:
        num_dense = config.count("first_k_dense_replace")
        layers = tuple(index >= num_dense for index in range(config.positive_int("num_hidden_layers")))
    return ExpertsConfig(
        count=read_size(config, "n_routed_experts", alias),
        num_per_token=config.positive_int("num_experts_per_tok"),
        intermediate_size=width,
        is_normalized=False,
        layers=layers,
        shared_intermediate_size=width * config.positive_int("n_shared_experts"),
        result_scale=config.number("routed_scaling_factor"),
        has_float32_router=True,
    )


def read_expert_groups(config: ConfigFile, experts: ExpertsConfig, scores_per_group: int) -> ExpertsConfig:
    """Return `experts` with groups; raise ConfigError if experts cannot be divided into them, or if the groups
    of a token have fewer experts than it needs."""
    num_groups, chosen = config.positive_int("n_group"), config.positive_int("topk_group")
    each, rest = divmod(experts.count, num_groups)
    if rest or each < scores_per_group:
        raise config.error(
            "n_group", f"groups of at least {scores_per_group} of {experts.count} n_routed_experts"
        )
    if chosen > num_groups:
        raise config.error("topk_group", f"at most n_group, {num_groups}")
    if chosen * each < experts.num_per_token:
        raise config.error(
            "num_experts_per_tok",
            f"at most {chosen * each}, the number of experts in topk_group of n_group groups",
        )
    return replace(
        experts, num_groups=num_groups, num_groups_per_token=chosen, scores_per_group=scores_per_group
    )


def _read_decoder(
    config: ConfigFile,
    latent: LatentAttention,
    experts: ExpertsConfig,
    *,
    mlp_bias: bool,
    **changes: Any,
) -> DecoderConfig:
    has_bias = config.boolean("attention_bias", False)
    if has_bias and latent.query_rank is None:
        raise config.error("attention_bias", "false where q_lora_rank is null")
    decoder = read_llama_like(
        config,
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=mlp_bias,
        num_kv_heads=1,
        head_dim=latent.cached_dim,
        latent=latent,
        experts=experts,
        **changes,
    )
    rope = decoder.ropes[0]
    factor = rope.scaling.all_dim_factor if rope and isinstance(rope.scaling, YarnScaling) else 1.0
    return replace(decoder, attention_scale=latent.query_head_dim**-0.5 * factor**2)


def _read_v2(config: ConfigFile) -> DecoderConfig:
    """Read the config of V2: softmax probabilities without normalization, and optional groups of experts."""
    experts = read_routed_experts(config, "num_experts")
    method = config.text_or_none("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise config.error("topk_method", "greedy or group_limited_greedy")
    if method != "greedy":
        experts = read_expert_groups(config, experts, scores_per_group=1)
    latent = _read_latent(config, interleaved=True)
    return _read_decoder(config, latent, experts, mlp_bias=config.boolean("mlp_bias", False))


def read_v3(
    config: ConfigFile,
    layers: tuple[bool, ...] | None = None,
    **changes: Any,
) -> DecoderConfig:
    """Read the config of V3: normalized sigmoid probabilities, a bias for the choice, and groups of experts.

    As in transformers, a key with null counts as false, and an absent key as true. `layers`: see
    `read_routed_experts`.
    """
    experts = read_routed_experts(config, "num_local_experts", layers)
    experts = replace(
        read_expert_groups(config, experts, scores_per_group=2),
        scoring="sigmoid",
        has_choice_bias=True,
        is_normalized=config.boolean("norm_topk_prob", "norm_topk_prob" not in config.values),
    )
    interleaved = config.boolean("rope_interleave", "rope_interleave" not in config.values)
    latent = _read_latent(config, interleaved=interleaved)
    decoder = _read_decoder(config, latent, experts, mlp_bias=False, **changes)
    return replace(decoder, num_draft_layers=read_num_draft_layers(config))


def read_num_draft_layers(config: ConfigFile) -> int:
    """Return the number of draft layers, which the key has under one of two names; 1 if neither is present."""
    found = 1
    for key in ("num_mtp_layers", "num_nextn_predict_layers"):
        if config.has(key):
            found = config.value(key)
            if type(found) is not int or found < 0:
                raise config.error(key, "an integer >= 0")
    return found


def _read_mistral4(config: ConfigFile) -> DecoderConfig:
    """Read the config of Mistral 4: latent attention, YaRN, normalized softmax probabilities of experts, and
    Ministral 3's temperature of attention."""
    num_dense = config.count("first_k_dense_replace", 0)
    layers = tuple(index >= num_dense for index in range(config.positive_int("num_hidden_layers")))
    experts = replace(
        read_expert_groups(config, read_routed_experts(config, "num_local_experts", layers), 2),
        is_normalized=config.boolean("norm_topk_prob", "norm_topk_prob" not in config.values),
        has_float32_router=False,
    )
    interleaved = config.boolean("rope_interleave", "rope_interleave" not in config.values)
    latent = _read_latent(config, interleaved=interleaved, head_is_whole=True)
    part, section = "partial_rotary_factor", section_key(config)
    if config.has(section) and config.child(section).has(part):
        rotated = latent.query_head_dim * config.child(section).number(part)
        if int(rotated) != latent.rope_head_dim:
            raise config.child(section).error(part, "qk_rope_head_dim over qk_head_dim")
    config, temperature = take_temperature(config, MISTRAL4_SCALING, also=(part,))
    return _read_decoder(config, latent, experts, mlp_bias=False, attention_temperature=temperature)


DEEPSEEK_FAMILIES = (
    Family("mistral4", "Mistral4ForCausalLM", _read_mistral4, _V2_NAMES),
    Family("deepseek_v2", "DeepseekV2ForCausalLM", _read_v2, _V2_NAMES, _V2_NEUTRAL),
    Family(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        read_v3,
        V3_NAMES,
        V3_NEUTRAL,
        other_types=("kimi_k2",),
    ),
)

"""Reads keys that only some architectures of GGUF files have: those with recurrent layers (see `families.py`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from inflight.gguf.keys import ArchitectureKeys
from inflight.gguf.parts import (
    SIGMOID,
    read_experts,
    read_granite_factors,
    read_grouped_experts,
    read_latent_attention,
    read_normalized_experts,
    read_routed_experts,
    shared_expert_width,
)
from inflight.json_values import Json


def _qwen_delta(section: ArchitectureKeys) -> Json:
    """Return the keys of recurrent layers, which Qwen3-Next and Qwen3.5 share."""
    num_layers, num_values = section.num_layers, section.size("ssm.time_step_rank")
    interval = section.size_or_none("full_attention_interval") or 4
    recurrent = section.of_layers("attention.recurrent_layers") or [
        (layer + 1) % interval != 0 for layer in range(num_layers)
    ]
    width, rest = divmod(section.size("ssm.inner_size"), num_values)
    if rest:
        raise section.keys.error(
            section.name("ssm.inner_size"), f"a multiple of ssm.time_step_rank, {num_values}"
        )
    return {
        "layer_types": ["linear_attention" if each else "full_attention" for each in recurrent],
        "linear_conv_kernel_dim": section.size("ssm.conv_kernel"),
        "linear_num_key_heads": section.size("ssm.group_count"),
        "linear_num_value_heads": num_values,
        "linear_key_head_dim": section.size("ssm.state_size"),
        "linear_value_head_dim": width,
    }


def _qwen_delta_moe(section: ArchitectureKeys) -> Json:
    shared = {"shared_expert_intermediate_size": shared_expert_width(section)}
    return {**_qwen_delta(section), **read_normalized_experts(section), **shared}


def _qwen35_moe(section: ArchitectureKeys) -> Json:
    found = _qwen_delta_moe(section)
    del found["norm_topk_prob"]  # always true in this family, which has no such key
    return found


def _short_conv(section: ArchitectureKeys) -> Json:
    """Return the keys of LFM2, whose layers without key heads are convolutions."""
    kv_heads = section.of_layers("attention.head_count_kv") or []
    return {
        "layer_types": ["full_attention" if count else "conv" for count in kv_heads],
        "conv_L_cache": section.size("shortconv.l_cache"),
        "conv_bias": section.has_tensor("shortconv.conv.bias"),
        "norm_eps": section.number("attention.layer_norm_rms_epsilon"),
    }


def _lfm2(section: ArchitectureKeys) -> Json:
    return {**_short_conv(section), "block_auto_adjust_ff_dim": False}


def _lfm2_moe(section: ArchitectureKeys) -> Json:
    section.expect("expert_weights_norm", None, True)
    return {
        **_short_conv(section),
        **read_experts(section, gating=SIGMOID),
        "num_dense_layers": section.count("leading_dense_block_count"),
        "use_expert_bias": section.has_tensor("exp_probs_b.bias"),
        "norm_topk_prob": True,
        "routed_scaling_factor": section.number_or_none("expert_weights_scale") or 1.0,
    }


def _granite_hybrid(section: ArchitectureKeys) -> Json:
    """Return the keys of a Granite 4 hybrid, whose layers without key heads are Mamba-2."""
    kv_heads = section.of_layers("attention.head_count_kv") or []
    expand, rest = divmod(section.size("ssm.inner_size"), section.size("embedding_length"))
    if rest:
        raise section.keys.error(section.name("ssm.inner_size"), "a multiple of embedding_length")
    has_positions = section.boolean("rope.scaling.finetuned", True)
    return {
        **read_granite_factors(section),
        "layer_types": ["attention" if count else "mamba" for count in kv_heads],
        "position_embedding_type": "rope" if has_positions else "nope",
        "shared_intermediate_size": section.size("expert_shared_feed_forward_length"),
        "num_local_experts": section.count("expert_count"),
        "num_experts_per_tok": section.size_or_none("expert_used_count"),
        "mamba_expand": expand,
        **_mamba2(section),
    }


def _mamba2(section: ArchitectureKeys) -> Json:
    inner, num_heads = section.size("ssm.inner_size"), section.size("ssm.time_step_rank")
    return {
        "mamba_n_heads": num_heads,
        "mamba_d_head": inner // num_heads,
        "mamba_d_state": section.size("ssm.state_size"),
        "mamba_d_conv": section.size("ssm.conv_kernel"),
        "mamba_n_groups": section.size("ssm.group_count"),
        "mamba_conv_bias": section.has_tensor("ssm_conv1d.bias"),
        "mamba_proj_bias": section.has_tensor("ssm_in.bias"),
    }


def _falcon_h1(section: ArchitectureKeys) -> Json:
    """Return the keys of Falcon-H1, whose factors of activations the converter has multiplied into matrices."""
    return {
        **_mamba2(section),
        "mamba_d_ssm": section.size("ssm.inner_size"),
        "mamba_rms_norm": section.has_tensor("ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "projectors_bias": section.has_tensor("ssm_in.bias"),
        "attention_bias": section.has_tensor("attn_q.bias"),
        "mlp_bias": section.has_tensor("ffn_up.bias"),
    }


def _nemotron_h(section: ArchitectureKeys) -> Json:
    """Return the keys of Nemotron-H, whose kinds of layers are recognized by their tensors."""
    kinds = {"ssm_in": "linear_attention", "attn_q": "full_attention", "ffn_gate_inp": "moe", "ffn_up": "mlp"}
    tensors, num_heads = section.header.tensors, section.size("ssm.time_step_rank")
    section.size_or_none("rope.dimension_count")  # without effect: this family rotates nothing
    head_dim = section.size("attention.key_length")
    section.expect("attention.value_length", None, head_dim)
    epsilon = section.number("attention.layer_norm_epsilon")
    section.expect("attention.layer_norm_rms_epsilon", None, epsilon)
    types = [
        next((kind for part, kind in kinds.items() if f"blk.{layer}.{part}.weight" in tensors), "mlp")
        for layer in range(section.num_layers)
    ]
    config: Json = {
        "layers_block_type": types,
        "head_dim": head_dim,
        "layer_norm_epsilon": epsilon,
        "mamba_num_heads": num_heads,
        "mamba_head_dim": section.size("ssm.inner_size") // num_heads,
        "ssm_state_size": section.size("ssm.state_size"),
        "n_groups": section.size("ssm.group_count"),
        "conv_kernel": section.size("ssm.conv_kernel"),
        "use_conv_bias": section.has_tensor("ssm_conv1d.bias"),
        "use_bias": section.has_tensor("ssm_in.bias"),
        "mlp_bias": section.has_tensor("ffn_up.bias"),
    }
    if "mlp" in types and (up := tensors.get(f"blk.{types.index('mlp')}.ffn_up.weight")) is not None:
        config["intermediate_size"] = up.shape[0]
    return config | (_nemotron_experts(section) if "moe" in types else {})


def _nemotron_experts(section: ArchitectureKeys) -> Json:
    section.expect("expert_shared_count", None, 1)
    return {
        **read_grouped_experts(section, SIGMOID),
        "moe_shared_expert_intermediate_size": shared_expert_width(section),
        "moe_latent_size": section.size_or_none("moe_latent_size"),
        "norm_topk_prob": section.boolean("expert_weights_norm", True),
    }


def _kimi_linear(section: ArchitectureKeys) -> Json:
    """Return the keys of Kimi Linear, whose layers without key heads are recurrent.

    A file does not state the number of heads of recurrent layers, and whether the probabilities of the chosen
    experts are normalized. As in llama.cpp, it is the number of heads of attention, and they are.
    """
    kv_heads = section.of_layers("attention.head_count_kv") or []
    section.size_or_none("attention.value_length")  # hidden_size / heads, which is the width of no head
    section.expect("expert_weights_norm", None, True)
    return {
        **read_latent_attention(section),
        **read_routed_experts(section, SIGMOID),
        "norm_topk_prob": True,
        "layer_types": ["full_attention" if count else "linear_attention" for count in kv_heads],
        "linear_num_heads": section.size("attention.head_count"),
        "linear_head_dim": section.size("kda.head_dim"),
        "linear_conv_kernel_dim": section.size("ssm.conv_kernel"),
    }


RECURRENT_READERS: Mapping[str, Callable[[ArchitectureKeys], Json]] = {
    "qwen3next": _qwen_delta_moe,
    "qwen35": _qwen_delta,
    "qwen35moe": _qwen35_moe,
    "lfm2": _lfm2,
    "lfm2moe": _lfm2_moe,
    "granitehybrid": _granite_hybrid,
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h,
    "kimi-linear": _kimi_linear,
    "falcon-h1": _falcon_h1,
}

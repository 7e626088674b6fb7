"""Reads the keys of parts of models that several architectures of GGUF files have, such as experts."""

from __future__ import annotations

from inflight.gguf.keys import ArchitectureKeys
from inflight.json_values import Json

SOFTMAX, SIGMOID = 1, 2
"""llama.cpp's numbers of the functions that turn experts' scores into probabilities."""


def read_experts(section: ArchitectureKeys, count: str = "num_experts", gating: int = SOFTMAX) -> Json:
    """Return the number and width of experts; `count`: the key of their number in config.json."""
    section.expect("expert_gating_func", None, gating)
    return {
        count: section.size("expert_count"),
        "num_experts_per_tok": section.size("expert_used_count"),
        "moe_intermediate_size": section.largest("expert_feed_forward_length"),
    }


def read_normalized_experts(section: ArchitectureKeys) -> Json:
    """Return the keys of experts whose probabilities are normalized, and not scaled, as Qwen3-MoE's."""
    section.expect("expert_weights_norm", None, True)
    section.expect("expert_weights_scale", None, 0.0, 1.0)
    return {**read_experts(section), "norm_topk_prob": True}


def read_grouped_experts(section: ArchitectureKeys, gating: int) -> Json:
    """Return the keys of experts that are chosen in groups and scaled, as DeepSeek V3's."""
    return {
        **read_experts(section, "n_routed_experts", gating),
        "routed_scaling_factor": section.number_or_none("expert_weights_scale") or 1.0,
        "n_group": section.size_or_none("expert_group_count") or 1,
        "topk_group": section.size_or_none("expert_group_used_count") or 1,
    }


def read_routed_experts(section: ArchitectureKeys, gating: int) -> Json:
    """Return the keys of DeepSeek's experts."""
    return {
        **read_grouped_experts(section, gating),
        "n_shared_experts": section.size("expert_shared_count"),
        "first_k_dense_replace": section.count("leading_dense_block_count"),
    }


def shared_expert_width(section: ArchitectureKeys) -> int:
    """Return the width of the MLP that all tokens use beside their experts."""
    section.size_or_none("expert_shared_feed_forward_length")  # some files state another width
    tensors = (
        section.header.tensors.get(f"blk.{layer}.ffn_up_shexp.weight") for layer in range(section.num_layers)
    )
    return next((tensor.shape[0] for tensor in tensors if tensor is not None), 0)


def read_latent_attention(section: ArchitectureKeys) -> Json:
    """Return the keys of latent attention.

    A file whose second projection is in two tensors has the sizes of keys and values under names that end with
    `_mla`. The names without this ending then have the sizes of the latents that replace them.
    """
    rank, rotated = section.size("attention.kv_lora_rank"), section.size("rope.dimension_count")
    is_absorbed = section.keys.has(section.name("attention.key_length_mla"))
    ending = "_mla" if is_absorbed else ""
    if is_absorbed:
        section.expect("attention.key_length", None, rank + rotated)
    return {
        "num_key_value_heads": section.size("attention.head_count"),
        "q_lora_rank": section.size_or_none("attention.q_lora_rank"),
        "kv_lora_rank": rank,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": section.size(f"attention.key_length{ending}") - rotated,
        "v_head_dim": section.size(f"attention.value_length{ending}"),
        "attention_bias": section.has_tensor("attn_q_a.bias"),
    }


def read_layer_types(section: ArchitectureKeys, every: int) -> list[str]:
    """Return the types of layers, by default with a window in all but every `every`-th layer."""
    pattern = section.of_layers("attention.sliding_window_pattern")
    if pattern is None or type(pattern[0]) is int:
        period = pattern[0] if pattern else every
        pattern = [layer % period < period - 1 for layer in range(section.num_layers)]
    return ["sliding_attention" if slides else "full_attention" for slides in pattern]


def read_granite_factors(section: ArchitectureKeys) -> Json:
    """Return the keys of Granite's factors of activations, and whether projections of attention have biases."""
    return {
        "attention_multiplier": section.number("attention.scale"),
        "embedding_multiplier": section.number_or_none("embedding_scale") or 1.0,
        "residual_multiplier": section.number_or_none("residual_scale") or 1.0,
        "logits_scaling": section.number_or_none("logit_scale") or 1.0,
        "attention_bias": section.has_tensor("attn_q.bias"),
    }

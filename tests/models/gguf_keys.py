"""The keys of GGUF files that llama.cpp's converter writes for the configurations of models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def _first(config: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def _common_keys(config: Any) -> dict[str, Any]:
    """Return the keys that the converter writes for every architecture."""
    rope = getattr(config, "rope_parameters", None) or {}
    full = rope.get("full_attention", rope)
    found = {
        "vocab_size": config.vocab_size,
        "block_count": config.num_hidden_layers,
        "context_length": _first(config, "max_position_embeddings", "model_max_length"),
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "rope.freq_base": full.get("rope_theta"),
        "rope.freq_base_swa": rope.get("sliding_attention", {}).get("rope_theta"),
        "attention.layer_norm_rms_epsilon": _first(config, "rms_norm_eps", "norm_eps"),
        "attention.layer_norm_epsilon": _first(config, "layer_norm_eps", "norm_epsilon"),
        "expert_count": _first(config, "num_local_experts", "num_experts", "n_routed_experts"),
        "expert_used_count": _first(config, "num_experts_per_tok", "num_experts_per_token", "top_k_experts"),
        "expert_group_count": _first(config, "n_group"),
        "expert_group_used_count": _first(config, "topk_group"),
        "attention.key_length": (head_dim := _first(config, "head_dim")),
        "attention.value_length": head_dim,
    }
    if full.get("rope_type") == "yarn":
        found["rope.scaling.type"], found["rope.scaling.factor"] = "yarn", full["factor"]
        found["rope.scaling.original_context_length"] = full["original_max_position_embeddings"]
    return found


def _is_sliding(config: Any) -> list[bool]:
    return [kind == "sliding_attention" for kind in config.layer_types]


def _delta_keys(config: Any) -> dict[str, Any]:
    rotated = config.rope_parameters.get("partial_rotary_factor", 0.25)
    return {
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_value_head_dim * config.linear_num_value_heads,
        "attention.recurrent_layers": [kind == "linear_attention" for kind in config.layer_types],
        "full_attention_interval": _first(config, "full_attention_interval") or 4,
        "rope.dimension_count": int(config.head_dim * rotated),
    }


_SECTIONS = {"rope.dimension_sections": [11, 11, 10, 0]}


def _moe_keys(config: Any) -> dict[str, Any]:
    return {
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_feed_forward_length": _first(config, "shared_expert_intermediate_size"),
    }


def full_sizes(config: Any) -> dict[str, int]:
    """Return the sizes of the heads of Gemma 4's layers with full attention."""
    return next(iter(config.per_layer_config.values()))


def _gemma3n_keys(config: Any) -> dict[str, Any]:
    zeros = torch.tensor(config.activation_sparsity_pattern)
    sparse = torch.distributions.Normal(0, 1).icdf(zeros).tolist()
    return {
        "final_logit_softcapping": config.final_logit_softcapping,
        "altup.active_idx": config.altup_active_idx,
        "altup.num_inputs": config.altup_num_inputs,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "activation_sparsity_scale": sparse,
        **_window_keys(config),
    }


def _gemma4_keys(config: Any) -> dict[str, Any]:
    layers, shared = config.num_hidden_layers, config.num_kv_shared_layers
    sizes = full_sizes(config)
    few = sizes.get("num_key_value_heads")
    inner = config.intermediate_size
    widths = [inner if layer < layers - shared else 2 * inner for layer in range(layers)]
    heads = [config.num_key_value_heads if slides else few for slides in _is_sliding(config)]
    return {
        "final_logit_softcapping": config.final_logit_softcapping,
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": _is_sliding(config),
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "attention.key_length": sizes["head_dim"],
        "attention.value_length": sizes["head_dim"],
        "attention.key_length_swa": config.head_dim,
        "attention.value_length_swa": config.head_dim,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "feed_forward_length": widths if config.use_double_wide_mlp else inner,
        "attention.head_count_kv": heads if few else config.num_key_value_heads,
        "rope.dimension_count": sizes["head_dim"],
        "rope.dimension_count_swa": config.head_dim,
    }


def _lfm2_keys(config: Any) -> dict[str, Any]:
    heads = config.num_key_value_heads
    inner = config.intermediate_size
    if _first(config, "block_auto_adjust_ff_dim"):
        multiple = config.block_multiple_of
        inner = multiple * -(-int(2 * inner / 3) // multiple)
    return {
        "attention.head_count_kv": [heads if kind == "full_attention" else 0 for kind in config.layer_types],
        "shortconv.l_cache": config.conv_L_cache,
        "feed_forward_length": inner,
    }


def _lfm2_moe_keys(config: Any) -> dict[str, Any]:
    return {
        **_lfm2_keys(config),
        **_moe_keys(config),
        "leading_dense_block_count": config.num_dense_layers,
        "expert_gating_func": 2,
    }


def _granite_keys(config: Any) -> dict[str, Any]:
    return {
        "rope.dimension_count": config.hidden_size // config.num_attention_heads,
        "attention.scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
    }


def _granite_hybrid_keys(config: Any) -> dict[str, Any]:
    attends = [kind in ("attention", "full_attention") for kind in config.layer_types]
    return {
        **_granite_keys(config),
        "context_length": 1 << 20,
        "expert_shared_feed_forward_length": config.shared_intermediate_size,
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.state_size": config.mamba_d_state,
        "ssm.group_count": config.mamba_n_groups,
        "ssm.inner_size": config.mamba_expand * config.hidden_size,
        "ssm.time_step_rank": config.mamba_n_heads,
        "attention.head_count_kv": [config.num_key_value_heads if each else 0 for each in attends],
        "rope.scaling.finetuned": False,
    }


def _nemotron_h_keys(config: Any) -> dict[str, Any]:
    types, kv_heads = config.layers_block_type, config.num_key_value_heads
    inner, width = ("moe", config.moe_intermediate_size), config.mamba_head_dim * config.mamba_num_heads
    if "moe" not in types:
        inner = ("mlp", config.intermediate_size)
    found = {
        "context_length": 1 << 20,
        "rope.dimension_count": config.hidden_size // config.num_attention_heads,
        "rope.scaling.finetuned": False,
        "attention.layer_norm_epsilon": config.layer_norm_epsilon,
        "attention.head_count_kv": [kv_heads if kind == "full_attention" else 0 for kind in types],
        "feed_forward_length": [inner[1] if kind == inner[0] else 0 for kind in types],
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.state_size": config.ssm_state_size,
        "ssm.group_count": config.n_groups,
        "ssm.inner_size": width,
        "ssm.time_step_rank": config.mamba_num_heads,
        "rope.freq_base": None,
    }
    if "moe" in types:
        found |= {
            "expert_feed_forward_length": config.moe_intermediate_size,
            "expert_shared_feed_forward_length": config.moe_shared_expert_intermediate_size,
            "expert_shared_count": config.n_shared_experts,
            "expert_weights_scale": config.routed_scaling_factor,
            "expert_weights_norm": config.norm_topk_prob,
            "moe_latent_size": config.moe_latent_size,
        }
        return found
    names = ("expert_count", "expert_used_count", "expert_group_count", "expert_group_used_count")
    return found | dict.fromkeys(names)


def _mistral3_keys(config: Any) -> dict[str, Any]:
    rope = config.rope_parameters
    found = {"rope.dimension_count": config.head_dim}
    if config.model_type == "ministral3":
        found["rope.scaling.yarn_log_multiplier"] = rope["mscale_all_dim"]
        found["attention.temperature_scale"] = rope["llama_4_scaling_beta"]
    return found


def _window_keys(config: Any) -> dict[str, Any]:
    if getattr(config, "sliding_window", None) is None:
        return {}
    window = {"attention.sliding_window": config.sliding_window}
    return window | {"attention.sliding_window_pattern": _is_sliding(config)}


def _routed_keys(config: Any) -> dict[str, Any]:
    return {
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_count": config.n_shared_experts,
        "leading_dense_block_count": _first(config, "first_k_dense_replace") or 1,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_weights_norm": _first(config, "norm_topk_prob") or None,
    }


def _glm4_moe_keys(config: Any) -> dict[str, Any]:
    rotated = int(config.head_dim * config.rope_parameters["partial_rotary_factor"])
    return {**_routed_keys(config), "expert_gating_func": 2, "rope.dimension_count": rotated}


def _deepseek2_keys(config: Any) -> dict[str, Any]:
    rank, rotated = config.kv_lora_rank, config.qk_rope_head_dim
    found = {
        **_routed_keys(config),
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rotated,
        "attention.value_length": rank,
        "attention.key_length_mla": config.qk_nope_head_dim + rotated,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": rotated,
    }
    if config.model_type != "deepseek_v2":
        found["expert_gating_func"] = 2
    if scale := config.rope_parameters.get("mscale_all_dim"):
        found["rope.scaling.yarn_log_multiplier"] = 0.1 * scale
    return found


def _llama4_keys(config: Any) -> dict[str, Any]:
    return {
        "feed_forward_length": config.intermediate_size_mlp,
        "expert_feed_forward_length": config.intermediate_size,
        "interleave_moe_layer_step": config.interleave_moe_layer_step,
        "rope.dimension_count": config.head_dim,
    }


def _kimi_linear_keys(config: Any) -> dict[str, Any]:
    rotated = config.qk_rope_head_dim
    return {
        "attention.head_count_kv": [int(kind == "full_attention") for kind in config.layer_types],
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.key_length": config.kv_lora_rank + rotated,
        "attention.key_length_mla": config.qk_nope_head_dim + rotated,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": rotated,
        "rope.freq_base": 10000.0,
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "kda.head_dim": config.linear_head_dim,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_count": config.num_shared_experts,
        "expert_gating_func": 2,
        "expert_weights_scale": config.routed_scaling_factor,
        "leading_dense_block_count": config.mlp_layer_types.count("dense"),
    }


def _sections_keys(config: Any) -> dict[str, Any]:
    """Return the keys of a vision-language model's text part."""
    sections = [*config.rope_parameters["mrope_section"], 0]
    depths = getattr(config.vision_config, "deepstack_visual_indexes", None)
    return {
        "rope.dimension_sections": sections,
        "n_deepstack_layers": None if depths is None else len(depths),
    }


def _hunyuan_moe_keys(config: Any) -> dict[str, Any]:
    width = config.intermediate_size
    return {
        "expert_used_count": config.moe_topk,
        "expert_feed_forward_length": width,
        "expert_shared_feed_forward_length": width,
        "expert_shared_count": 1,
    }


def _falcon_h1_keys(config: Any) -> dict[str, Any]:
    head_dim = config.hidden_size // config.num_attention_heads
    return {
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.state_size": config.mamba_d_state,
        "ssm.group_count": config.mamba_n_groups,
        "ssm.inner_size": config.mamba_d_ssm,
        "ssm.time_step_rank": config.mamba_n_heads,
    }


def llama3_factors(config: Any) -> np.ndarray:
    """Return the factor of each rotary frequency with the scaling of Llama 3."""
    head_dim = _first(config, "head_dim") or config.hidden_size // config.num_attention_heads
    found = transformers.LlamaConfig(head_dim=head_dim, rope_parameters=config.rope_parameters)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](found, "cpu")
    steps = torch.arange(0, 2 * len(scaled), 2) / (2 * len(scaled))
    return (config.rope_parameters["rope_theta"] ** -steps / scaled).numpy()


def _ernie_moe_keys(config: Any) -> dict[str, Any]:
    return {
        "expert_count": config.moe_num_experts,
        "expert_used_count": config.moe_k,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_count": config.moe_num_shared_experts,
        "expert_shared_feed_forward_length": config.intermediate_size // config.moe_num_shared_experts,
        "leading_dense_block_count": config.moe_layer_start_index,
        "interleave_moe_layer_step": config.moe_layer_interval,
    }


_KEYS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "llama": lambda config: {"rope.dimension_count": config.hidden_size // config.num_attention_heads},
    "llama4": _llama4_keys,
    "qwen2moe": _moe_keys,
    "qwen3moe": _moe_keys,
    "qwen3next": lambda config: _delta_keys(config) | _moe_keys(config),
    "qwen35": lambda config: _delta_keys(config) | _SECTIONS,
    "qwen2vl": _sections_keys,
    "qwen3vl": _sections_keys,
    "qwen3vlmoe": lambda config: _sections_keys(config) | _moe_keys(config),
    "hunyuan-moe": _hunyuan_moe_keys,
    "apertus": lambda config: {"rope.dimension_count": config.hidden_size // config.num_attention_heads},
    "falcon-h1": _falcon_h1_keys,
    "qwen35moe": lambda config: _delta_keys(config) | _moe_keys(config) | _SECTIONS,
    "gpt-oss": lambda config: {
        "attention.sliding_window": config.sliding_window,
        "expert_feed_forward_length": config.intermediate_size,
    },
    "gemma3n": _gemma3n_keys,
    "gemma4": _gemma4_keys,
    "lfm2": _lfm2_keys,
    "lfm2moe": _lfm2_moe_keys,
    "granite": _granite_keys,
    "granitehybrid": _granite_hybrid_keys,
    "nemotron_h": _nemotron_h_keys,
    "nemotron_h_moe": _nemotron_h_keys,
    "mistral3": _mistral3_keys,
    "olmo2": _window_keys,
    "cohere2": lambda config: {
        "logit_scale": config.logit_scale,
        "attention.sliding_window": config.sliding_window,
        "rope.dimension_count": config.hidden_size // config.num_attention_heads,
        "rope.scaling.type": "none",
    },
    "smollm3": lambda config: {"rope.dimension_count": config.hidden_size // config.num_attention_heads},
    "exaone4": _window_keys,
    "glm4": lambda config: {
        "rope.dimension_count": int(config.head_dim * config.rope_parameters["partial_rotary_factor"])
    },
    "glm4moe": _glm4_moe_keys,
    "deepseek2": _deepseek2_keys,
    "kimi-linear": _kimi_linear_keys,
    "arcee": lambda config: {"rope.dimension_count": config.hidden_size // config.num_attention_heads},
    "ernie4_5-moe": _ernie_moe_keys,
    "minimax-m2": lambda config: {
        "expert_feed_forward_length": config.intermediate_size,
        "expert_gating_func": 2,
        "rope.dimension_count": int(config.head_dim * config.rope_parameters["partial_rotary_factor"]),
    },
    "stablelm": lambda config: {
        "rope.dimension_count": int(
            config.hidden_size // config.num_attention_heads * config.rope_parameters["partial_rotary_factor"]
        ),
        "use_parallel_residual": config.use_parallel_residual,
        "rope.freq_base": None,
    },
}


def keys_of(architecture: str, config: Any) -> dict[str, Any]:
    """Return the values of an architecture's keys, by their names without its prefix."""
    of_architecture = _KEYS.get(architecture, lambda config: {})(config)
    return {
        key: value for key, value in (_common_keys(config) | of_architecture).items() if value is not None
    }

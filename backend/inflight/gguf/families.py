"""Reads the keys of single architectures of GGUF files, as keys of their families' config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import NormalDist

from inflight.gguf.keys import ArchitectureKeys
from inflight.gguf.parts import (
    SIGMOID,
    SOFTMAX,
    read_experts,
    read_granite_factors,
    read_latent_attention,
    read_layer_types,
    read_normalized_experts,
    read_routed_experts,
    shared_expert_width,
)
from inflight.gguf.recurrent_families import RECURRENT_READERS
from inflight.gguf.rope import read_scaling
from inflight.json_values import Json

_BIGGEST_GEMMA = {"gemma2": 46, "gemma3": 62}
"""Number of layers of the 27B models, whose attention scale is computed from hidden_size / heads."""

XIELU = ("xielu.alpha_p", "xielu.alpha_n", "xielu.beta", "xielu.eps")
"""Keys of a file with the parameters of the activation xIELU; they do not have the architecture's prefix."""
PARTLY_ROTATED = ("phi3", "qwen35", "qwen35moe", "qwen3next", "glm4", "glm4moe", "stablelm")
"""Architectures whose heads may be rotated in part, by `partial_rotary_factor`."""
OWN_HEADS = ("gemma4", "deepseek2", "kimi-linear", "minimax-m2", "nemotron_h", "nemotron_h_moe")
"""Architectures whose readers read the sizes of heads themselves."""


def _llama(section: ArchitectureKeys) -> Json:
    """Return the keys of Llama, Mistral and Mixtral, which have the same architecture name in GGUF files."""
    if section.size_or_none("expert_count") is None:
        return {"attention_bias": section.has_tensor("attn_q.bias")}
    section.expect("expert_gating_func", None, SOFTMAX)
    counts = {
        "num_local_experts": section.size("expert_count"),
        "num_experts_per_tok": section.size("expert_used_count"),
    }
    return {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], **counts}


def _llama4(section: ArchitectureKeys) -> Json:
    """Return the keys of Llama 4.

    A file does not state the layers without positions, the chunks and the temperature of attention, and whether
    queries and keys are normalized. They are as in llama.cpp, which has the published models' values in its code.
    """
    section.expect("expert_gating_func", None, SIGMOID)
    section.expect("attention.sliding_window", None)  # 0 in files of MobileLLM, which has no experts
    num_experts = section.size("expert_count")
    return {
        "head_dim": section.size("attention.key_length"),
        "intermediate_size": section.largest("expert_feed_forward_length"),
        "intermediate_size_mlp": section.largest("feed_forward_length"),
        "num_local_experts": num_experts,
        "num_experts_per_tok": section.size("expert_used_count"),
        "interleave_moe_layer_step": section.size("interleave_moe_layer_step"),
        "use_qk_norm": num_experts != 128,  # the number of Maverick's
        "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    }


def _phi3(section: ArchitectureKeys) -> Json:
    original = section.size_or_none("rope.scaling.original_context_length")
    return {
        "sliding_window": section.size_or_none("attention.sliding_window"),
        "original_max_position_embeddings": original or section.size("context_length"),
    }


def _gemma(section: ArchitectureKeys) -> Json:
    """Return the keys of Gemma 2 and 3. The scale of attention is derived, because the file does not state it."""
    architecture = section.header.architecture
    head_dim, num_heads = section.size("attention.key_length"), section.size("attention.head_count")
    is_biggest = section.num_layers == _BIGGEST_GEMMA[architecture]
    config: Json = {
        "head_dim": head_dim,
        "query_pre_attn_scalar": section.size("embedding_length") // num_heads if is_biggest else head_dim,
        "sliding_window": section.size("attention.sliding_window"),
        "attn_logit_softcapping": section.number_or_none("attn_logit_softcapping"),
        "final_logit_softcapping": section.number_or_none("final_logit_softcapping"),
    }
    if architecture == "gemma3":
        config["rope_local_base_freq"] = section.number_or_none("rope.freq_base_swa") or 10000.0
        config["rope_theta"] = section.number_or_none("rope.freq_base") or 1e6
    return config


def _qwen2_moe(section: ArchitectureKeys) -> Json:
    section.expect("expert_weights_norm", None, False)
    section.expect("expert_weights_scale", None, 0.0, 1.0)
    shared = {"shared_expert_intermediate_size": shared_expert_width(section)}
    return {**read_experts(section), **shared, "norm_topk_prob": False}


def _gpt_oss(section: ArchitectureKeys) -> Json:
    section.expect("expert_gating_func", None, 3)
    theta, scaling = section.number("rope.freq_base"), read_scaling(section) or {"rope_type": "default"}
    if scaling["rope_type"] == "yarn":
        scaling["truncate"] = False  # as in all published models
    return {
        "num_local_experts": section.size("expert_count"),
        "num_experts_per_tok": section.size("expert_used_count"),
        "intermediate_size": section.largest("expert_feed_forward_length"),
        "sliding_window": section.size("attention.sliding_window"),
        "layer_types": read_layer_types(section, every=2),
        "rope_scaling": None,
        "rope_parameters": {"rope_theta": theta, **scaling},
    }


def _gemma3n(section: ArchitectureKeys) -> Json:
    """Return the keys of Gemma 3n. The file has each layer's quantile instead of its fraction of zero gates."""
    tensors, normal = section.header.tensors, NormalDist()
    quantiles = (
        section.numbers(section.name("activation_sparsity_scale")) or [float("-inf")] * section.num_layers
    )
    inputs, laurel = tensors.get("per_layer_token_embd.weight"), tensors.get("blk.0.laurel_l.weight")
    if inputs is None or laurel is None:
        raise section.keys.error(
            "general.architecture", "tensors of per-layer embeddings and low-rank branches"
        )
    return {
        "head_dim": section.size("attention.key_length"),
        "intermediate_size": section.of_layers("feed_forward_length"),
        "layer_types": read_layer_types(section, every=5),
        "num_kv_shared_layers": section.count("attention.shared_kv_layers"),
        "sliding_window": section.size("attention.sliding_window"),
        "hidden_size_per_layer_input": section.size("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": inputs.shape[0],
        "altup_num_inputs": section.size("altup.num_inputs"),
        "altup_active_idx": section.count("altup.active_idx"),
        "altup_correct_scale": section.has_tensor("altup_correct_scale.weight"),
        "laurel_rank": laurel.shape[0],
        "activation_sparsity_pattern": [
            round(normal.cdf(each), 6) if each > float("-inf") else 0.0 for each in quantiles
        ],
        "final_logit_softcapping": section.number_or_none("final_logit_softcapping"),
        "rope_local_base_freq": section.number_or_none("rope.freq_base_swa") or 10000.0,
        "rope_theta": section.number_or_none("rope.freq_base") or 1e6,
    }


def _gemma4(section: ArchitectureKeys) -> Json:
    """Return the keys of Gemma 4, whose full layers have wider and fewer heads than the others."""
    types = read_layer_types(section, every=6)
    kv_heads = section.of_layers("attention.head_count_kv") or []
    widths = section.of_layers("feed_forward_length") or []
    wide, narrow = section.size("attention.key_length"), section.size("attention.key_length_swa")
    section.expect("attention.value_length", None, wide)
    section.expect("attention.value_length_swa", None, narrow)
    section.expect("rope.dimension_count", None, wide)
    section.expect("rope.dimension_count_swa", None, narrow)
    full = [layer for layer, kind in enumerate(types) if kind == "full_attention"]
    factors = section.header.numbers("rope_freqs.weight") or [1.0] * (wide // 2)
    rotated = sum(factor == 1 for factor in factors)  # the others are too large for any rotation
    inputs = section.header.tensors.get("per_layer_token_embd.weight")
    config: Json = {
        "head_dim": narrow,
        "num_key_value_heads": next(
            (kv_heads[layer] for layer, kind in enumerate(types) if kind == "sliding_attention"), kv_heads[0]
        ),
        "per_layer_config": {
            str(layer): {"head_dim": wide, "num_key_value_heads": kv_heads[layer]} for layer in full
        },
        "attention_k_eq_v": not any(f"blk.{layer}.attn_v.weight" in section.header.tensors for layer in full),
        "intermediate_size": min(widths),
        "use_double_wide_mlp": max(widths) != min(widths),
        "layer_types": types,
        "num_kv_shared_layers": section.count("attention.shared_kv_layers"),
        "sliding_window": section.size("attention.sliding_window"),
        "hidden_size_per_layer_input": section.count("embedding_length_per_layer_input"),
        "final_logit_softcapping": section.number_or_none("final_logit_softcapping"),
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": section.number_or_none("rope.freq_base") or 1e6,
                "partial_rotary_factor": 2 * rotated / wide,
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": section.number_or_none("rope.freq_base_swa") or 1e4,
            },
        },
        "rope_scaling": None,
        "rope_theta": None,
    }
    if inputs is not None:
        config["vocab_size_per_layer_input"] = inputs.shape[0]
    if section.size_or_none("expert_count") is not None:
        experts = read_experts(section)
        config["top_k_experts"] = experts.pop("num_experts_per_tok")
        config.update(experts, enable_moe_block=True)
    return config


def _granite(section: ArchitectureKeys) -> Json:
    return {**read_granite_factors(section), "mlp_bias": section.has_tensor("ffn_up.bias")}


def _mistral3(section: ArchitectureKeys) -> Json:
    """Return the keys of Ministral 3; of a Mistral Small 3 in a file without a temperature of attention."""
    growth = section.number_or_none("attention.temperature_scale")
    if growth is None:
        return {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None}
    scaling = {**(read_scaling(section) or {"rope_type": "default"}), "llama_4_scaling_beta": growth}
    return {"rope_scaling": scaling, "sliding_window": None}


def _olmo2(section: ArchitectureKeys) -> Json:
    """Return the keys of OLMo 2, or of OLMo 3, which has windows and scales only the layers without."""
    window = section.size_or_none("attention.sliding_window")
    if window is None:
        return {"attention_bias": section.has_tensor("attn_q.bias")}
    theta = section.number_or_none("rope.freq_base") or 10000.0
    return {
        "model_type": "olmo3",
        "architectures": ["Olmo3ForCausalLM"],
        "sliding_window": window,
        "layer_types": read_layer_types(section, every=4),
        "rope_theta": None,
        "rope_scaling": None,
        "rope_parameters": {
            "full_attention": {"rope_theta": theta, **(read_scaling(section) or {"rope_type": "default"})},
            "sliding_attention": {
                "rope_theta": section.number_or_none("rope.freq_base_swa") or theta,
                "rope_type": "default",
            },
        },
    }


def _olmoe(section: ArchitectureKeys) -> Json:
    section.expect("expert_gating_func", None, SOFTMAX)
    section.expect("expert_weights_norm", None, False)
    return {
        "num_experts": section.size("expert_count"),
        "num_experts_per_tok": section.size("expert_used_count"),
        "norm_topk_prob": False,
    }


def _cohere2(section: ArchitectureKeys) -> Json:
    return {
        "layer_norm_eps": section.number("attention.layer_norm_epsilon"),
        "logit_scale": section.number("logit_scale"),
        "sliding_window": section.size("attention.sliding_window"),
        "layer_types": read_layer_types(section, every=4),
    }


def _exaone4(section: ArchitectureKeys) -> Json:
    window = section.size_or_none("attention.sliding_window")
    types = ["full_attention"] * section.num_layers if window is None else read_layer_types(section, every=4)
    return {"sliding_window": window, "layer_types": types}


def _glm4(section: ArchitectureKeys) -> Json:
    return {"attention_bias": section.has_tensor("attn_q.bias")}


def _glm4_moe(section: ArchitectureKeys) -> Json:
    return {
        **read_routed_experts(section, SIGMOID),
        "norm_topk_prob": section.boolean("expert_weights_norm", True),
        "attention_bias": section.has_tensor("attn_q.bias"),
        "use_qk_norm": section.has_tensor("attn_q_norm.weight"),
        "num_nextn_predict_layers": 0,  # draft layers are left out
    }


def _deepseek2(section: ArchitectureKeys) -> Json:
    """Return the keys of DeepSeek V2, or of V3, which has a bias for the choice of experts."""
    latent = read_latent_attention(section)
    if section.keys.has(section.name("attention.value_length_mla")):
        section.expect("attention.value_length", None, latent["kv_lora_rank"])
    if section.has_tensor("exp_probs_b.bias"):
        norm = {
            "norm_topk_prob": section.boolean("expert_weights_norm", False),
            "num_nextn_predict_layers": 0,
        }
        return {**latent, **read_routed_experts(section, SIGMOID), **norm}
    section.expect("expert_weights_norm", None, False)
    experts = read_routed_experts(section, SOFTMAX)
    method = "group_limited_greedy" if experts["n_group"] > 1 else "greedy"
    classes = {"model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"]}
    return {**latent, **experts, **classes, "topk_method": method}


def _hunyuan_dense(section: ArchitectureKeys) -> Json:
    """Return the keys of a dense Hunyuan, in whose files the base of positions is already stretched."""
    section.expect("rope.scaling.factor", None, 1.0)
    return {"attention_bias": section.has_tensor("attn_q.bias")}


def _hunyuan_moe(section: ArchitectureKeys) -> Json:
    section.expect("expert_shared_count", None, 1)
    config = {**_hunyuan_dense(section), **read_experts(section)}
    section.expect("expert_shared_feed_forward_length", None, config["moe_intermediate_size"])
    return config


def _seed_oss(section: ArchitectureKeys) -> Json:
    return {
        "attention_bias": section.has_tensor("attn_q.bias"),
        "attention_out_bias": section.has_tensor("attn_output.bias"),
    }


def _arcee(section: ArchitectureKeys) -> Json:
    return {
        "attention_bias": section.has_tensor("attn_q.bias"),
        "mlp_bias": section.has_tensor("ffn_up.bias"),
    }


def _apertus(section: ArchitectureKeys) -> Json:
    """Return the keys of Apertus. `gguf_tensors.py` reads the parameters of its activation, keys of the file."""
    for name in XIELU:
        if section.numbers(name) is None:
            raise section.keys.error(name, "a number for each layer")
    theta = section.number_or_none("rope.freq_base") or 10000.0
    return {
        "attention_bias": section.has_tensor("attn_q.bias"),
        "rope_scaling": None,
        "rope_parameters": {"rope_theta": theta, **(read_scaling(section) or {"rope_type": "default"})},
    }


def _ernie(section: ArchitectureKeys) -> Json:
    return {"use_bias": section.has_tensor("attn_q.bias")}


def _ernie_moe(section: ArchitectureKeys) -> Json:
    experts = read_experts(section, "moe_num_experts")
    section.size("expert_shared_count")  # some files state another number
    experts["moe_k"] = experts.pop("num_experts_per_tok")
    width = experts["moe_intermediate_size"]
    return {
        **experts,
        "moe_num_shared_experts": shared_expert_width(section) // width,
        "moe_layer_start_index": section.count("leading_dense_block_count"),
        "moe_layer_interval": section.size_or_none("interleave_moe_layer_step") or 1,
    }


def _minimax_m2(section: ArchitectureKeys) -> Json:
    section.expect("expert_gating_func", None, SIGMOID)
    head_dim = section.size("attention.key_length")
    section.expect("attention.value_length", None, head_dim)
    return {
        "num_local_experts": section.size("expert_count"),
        "num_experts_per_tok": section.size("expert_used_count"),
        "intermediate_size": section.largest("expert_feed_forward_length"),
        "head_dim": head_dim,
        "rotary_dim": section.size("rope.dimension_count"),
    }


def _starcoder2(section: ArchitectureKeys) -> Json:
    return {
        "norm_epsilon": section.number("attention.layer_norm_epsilon"),
        "use_bias": section.has_tensor("attn_q.bias"),
        "sliding_window": None,
    }


def _stablelm(section: ArchitectureKeys) -> Json:
    return {
        "layer_norm_eps": section.number("attention.layer_norm_epsilon"),
        "use_qkv_bias": section.has_tensor("attn_q.bias"),
        "use_parallel_residual": section.boolean("use_parallel_residual", False),
        "qk_layernorm": section.has_tensor("attn_q_norm.weight"),
    }


READERS: Mapping[str, Callable[[ArchitectureKeys], Json]] = {
    "llama": _llama,
    "llama4": _llama4,
    "phi3": _phi3,
    "gemma2": _gemma,
    "gemma3": _gemma,
    "qwen2moe": _qwen2_moe,
    "qwen3moe": read_normalized_experts,
    "qwen3vlmoe": read_normalized_experts,
    "gpt-oss": _gpt_oss,
    "gemma3n": _gemma3n,
    "gemma4": _gemma4,
    "granite": _granite,
    "mistral3": _mistral3,
    "olmo2": _olmo2,
    "olmoe": _olmoe,
    "cohere2": _cohere2,
    "exaone4": _exaone4,
    "glm4": _glm4,
    "glm4moe": _glm4_moe,
    "deepseek2": _deepseek2,
    "hunyuan-dense": _hunyuan_dense,
    "hunyuan-moe": _hunyuan_moe,
    "seed_oss": _seed_oss,
    "arcee": _arcee,
    "apertus": _apertus,
    "ernie4_5": _ernie,
    "ernie4_5-moe": _ernie_moe,
    "minimax-m2": _minimax_m2,
    "starcoder2": _starcoder2,
    "stablelm": _stablelm,
    **RECURRENT_READERS,
}

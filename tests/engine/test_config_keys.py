"""Every key of config.json, one at a time: the logits are transformers' own, or the key is refused by name.

Keys are those of the family's configuration class in transformers, and some that only checkpoints have. Each is
removed, set to null and to other values, in the configuration of a small model with windows if the family has
them; the weights are drawn for the model that transformers then creates.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig

from inflight.errors import ConfigError
from inflight.models import FAMILIES, ModelDescription, read_model_description
from tests.engine.driver import Row, alone, load_engine
from tests.models.zoo import slow_decays
from tests.tiers import with_all

TOLERANCE = 1e-4
NUM_LAYERS = 2
PROMPT = tuple(7 * i % 53 + 3 for i in range(30))

_LLAMA_LIKE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LAYER_NORM = {key: value for key, value in _LLAMA_LIKE.items() if key != "rms_norm_eps"}
_WINDOWS = {"sliding_window": 9}
_GEMMA = {
    **{key: value for key, value in _LLAMA_LIKE.items() if key != "hidden_act"},
    **_WINDOWS,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 9,
    "pad_token_id": 0,
}
_GEMMA4 = {
    **{key: value for key, value in _GEMMA.items() if key != "query_pre_attn_scalar"},
    "layer_types": ["sliding_attention", "full_attention"],
    "num_key_value_heads": 4,
    "num_global_key_value_heads": 2,
    "global_head_dim": 16,
    "attention_k_eq_v": True,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": 61,
    "final_logit_softcapping": 9.0,
}
_GEMMA3N = {
    **{key: value for key, value in _GEMMA.items() if key != "query_pre_attn_scalar"},
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": 61,
    "altup_num_inputs": 3,
    "altup_active_idx": 0,
    "altup_correct_scale": True,
    "laurel_rank": 5,
    "activation_sparsity_pattern": [0.6, 0.0, 0.4, 0.0],
    "final_logit_softcapping": 9.0,
}
_DEEPSEEK = {
    **{key: value for key, value in _LLAMA_LIKE.items() if key != "head_dim"},
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "attention_bias": False,
}
_GRANITE_SCALES = {
    "embedding_multiplier": 2.0,
    "logits_scaling": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.3,
}
_WINDOWS_IF_USED = {**_WINDOWS, "use_sliding_window": True, "max_window_layers": 1}
_DELTA = {
    **_LLAMA_LIKE,
    "initializer_range": 0.2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 3,
    "attention_bias": False,
    "pad_token_id": 0,
}
_SMALL_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_SHORT_CONV = {
    **{
        key: value
        for key, value in _LLAMA_LIKE.items()
        if key not in ("rms_norm_eps", "hidden_act", "head_dim")
    },
    "layer_types": ["conv", "full_attention"],
    "norm_eps": 1e-5,
    "conv_L_cache": 3,
    "conv_bias": False,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**_LLAMA_LIKE, "attention_bias": False, "mlp_bias": False},
    "mistral": {**_LLAMA_LIKE, **_WINDOWS},
    "ministral": {**_LLAMA_LIKE, **_WINDOWS, "layer_types": ["full_attention", "sliding_attention"]},
    "ministral3": {
        **_LLAMA_LIKE,
        "head_dim": 8,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 2.0,
            "original_max_position_embeddings": 64,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "qwen2": {**_LLAMA_LIKE, **_WINDOWS_IF_USED},
    "qwen3": {**_LLAMA_LIKE, **_WINDOWS_IF_USED, "attention_bias": False},
    "gpt2": {
        "vocab_size": 61,
        "n_embd": 32,
        "n_layer": NUM_LAYERS,
        "n_head": 4,
        "n_positions": 64,
        "n_inner": 48,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.3,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "phi3": {**_LLAMA_LIKE, **_WINDOWS, "original_max_position_embeddings": 64, "pad_token_id": 0},
    "arcee": {**_LLAMA_LIKE, "hidden_act": "relu2", "attention_bias": False, "mlp_bias": False},
    "seed_oss": {
        **_LLAMA_LIKE,
        "attention_bias": True,
        "attention_out_bias": False,
        "mlp_bias": False,
        "pad_token_id": 0,
    },
    "olmo2": {**_LLAMA_LIKE, "attention_bias": False, "pad_token_id": 0},
    "olmo3": {
        **_LLAMA_LIKE,
        **_WINDOWS,
        "layer_types": ["sliding_attention", "full_attention"],
        "attention_bias": False,
        "pad_token_id": 0,
    },
    "exaone4": {**_LLAMA_LIKE, **_WINDOWS, "layer_types": ["sliding_attention", "full_attention"]},
    "glm4": {**_LLAMA_LIKE, "attention_bias": True, "pad_token_id": 0},
    "ernie4_5": {**_LLAMA_LIKE, "use_bias": True, "pad_token_id": 0},
    "hunyuan_v1_dense": {**_LLAMA_LIKE, "attention_bias": False, "pad_token_id": 0},
    "stablelm": {
        **_LAYER_NORM,
        "layer_norm_eps": 1e-5,
        "use_qkv_bias": True,
        "qk_layernorm": False,
        "use_parallel_residual": False,
        "partial_rotary_factor": 0.5,
    },
    "starcoder2": {
        **_LAYER_NORM,
        **_WINDOWS,
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": 1e-5,
        "use_bias": True,
    },
    "cohere2": {
        **_LAYER_NORM,
        **_WINDOWS,
        "layer_types": ["sliding_attention", "full_attention"],
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.5,
        "attention_bias": False,
        "pad_token_id": 0,
    },
    "llama4_text": {
        **_LLAMA_LIKE,
        "intermediate_size": 24,
        "intermediate_size_mlp": 40,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_layers": [1],
        "no_rope_layers": [1, 0],
        "attention_chunk_size": 9,
        "floor_scale": 6,
        "attn_scale": 0.4,
        "attention_bias": False,
        "pad_token_id": 0,
    },
    "apertus": {**_LLAMA_LIKE, "hidden_act": "xielu", "attention_bias": False, "pad_token_id": 0},
    "granite": {**_LLAMA_LIKE, **_GRANITE_SCALES},
    "granite_swa": {
        **_LLAMA_LIKE,
        **_GRANITE_SCALES,
        **_WINDOWS,
        "layer_types": ["sliding_attention", "full_attention"],
        "layer_rope_theta": [500.0, 0],
    },
    "granitemoe_swa": {
        **_LLAMA_LIKE,
        **_GRANITE_SCALES,
        **_WINDOWS,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 24,
        "pad_token_id": 0,
    },
    "smollm3": {
        **_LLAMA_LIKE,
        **_WINDOWS,
        "use_sliding_window": True,
        "no_rope_layer_interval": 2,
        "pad_token_id": 0,
    },
    "mixtral": {**_LLAMA_LIKE, **_WINDOWS, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        **_LLAMA_LIKE,
        **_WINDOWS_IF_USED,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "mlp_only_layers": [0],
    },
    "qwen3_moe": {
        **_LLAMA_LIKE,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
    "olmoe": {**_LLAMA_LIKE, "num_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0},
    "minimax_m2": {**_LLAMA_LIKE, "num_local_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": {
        **_LLAMA_LIKE,
        "attention_bias": False,
        "use_qk_norm": True,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
        "norm_topk_prob": True,
    },
    "ernie4_5_moe": {
        **_LLAMA_LIKE,
        "use_bias": False,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 24,
        "moe_num_shared_experts": 1,
        "pad_token_id": 0,
    },
    "hunyuan_v1_moe": {
        **_LLAMA_LIKE,
        "attention_bias": False,
        "num_experts": 4,
        "moe_topk": 2,
        "pad_token_id": 0,
    },
    "deepseek_v2": {**_DEEPSEEK, "topk_method": "group_limited_greedy", "mlp_bias": False},
    "deepseek_v3": {**_DEEPSEEK, "norm_topk_prob": True, "rope_interleave": True},
    "glm4_moe_lite": {
        **{key: value for key, value in _DEEPSEEK.items() if key != "first_k_dense_replace"},
        "norm_topk_prob": True,
        "rope_interleave": True,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "gemma2": {**_GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 9.0},
    "gemma3_text": {**_GEMMA, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma3n_text": _GEMMA3N,
    "gemma4_text": _GEMMA4,
    "gpt_neox": {
        "vocab_size": 61,
        "hidden_size": 32,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "gpt_oss": {
        **_LLAMA_LIKE,
        **_WINDOWS,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "swiglu_limit": 2.0,
        "pad_token_id": 0,
    },
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": {**_DELTA, **_SMALL_EXPERTS, "shared_expert_intermediate_size": 40},
    "qwen3_next": {**_DELTA, **_SMALL_EXPERTS, "shared_expert_intermediate_size": 40, "norm_topk_prob": True},
    "granitemoehybrid": {
        **_LLAMA_LIKE,
        "layer_types": ["mamba", "attention"],
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 6,
        "mamba_n_groups": 2,
        "mamba_d_conv": 3,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "shared_intermediate_size": 40,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        **_GRANITE_SCALES,
        "attention_bias": False,
        "pad_token_id": 0,
    },
    "nemotron_h": {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "layer_norm_epsilon": 1e-5,
        "mlp_hidden_act": "relu2",
        "mlp_bias": False,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "mamba_hidden_act": "silu",
        "ssm_state_size": 6,
        "n_groups": 2,
        "conv_kernel": 3,
        "use_conv_bias": True,
        "use_bias": False,
        "time_step_min": 0.001,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 40,
        "moe_latent_size": 20,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "tie_word_embeddings": False,
        "initializer_range": 0.3,
        "pad_token_id": 0,
    },
    "falcon_h1": {
        **_LLAMA_LIKE,
        "mamba_d_ssm": 48,
        "mamba_n_heads": 8,
        "mamba_d_head": 6,
        "mamba_d_state": 6,
        "mamba_n_groups": 2,
        "mamba_d_conv": 3,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "projectors_bias": False,
        "mamba_norm_before_gate": False,
        "mamba_rms_norm": True,
        "attention_bias": False,
        "mlp_bias": False,
        "embedding_multiplier": 1.5,
        "lm_head_multiplier": 0.4,
        "key_multiplier": 0.7,
        "attention_in_multiplier": 1.2,
        "attention_out_multiplier": 0.8,
        "ssm_in_multiplier": 1.3,
        "ssm_out_multiplier": 0.6,
        "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
        "mlp_multipliers": [0.7, 0.9],
        "pad_token_id": 0,
    },
    "lfm2": {**_SHORT_CONV, "block_multiple_of": 16, "block_auto_adjust_ff_dim": True},
    "kimi_linear": {
        **{key: value for key, value in _LLAMA_LIKE.items() if key not in ("head_dim", "rope_theta")},
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_head_dim": 6,
        "linear_num_heads": 4,
        "linear_conv_kernel_dim": 3,
        "mlp_layer_types": ["dense", "sparse"],
        "num_experts": 8,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "moe_intermediate_size": 24,
        "moe_renormalize": True,
        "num_expert_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 1.5,
        "attention_bias": False,
        "pad_token_id": 0,
    },
    "lfm3": {
        **{key: value for key, value in _SHORT_CONV.items() if key != "rope_theta"},
        **_WINDOWS,
        "head_dim": 8,
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "sliding_attention"],
        "use_sandwich_norm": True,
        "use_attention_gate": True,
        "pad_token_id": 0,
    },
    "lfm2_moe": {**_SHORT_CONV, **_SMALL_EXPERTS, "num_dense_layers": 1, "routed_scaling_factor": 1.5},
    "opt": {
        "vocab_size": 61,
        "hidden_size": 32,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "ffn_dim": 48,
        "word_embed_proj_dim": 32,
        "max_position_embeddings": 64,
        "init_std": 0.3,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    },
}

_OF_FALCON = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "layer_norm_epsilon": 1e-5,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS |= {
    "falcon": {
        **_OF_FALCON,
        "max_position_embeddings": 64,
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
        "multi_query": False,
        "parallel_attn": True,
        "num_ln_in_parallel_attn": 2,
        "ffn_hidden_size": 48,
        "bias": False,
        "alibi": False,
    },
    "bloom": {
        **{key: value for key, value in _OF_FALCON.items() if not key.startswith("num_")},
        "n_layer": NUM_LAYERS,
        "n_head": 4,
    },
    "mistral4": {
        **{key: value for key, value in _DEEPSEEK.items() if key != "rope_theta"},
        "norm_topk_prob": True,
        "rope_interleave": True,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 2.0,
            "original_max_position_embeddings": 64,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
}

_YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_PROPORTIONAL = {"rope_type": "proportional", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
_SCALINGS = [
    {},
    {"rope_type": "default", "rope_theta": 500.0},
    {"rope_type": "default", "rope_theta": 500.0, "factor": 4.0},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
    {"type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0, "alpha": 1000.0},
    _LLAMA3,
    _YARN,
    {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.9, "beta_fast": 16, "truncate": False},
    {**_YARN, "finetuned": True},
    {**_YARN, "llama_4_scaling_beta": 0.1},
    {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
    {"full_attention": {"rope_type": "default", "rope_theta": 500.0}},
]
# Values that cannot be derived from the key's type.
VALUES: dict[str, list[Any]] = {
    "rope_parameters": [
        *_SCALINGS,
        {"full_attention": _PROPORTIONAL, "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}},
        {"full_attention": {**_PROPORTIONAL, "factor": 2.0}, "sliding_attention": _PROPORTIONAL},
    ],
    "rope_scaling": _SCALINGS,
    "layer_types": [
        ["full_attention"] * NUM_LAYERS,
        ["sliding_attention"] * NUM_LAYERS,
        ["sliding_attention", "full_attention"],
        ["sliding_attention"],
        ["chunked_attention"] * NUM_LAYERS,
    ],
    "hidden_act": ["relu", "gelu", "gelu_pytorch_tanh", "quick_gelu", "tanh", "xielu"],
    "activation_function": ["relu", "gelu", "silu", "quick_gelu", "tanh"],
    "num_attention_heads": [2, 8],
    "num_key_value_heads": [1, 4],
    "global_head_dim": [8, 32],
    "num_global_key_value_heads": [1, 4, 3],
    "num_kv_shared_layers": [1, 2],
    "hidden_size_per_layer_input": [0, 8],
    "vocab_size_per_layer_input": [61, 64, 20],
    "use_bidirectional_attention": ["all", "vision"],
    "n_head": [2, 8],
    "num_kv_heads": [1, 4, 3],
    "num_ln_in_parallel_attn": [1, 3],
    "activation": ["relu", "quick_gelu"],
    "head_dim": [4, 16],
    "max_window_layers": [0, 2, 28],
    "sliding_window": [3, 30, 4096],
    "eos_token_id": [-1, 5, [2, 5], [2, -1]],
    "pad_token_id": [-1, 5],
    "dtype": ["float32", "bfloat16"],
    "torch_dtype": ["float32", "float16"],
    "id2label": [{"0": "no", "1": "yes", "2": "maybe"}],
    "label2id": [{"no": 0, "yes": 1, "maybe": 2}],
    "problem_type": ["regression"],
    "architectures": [["GPT2LMHeadModel"], ["LlamaForCausalLM"], ["Unheard"]],
    "initializer_range": [0.5],
    "summary_activation": ["tanh"],
    # The following keys are in no class of these families: other families' keys, and keys of checkpoints only.
    "rope_theta": [500.0],
    "partial_rotary_factor": [0.5, 1.0],
    "original_max_position_embeddings": [16],
    "quantization_config": [{"quant_method": "hqq"}],
    "auto_map": [{"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}],
    "is_causal": [False, True],
    "attention_chunk_size": [8],
    "logit_scale": [0.5, 1.0],
    "final_logit_softcapping": [30.0],
    "per_layer_config": [
        {"0": {"sliding_window": 3}},
        {"1": {"head_dim": 12, "num_key_value_heads": 1}},
        {"0": {"head_dim": 12}},
    ],
    "kv_sharing_modes": [["store", "reuse"]],
    "transformers_weights": ["other.safetensors"],
    "fusion_config": [{"patch_embeddings": True}],
    "num_experts": [4],
    "topk_method": ["greedy", "noaux_tc", "other"],
    "scoring_func": ["softmax", "sigmoid"],
    "moe_layer_freq": [1, 2],
    "ep_size": [1, 8],
    "n_group": [1, 2, 8, 3],
    "topk_group": [1, 4, 8],
    "first_k_dense_replace": [0, 2, -1],
    "experts_per_token": [2, 3],
    "initial_context_length": [16],
    "rope_interleaved": [True, False],
    "n_ctx": [64, 128],
    "temperature": [0.3],
    "suppress_tokens": [[3, 4]],
    "task_specific_params": [{"text-generation": {"max_length": 50}}],
    "mlp_layer_types": [["sparse", "sparse"], ["dense", "dense"], ["dense"]],
    "moe_layers": [[0], [], [0, 1]],
    "no_rope_layers": [[0, 1], [], [1, 1], [1]],
    "layer_rope_theta": [[500.0, 50.0], [0, 0], [500.0], ["x", 1]],
    "mlp_multipliers": [[0.5, 2.0], [1.0]],
    "ssm_multipliers": [[0.5, 2.0, 1.0, 1.0, 1.0], [1.0]],
    "layers_block_type": [
        ["mamba", "moe", "attention", "mlp"],
        ["mlp", "linear_attention"],
        ["full_attention", "other"],
    ],
    "hybrid_override_pattern": ["ME*-", "M*", "M?"],
    "mtp_layers_block_type": [["attention", "mlp"]],
    "altup_num_inputs": [1, 2, 4],
    "altup_active_idx": [1, 2, 3],
    "activation_sparsity_pattern": [[0.5, 0.5, 0.0, 0.0], [0.0] * 4, [0.5], [0.5, 0.5, 1.0, 0.0], 0.5],
    "unheard_of": [1, "on", True, False, [], {}],
}


def _keys(family: str) -> list[str]:
    """Return the family's own keys, some of others and of none, and for Llama those of all families."""
    asked = [each.model_type for each in FAMILIES] if family == "llama" else [family]
    classes = [transformers.CONFIG_MAPPING[each] for each in asked]
    own = {field.name for each in classes for field in dataclasses.fields(each)}
    aliases = {name for each in classes for name in each.attribute_map}
    return sorted({*own, *aliases, *VALUES, "model_type"})


def _others(value: Any) -> list[Any]:
    """Return values of the same type."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [2 * value, value + 4]
    if isinstance(value, float):
        return [3 * value + 0.001]
    if isinstance(value, str):
        return [value + "x"]
    return [True, 2]


def _changes(family: str, key: str) -> Iterator[dict[str, Any]]:
    """Yield configurations that differ in one key."""
    config = {"model_type": family, **CONFIGS[family]}
    if key in config:
        yield {name: value for name, value in config.items() if name != key}
    usual = transformers.CONFIG_MAPPING[family]()
    differs = key in (usual.per_layer_attributes or ())  # transformers gives no value for all layers then
    default = None if differs else getattr(usual, key, None)
    for value in (None, *VALUES.get(key, _others(config.get(key, default)))):
        if key not in config or value != config[key]:
            yield {**config, key: value}


@functools.cache
def _model_class(config_class: type) -> Any:
    """Return transformers' class of causal models; cached, because finding it takes long."""
    if config_class is transformers.Mistral4Config:  # which the mapping lacks
        return transformers.Mistral4ForCausalLM
    return transformers.MODEL_FOR_CAUSAL_LM_MAPPING[config_class]


class _Oracle:
    """transformers' model of a configuration, with weights that can be saved beside it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        config = AutoConfig.from_pretrained(folder)
        config.dtype, config.return_dict = None, True
        torch.manual_seed(0)
        model_class = _model_class(type(config))
        # Falcon's eager attention adds linear biases twice.
        attention = "sdpa" if config.model_type == "falcon" else "eager"
        self._model = model_class._from_config(config, attn_implementation=attention).float().eval()
        biases = [
            pair
            for pair in self._model.named_buffers()
            if pair[0].endswith(("correction_bias", "expert_bias"))
        ]
        with torch.no_grad():
            for name, parameter in (*self._model.named_parameters(), *biases):
                if name.endswith("bias"):  # many are initialized as 0, so that errors would not be noticed
                    parameter.normal_(0, 0.2)
        slow_decays(self._model)

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return self._model.state_dict()

    def save(self) -> None:
        saved = self._folder / "saved"
        self._model.save_pretrained(saved)  # with the names of checkpoints
        (saved / "model.safetensors").replace(self._folder / "model.safetensors")

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        return self._model(torch.tensor([tokens]), use_cache=False).logits[0]


@dataclasses.dataclass(frozen=True)
class _Run:
    """The engine's result of one configuration, reused for all configurations that it reads alike."""

    description: ModelDescription
    weights: dict[str, torch.Tensor]
    row: Row

    def is_of(self, description: ModelDescription, weights: dict[str, torch.Tensor]) -> bool:
        return (
            self.description == description
            and self.weights.keys() == weights.keys()
            and all(torch.equal(found, weights[name]) for name, found in self.weights.items())
        )


def _verdict(folder: Path, config: dict[str, Any], key: str, runs: list[_Run]) -> str | None:
    """Return "" if the rule holds, else the problem; None if transformers does not load the configuration either.

    The engine knows a configuration only by its description, and is not run twice for the same description
    and weights. Most keys change neither; transformers computes its logits every time, in case they change
    nevertheless.
    """
    (folder / "config.json").write_text(json.dumps(config))
    try:
        description = read_model_description(folder)
    except ConfigError as error:
        return "" if re.search(rf"\b{key}\b", str(error)) else f"refused without naming it: {error}"
    prompt = PROMPT[: description.decoder.max_positions - 3]
    try:
        oracle = _Oracle(folder)
        row = next((run.row for run in runs if run.is_of(description, oracle.weights)), None)
        expected = oracle.logits(row.tokens if row else list(PROMPT))
    except Exception:  # any error of transformers: many configurations have null for a number
        return None
    if row is None:
        oracle.save()
        row = alone(load_engine(folder, kernels="torch", dtype="float32"), prompt, 3)
        runs.append(_Run(description, oracle.weights, row))
        expected = oracle.logits(row.tokens)
    difference = (torch.stack(row.logits) - expected[len(prompt) - 1 : -1]).abs().max().item()
    return "" if difference < TOLERANCE else f"logits differ by {difference}"


@pytest.mark.parametrize("family", with_all(CONFIGS, ["gpt_oss"]))
def test_each_config_key_gives_transformers_logits_or_is_refused_by_name(tmp_path: Path, family: str) -> None:
    torch.set_num_threads(1)  # more threads only slow models this small down
    verdicts, runs = {}, list[_Run]()
    for key in _keys(family):
        for config in _changes(family, key):
            verdicts[f"{key} = {config.get(key, 'absent')!r}"] = _verdict(tmp_path, config, key, runs)
    wrong = [f"{change}: {verdict}" for change, verdict in verdicts.items() if verdict]
    assert not wrong, "\n".join(wrong)
    undecided = [change for change, verdict in verdicts.items() if verdict is None]
    assert len(undecided) < len(verdicts) / 5, undecided

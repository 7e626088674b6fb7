"""Configurations of the small random models of text, by name: transformers' class and the keys that differ."""

from __future__ import annotations

from typing import Any

VOCAB_SIZE = 211
MAX_POSITIONS = 256

COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 96,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GPT2 = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": MAX_POSITIONS,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **values}}


_LLAMA3 = rope(
    "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)
_YARN = rope("yarn", factor=4.0, original_max_position_embeddings=64)
_FULL = ["full_attention"] * 3

_GEMMA = {
    "tie_word_embeddings": False,  # with tied embeddings it would repeat its last token
    "num_key_value_heads": 2,
    "head_dim": 12,
    "sliding_window": 19,
    "query_pre_attn_scalar": 9,
}

_GEMMA3N = {
    "tie_word_embeddings": False,
    "num_hidden_layers": 5,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "sliding_window": 19,
    "layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 2, "full_attention"],
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 20,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "altup_num_inputs": 3,
    "laurel_rank": 10,
    "activation_sparsity_pattern": [0.7, 0.0, 0.5, 0.7, 0.0],
    "final_logit_softcapping": 9.0,
}

_GEMMA4 = {
    "tie_word_embeddings": False,
    "num_key_value_heads": 4,
    "num_global_key_value_heads": 2,
    "head_dim": 12,
    "global_head_dim": 24,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 19,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "final_logit_softcapping": 9.0,
}

GEMMA4_UNIFIED = {key: value for key, value in _GEMMA4.items() if key != "hidden_size_per_layer_input"}

DEEPSEEK = {
    **rope("yarn", factor=4.0, original_max_position_embeddings=64, mscale=0.7, mscale_all_dim=0.9),
    "q_lora_rank": 36,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}

_KIMI_KEYS = (
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "n_shared_experts",
    "n_group",
    "topk_group",
    "routed_scaling_factor",
)

_DELTA = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-5,
}
_GRANITE = {
    "num_key_value_heads": 2,
    "embedding_multiplier": 1.5,
    "logits_scaling": 4.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.2,
}
_MAMBA2 = {
    **_GRANITE,
    "num_hidden_layers": 4,
    "layer_types": ["mamba", "attention", "mamba", "attention"],
    "mamba_n_heads": 8,
    "mamba_d_state": 12,
    "mamba_chunk_size": 16,
    "shared_intermediate_size": 72,
}

_NEMOTRON_H = {
    "num_key_value_heads": 2,
    "head_dim": 12,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 12,
    "n_groups": 2,
    "chunk_size": 16,
    "time_step_min": 0.0001,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 56,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "initializer_range": 0.25,
}
_FALCON_H1 = {
    "num_key_value_heads": 2,
    "mamba_d_ssm": 96,
    "mamba_n_heads": 8,
    "mamba_d_head": 12,
    "mamba_d_state": 12,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
    "embedding_multiplier": 1.5,
    "lm_head_multiplier": 0.4,
    "key_multiplier": 0.7,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.8,
    "ssm_in_multiplier": 1.3,
    "ssm_out_multiplier": 0.6,
    "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
    "mlp_multipliers": [0.7, 0.9],
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-gqa": ("Llama", {"num_key_value_heads": 2}),
    "llama-gqa-tied": ("Llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama-head-dim": ("Llama", {"head_dim": 12}),
    "llama-odd-sizes": (
        "Llama",
        {"hidden_size": 40, "num_attention_heads": 5, "num_key_value_heads": 1, "intermediate_size": 40},
    ),
    "llama-odd-heads": (
        "Llama",
        {
            "hidden_size": 72,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "intermediate_size": 88,
            "initializer_range": 0.25,
        },
    ),
    "llama-rope-llama3": ("Llama", _LLAMA3),
    "llama-rope-yarn": ("Llama", _YARN),
    "llama-rope-linear": ("Llama", rope("linear", factor=4.0)),
    "llama-rope-dynamic": ("Llama", rope("dynamic", factor=4.0)),
    "llama-attention-bias": ("Llama", {"attention_bias": True, "initializer_range": 0.25}),
    "llama-mlp-bias": ("Llama", {"mlp_bias": True, "hidden_act": "gelu"}),
    "mistral-window": ("Mistral", {"num_key_value_heads": 2, "sliding_window": 19}),
    "mistral-no-window": ("Mistral", {"num_key_value_heads": 2, "sliding_window": None}),
    "mistral-layer-types": (
        "Ministral",
        {
            "num_key_value_heads": 2,
            "head_dim": 8,
            "sliding_window": 19,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "ministral3": (
        "Ministral3",
        {
            "num_key_value_heads": 2,
            "head_dim": 12,
            "initializer_range": 0.25,
            **rope(
                "yarn",
                factor=4.0,
                original_max_position_embeddings=20,
                mscale=1.0,
                mscale_all_dim=1.0,
                llama_4_scaling_beta=0.4,
            ),
        },
    ),
    "qwen2": ("Qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True, "initializer_range": 0.25}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 13, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"num_key_value_heads": 4, "head_dim": 24}),
    "phi3": ("Phi3", {"num_key_value_heads": 2}),
    "phi3-partial-window": (
        "Phi3",
        {
            "sliding_window": 19,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
    "phi3-longrope": (
        "Phi3",
        {
            "original_max_position_embeddings": MAX_POSITIONS,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0, 1.1, 1.3, 2.0],
                "long_factor": [1.5, 2.0, 3.0, 4.0],
                "original_max_position_embeddings": MAX_POSITIONS,
                "factor": 4.0,
            },
        },
    ),
    "arcee": ("Arcee", {"num_key_value_heads": 2, "mlp_bias": True, "initializer_range": 0.25}),
    "apertus": ("Apertus", {"num_key_value_heads": 2, "initializer_range": 0.2, **_LLAMA3}),
    "seed-oss": (
        "SeedOss",
        {
            "num_key_value_heads": 2,
            "head_dim": 12,
            "attention_out_bias": True,
            "initializer_range": 0.25,
        },
    ),
    "olmo2": ("Olmo2", {"num_key_value_heads": 2}),
    "olmo3": (
        "Olmo3",
        {
            "num_key_value_heads": 2,
            "sliding_window": 19,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": _YARN["rope_parameters"],
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "exaone4": (
        "Exaone4",
        {
            "num_key_value_heads": 2,
            "sliding_window": 19,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "exaone4-no-window": (
        "Exaone4",
        {"num_key_value_heads": 2, "sliding_window": None, "layer_types": _FULL},
    ),
    "glm4": ("Glm4", {"num_key_value_heads": 2, "head_dim": 12, "initializer_range": 0.25}),
    "ernie4.5": (
        "Ernie4_5",
        {
            "num_key_value_heads": 2,
            "head_dim": 12,
            "use_bias": True,
            "tie_word_embeddings": False,
            "initializer_range": 0.25,
        },
    ),
    "hunyuan": (
        "HunYuanDenseV1",
        {"num_key_value_heads": 2, "head_dim": 12, **rope("dynamic", alpha=50.0, factor=1.0)},
    ),
    "granite": ("Granite", _GRANITE),
    "granite-swa": (
        "GraniteSWA",
        {
            **_GRANITE,
            "num_hidden_layers": 4,
            "sliding_window": 19,
            "layer_rope_theta": [0, 10000.0, 500.0, 10000.0],
            "tie_word_embeddings": False,
        },
    ),
    "granite-moe-swa": (
        "GraniteMoeSWA",
        {
            **_GRANITE,
            "sliding_window": 19,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 40,
        },
    ),
    "smollm3": ("SmolLM3", {"num_key_value_heads": 2, "no_rope_layers": [1, 0, 1]}),
    "smollm3-window": (
        "SmolLM3",
        {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 19},
    ),
    "llama4": (
        "Llama4",
        {
            "num_key_value_heads": 2,
            "head_dim": 12,
            "intermediate_size": 40,
            "intermediate_size_mlp": 72,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "moe_layers": [1, 2],
            "no_rope_layers": [1, 0, 1],
            "attention_chunk_size": 19,
            "floor_scale": 6,
            "attn_scale": 0.4,
            **_LLAMA3,
        },
    ),
    "llama4-no-norms": (
        "Llama4",
        {
            "num_key_value_heads": 2,
            "head_dim": 12,
            "intermediate_size": 40,
            "intermediate_size_mlp": 72,
            "num_local_experts": 6,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 32,
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "no_rope_layer_interval": 2,
        },
    ),
    "mixtral": ("Mixtral", {"num_key_value_heads": 2, "num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral-even": ("Mixtral", {"num_key_value_heads": 2, "num_local_experts": 6, "num_experts_per_tok": 2}),
    "qwen2-moe": (
        "Qwen2Moe",
        {
            "num_key_value_heads": 2,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 56,
            "initializer_range": 0.25,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "num_key_value_heads": 2,
            "head_dim": 12,
            "num_experts": 7,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
        },
    ),
    "qwen3-moe-even": (
        "Qwen3Moe",
        {
            "num_key_value_heads": 2,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "olmoe": ("Olmoe", {"num_key_value_heads": 2, "num_experts": 6, "num_experts_per_tok": 2}),
    "minimax-m2": (
        "MiniMaxM2",
        {
            "num_key_value_heads": 2,
            "head_dim": 12,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            **rope("default", partial_rotary_factor=0.5),
        },
    ),
    "glm4-moe": (
        "Glm4Moe",
        {
            "num_key_value_heads": 2,
            "head_dim": 12,
            "use_qk_norm": True,
            "attention_bias": True,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "initializer_range": 0.25,
        },
    ),
    "ernie4.5-moe": (
        "Ernie4_5_Moe",
        {
            "num_key_value_heads": 2,
            "tie_word_embeddings": False,
            "moe_num_experts": 6,
            "moe_k": 2,
            "moe_intermediate_size": 40,
        },
    ),
    "hunyuan-moe": (
        "HunYuanMoEV1",
        {"num_key_value_heads": 2, "head_dim": 12, "num_experts": 6, "moe_topk": 2},
    ),
    "mistral4": (
        "Mistral4",
        {
            **DEEPSEEK,
            "norm_topk_prob": True,
            "attention_bias": True,
            **rope(
                "yarn",
                factor=4.0,
                original_max_position_embeddings=20,
                mscale=0.7,
                mscale_all_dim=0.9,
                llama_4_scaling_beta=0.4,
            ),
        },
    ),
    "deepseek-v2": ("DeepseekV2", {**DEEPSEEK, "topk_method": "group_limited_greedy"}),
    "deepseek-v2-lite": (
        "DeepseekV2",
        {
            **DEEPSEEK,
            "q_lora_rank": None,
            "topk_method": "greedy",
            "rope_parameters": None,
            "mlp_bias": True,
        },
    ),
    "deepseek-v3": ("DeepseekV3", {**DEEPSEEK, "norm_topk_prob": True}),
    "deepseek-v3-half-rotation": (
        "DeepseekV3",
        {**DEEPSEEK, "rope_interleave": False, "norm_topk_prob": False, "attention_bias": True},
    ),
    "glm4-moe-lite": (
        "Glm4MoeLite",
        {
            **{key: value for key, value in DEEPSEEK.items() if key != "first_k_dense_replace"},
            **rope("default"),
            "mlp_layer_types": ["dense", "sparse", "sparse"],
        },
    ),
    "gpt-oss": (
        "GptOss",
        {
            "num_key_value_heads": 2,
            "head_dim": 12,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": 19,
            "swiglu_limit": 1.0,
            **rope("yarn", factor=4.0, original_max_position_embeddings=64, truncate=False),
        },
    ),
    "gemma2": (
        "Gemma2",
        {
            **_GEMMA,
            "tie_word_embeddings": False,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 9.0,
        },
    ),
    "gemma3": (
        "Gemma3",
        {**_GEMMA, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "gemma3n": ("Gemma3n", _GEMMA3N),
    "gemma3n-widths": (
        "Gemma3n",
        {
            **_GEMMA3N,
            "intermediate_size": [96, 64, 96, 64, 96],
            "altup_num_inputs": 4,
            "altup_active_idx": 2,
            "altup_correct_scale": False,
            "vocab_size_per_layer_input": 150,
            "num_kv_shared_layers": 0,
        },
    ),
    "gemma4": ("Gemma4", _GEMMA4),
    "gemma4-shared": (
        "Gemma4",
        {
            **_GEMMA4,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "attention_k_eq_v": False,
            "hidden_size_per_layer_input": 20,
            "vocab_size_per_layer_input": VOCAB_SIZE,
        },
    ),
    "gemma4-moe": (
        "Gemma4",
        {
            **_GEMMA4,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 3,
            "moe_intermediate_size": 40,
        },
    ),
    "gemma4-unified-text": ("Gemma4Unified", GEMMA4_UNIFIED),
    "cohere2": (
        "Cohere2",
        {
            "num_key_value_heads": 2,
            "sliding_window": 19,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "tie_word_embeddings": False,
            "logit_scale": 0.5,
        },
    ),
    "qwen3.5": ("Qwen3_5", {**_DELTA, "initializer_range": 0.2}),
    "qwen3.5-moe": (
        "Qwen3_5Moe",
        {
            **_DELTA,
            "initializer_range": 0.2,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 56,
        },
    ),
    "qwen3-next": (
        "Qwen3Next",
        {
            **_DELTA,
            "initializer_range": 0.2,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 56,
            "norm_topk_prob": True,
        },
    ),
    "olmo-hybrid": (
        "OlmoHybrid",
        {
            **{key: value for key, value in _DELTA.items() if key != "head_dim"},
            "rope_parameters": None,
            "tie_word_embeddings": False,
        },
    ),
    "granite-hybrid": ("GraniteMoeHybrid", {**_MAMBA2, "mamba_n_groups": 2, "num_local_experts": 0}),
    "granite-hybrid-moe": ("GraniteMoeHybrid", {**_MAMBA2, "num_local_experts": 5, "num_experts_per_tok": 2}),
    "nemotron-h": (
        "NemotronH",
        {
            **_NEMOTRON_H,
            "layers_block_type": [
                "linear_attention",
                "moe",
                "full_attention",
                "mlp",
                "linear_attention",
                "moe",
            ],
            "moe_latent_size": 24,
        },
    ),
    "nemotron-h-dense": (
        "NemotronH",
        {
            **_NEMOTRON_H,
            "layers_block_type": ["full_attention", "linear_attention", "mlp", "mlp", "linear_attention"],
            "n_groups": 1,
            "use_bias": True,
            "mlp_bias": True,
        },
    ),
    "nemotron-h-wide-experts": (
        "NemotronH",
        {**_NEMOTRON_H, "layers_block_type": ["full_attention", "moe", "linear_attention", "moe"]},
    ),
    "falcon-h1": ("FalconH1", _FALCON_H1),
    "falcon-h1-norm": (
        "FalconH1",
        {
            **_FALCON_H1,
            "mamba_n_groups": 1,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mamba_d_ssm": None,
            "mamba_d_head": "auto",
        },
    ),
    "kimi-linear": (
        "KimiLinear",
        {
            **{key: value for key, value in DEEPSEEK.items() if key in _KIMI_KEYS},
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "num_local_experts": 8,
            "q_lora_rank": None,
            "linear_head_dim": 12,
            "linear_num_heads": 4,
            "initializer_range": 0.2,
        },
    ),
    "lfm2": (
        "Lfm2",
        {
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            "block_multiple_of": 32,
            "tie_word_embeddings": False,
        },
    ),
    "lfm2-moe": (
        "Lfm2Moe",
        {
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "routed_scaling_factor": 1.5,
            "tie_word_embeddings": False,
        },
    ),
    "lfm3": (
        "Lfm3",
        {
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "head_dim": 12,
            "layer_types": ["conv", "sliding_attention", "conv", "full_attention"],
            "sliding_window": 19,
            "conv_L_cache": 5,
            "tie_word_embeddings": False,
        },
    ),
    "neox": ("GPTNeoX", {}),
    "neox-sequential": ("GPTNeoX", {"use_parallel_residual": False, "hidden_act": "relu"}),
    "opt": ("OPT", {"ffn_dim": 80, "word_embed_proj_dim": 64, "init_std": 0.3}),
    "stablelm": ("StableLm", {"num_key_value_heads": 2, "use_qkv_bias": True}),
    "starcoder2": (
        "Starcoder2",
        {"num_key_value_heads": 2, "sliding_window": 19, "tie_word_embeddings": False},
    ),
    "falcon": (
        "Falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 96},
    ),
    "falcon-one-norm": (
        "Falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1, "bias": True},
    ),
    "falcon-multi-query": ("Falcon", {}),
    "falcon-sequential": ("Falcon", {"parallel_attn": False, "multi_query": False, "activation": "relu"}),
    "falcon-alibi": (
        "Falcon",
        {"alibi": True, "num_attention_heads": 16, "new_decoder_architecture": True, "num_kv_heads": 4},
    ),
    "bloom": ("Bloom", {"n_layer": 3, "n_head": 8}),
    "bloom-12-heads": ("Bloom", {"n_layer": 2, "n_head": 12, "hidden_size": 96}),
    "gpt2": ("GPT2", {}),
    "gpt2-inner": ("GPT2", {"n_inner": 80, "activation_function": "relu"}),
}

WITHOUT_MAP: dict[str, tuple[str, dict[str, Any]]] = {
    "stablelm-head-norms": (
        "StableLm",
        {"num_key_value_heads": 2, "use_qkv_bias": True, "qk_layernorm": True},
    ),
    "cohere": ("Cohere", {"num_key_value_heads": 2, "use_qk_norm": True, "logit_scale": 0.2}),
    "nemotron": ("Nemotron", {"num_key_value_heads": 2}),
    "glm": ("Glm", {"num_key_value_heads": 2, "head_dim": 8}),
    "helium": ("Helium", {"num_key_value_heads": 2, "head_dim": 8}),
    "granitemoe": (
        "GraniteMoe",
        {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "phimoe": (  # its layers name no window, but their mask has one
        "Phimoe",
        {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 19},
    ),
}
"""Families that transformers' own code runs."""

WITH_KERNELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-heads-16": ("Llama", {"num_hidden_layers": 1, "num_key_value_heads": 2, "head_dim": 16}),
    "gemma3-heads-16": ("Gemma3", {**_GEMMA, "head_dim": 16, "sliding_window": 19}),
    "mixtral-heads-16": (
        "Mixtral",
        {
            "num_hidden_layers": 1,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
        },
    ),
    **{
        f"{case}-heads-16": (CASES[case][0], {**CASES[case][1], "head_dim": 16})
        for case in ("ministral3", "seed-oss", "glm4", "ernie4.5")
    },
}
"""Models with heads that TensorRT's attention supports: width a multiple of 8, at least 16 in half precision."""

"""Small random models of every family, made with transformers, which is the oracle for their results.

Weights have ten times the usual deviation of 0.02, with which a random model repeats one token forever.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from safetensors.torch import load_file, save_file

transformers.utils.logging.disable_progress_bar()

VOCAB_SIZE = 211
MAX_POSITIONS = 256

_COMMON = {
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
_GPT2 = {
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


def _rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **values}}


_LLAMA3 = _rope(
    "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)
_YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=64)
_FULL = ["full_attention"] * 3

_GEMMA = {
    "tie_word_embeddings": False,  # with tied embeddings it would repeat its last token
    "num_key_value_heads": 2,
    "head_dim": 12,
    "sliding_window": 19,
    "query_pre_attn_scalar": 9,
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

_GEMMA4_UNIFIED = {key: value for key, value in _GEMMA4.items() if key != "hidden_size_per_layer_input"}

_DEEPSEEK = {
    **_rope("yarn", factor=4.0, original_max_position_embeddings=64, mscale=0.7, mscale_all_dim=0.9),
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
}
_MAMBA2 = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "layer_types": ["mamba", "attention", "mamba", "attention"],
    "mamba_n_heads": 8,
    "mamba_d_state": 12,
    "mamba_chunk_size": 16,
    "shared_intermediate_size": 72,
    "embedding_multiplier": 1.5,
    "logits_scaling": 4.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.2,
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
    "llama-rope-linear": ("Llama", _rope("linear", factor=4.0)),
    "llama-rope-dynamic": ("Llama", _rope("dynamic", factor=4.0)),
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
            **_rope(
                "yarn",
                factor=4.0,
                original_max_position_embeddings=MAX_POSITIONS,
                mscale=1.0,
                mscale_all_dim=1.0,
                llama_4_scaling_beta=0.1,
            ),
        },
    ),
    "qwen2": ("Qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
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
        {"num_key_value_heads": 2, "head_dim": 12, **_rope("dynamic", alpha=50.0, factor=1.0)},
    ),
    "granite": (
        "Granite",
        {
            "num_key_value_heads": 2,
            "embedding_multiplier": 1.5,
            "logits_scaling": 4.0,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.2,
        },
    ),
    "smollm3": ("SmolLM3", {"num_key_value_heads": 2, "no_rope_layers": [1, 0, 1]}),
    "smollm3-window": (
        "SmolLM3",
        {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 19},
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
            **_rope("default", partial_rotary_factor=0.5),
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
    "deepseek-v2": ("DeepseekV2", {**_DEEPSEEK, "topk_method": "group_limited_greedy"}),
    "deepseek-v2-lite": (
        "DeepseekV2",
        {
            **_DEEPSEEK,
            "q_lora_rank": None,
            "topk_method": "greedy",
            "rope_parameters": None,
            "mlp_bias": True,
        },
    ),
    "deepseek-v3": ("DeepseekV3", {**_DEEPSEEK, "norm_topk_prob": True}),
    "deepseek-v3-half-rotation": (
        "DeepseekV3",
        {**_DEEPSEEK, "rope_interleave": False, "norm_topk_prob": False, "attention_bias": True},
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
            **_rope("yarn", factor=4.0, original_max_position_embeddings=64, truncate=False),
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
    "neox": ("GPTNeoX", {}),
    "neox-sequential": ("GPTNeoX", {"use_parallel_residual": False, "hidden_act": "relu"}),
    "opt": ("OPT", {"ffn_dim": 80, "word_embed_proj_dim": 64, "init_std": 0.3}),
    "stablelm": ("StableLm", {"num_key_value_heads": 2, "use_qkv_bias": True}),
    "starcoder2": (
        "Starcoder2",
        {"num_key_value_heads": 2, "sliding_window": 19, "tie_word_embeddings": False},
    ),
    "gpt2": ("GPT2", {}),
    "gpt2-inner": ("GPT2", {"n_inner": 80, "activation_function": "relu"}),
}

_CLIP = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
_QWEN_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 16,
    "out_hidden_size": 64,
    "patch_size": 4,
}
_QWEN3_VISION = {**_QWEN_VISION, "num_position_embeddings": 16}
_OTHER_PARTS: dict[str, dict[str, Any]] = {
    "Gemma3": {"vision_config": _CLIP, "mm_tokens_per_image": 1},
    "Gemma4": {
        "vision_config": {**_CLIP, "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16},
        "audio_config": None,
    },
    "Gemma4Unified": {
        "vision_config": {"patch_size": 4, "mm_embed_dim": 16, "mm_posemb_size": 16, "output_proj_dims": 64},
        "audio_config": {"audio_embed_dim": 16},
    },
    "Mistral3": {"vision_config": {"model_type": "pixtral", "head_dim": 8, **_CLIP}},
    "Qwen2VL": {
        "vision_config": {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 64, "patch_size": 4}
    },
    "Qwen2_5_VL": {"vision_config": _QWEN_VISION},
    "Qwen3VL": {"vision_config": {**_QWEN3_VISION, "deepstack_visual_indexes": [0]}},
    "Qwen3VLMoe": {"vision_config": {**_QWEN3_VISION, "deepstack_visual_indexes": [0]}},
    "Qwen3_5": {"vision_config": _QWEN3_VISION},
    "Qwen3_5Moe": {"vision_config": _QWEN3_VISION},
    "Kimi_K25": {
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "patch_size": 4,
            "pos_emb_height": 4,
            "pos_emb_width": 4,
        },
        "projection_hidden_size": 64,
    },
    "Llava": {"vision_config": {"model_type": "clip_vision_model", **_CLIP}},
    "LlavaNext": {"vision_config": {"model_type": "clip_vision_model", **_CLIP}},
    "LlavaOnevision": {"vision_config": {"model_type": "siglip_vision_model", **_CLIP}},
    "InternVL": {
        "vision_config": {
            "model_type": "internvl_vision",
            **_CLIP,
            "image_size": [8, 8],
            "patch_size": [4, 4],
        }
    },
    "Lfm2Vl": {
        "vision_config": {
            "model_type": "siglip2_vision_model",
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_patches": 4,
            "patch_size": 4,
        },
        "projector_hidden_size": 16,
    },
    "Voxtral": {
        "audio_config": {
            "hidden_size": 16,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_mel_bins": 8,
        }
    },
}
"""Parts of multimodal models that are not served."""

MULTIMODAL: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma3-vision": ("Gemma3", "gemma3_text", CASES["gemma3"][1]),
    "gemma4-vision": ("Gemma4", "gemma4_text", CASES["gemma4-shared"][1]),
    "gemma4-unified": ("Gemma4Unified", "gemma4_unified_text", _GEMMA4_UNIFIED),
    "mistral3": ("Mistral3", "mistral", CASES["mistral-no-window"][1]),
    "mistral3-ministral3": ("Mistral3", "ministral3", CASES["ministral3"][1]),
    "qwen2-vl": (
        "Qwen2VL",
        "qwen2_vl_text",
        {"num_key_value_heads": 2, **_rope("default", mrope_section=[1, 1, 2])},
    ),
    "qwen2.5-vl": (
        "Qwen2_5_VL",
        "qwen2_5_vl_text",
        {
            "num_key_value_heads": 2,
            **_rope("yarn", factor=4.0, original_max_position_embeddings=64, mrope_section=[2, 1, 1]),
        },
    ),
    "qwen3-vl": (
        "Qwen3VL",
        "qwen3_vl_text",
        {
            "num_key_value_heads": 4,
            "head_dim": 24,
            **_rope("default", mrope_section=[4, 4, 4], mrope_interleaved=True),
        },
    ),
    "qwen3-vl-moe": (
        "Qwen3VLMoe",
        "qwen3_vl_moe_text",
        {
            "num_key_value_heads": 2,
            "head_dim": 12,
            "num_experts": 7,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "mlp_only_layers": [1],
            **_rope("default", mrope_section=[2, 2, 2], mrope_interleaved=True),
        },
    ),
    "qwen3.5-vision": (
        "Qwen3_5",
        "qwen3_5_text",
        {
            **CASES["qwen3.5"][1],
            "head_dim": 32,
            **_rope("default", partial_rotary_factor=0.25, mrope_section=[2, 1, 1], mrope_interleaved=True),
        },
    ),
    "qwen3.5-moe-vision": ("Qwen3_5Moe", "qwen3_5_moe_text", CASES["qwen3.5-moe"][1]),
    "kimi-k2.5": ("Kimi_K25", "deepseek_v3", {**_DEEPSEEK, "norm_topk_prob": True}),
    "llava": ("Llava", "llama", {"num_key_value_heads": 2}),
    "llava-next": ("LlavaNext", "mistral", {"num_key_value_heads": 2, "sliding_window": 19}),
    "llava-onevision": ("LlavaOnevision", "qwen2", {"num_key_value_heads": 2}),
    "internvl": ("InternVL", "qwen3", {"num_key_value_heads": 4, "head_dim": 24}),
    "lfm2-vl": ("Lfm2Vl", "lfm2", CASES["lfm2"][1]),
    "voxtral": ("Voxtral", "llama", {"num_key_value_heads": 2, "head_dim": 8}),
}
"""Multimodal models: the class, and model type and keys of the text part."""

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


_RECURRENT_NORMS = {
    "input_layernorm": "attention_layer_norm",
    "post_attention_layernorm": "feedforward_layer_norm",
}
"""Names in OLMo Hybrid's recurrent layers, and those of published checkpoints."""


@contextmanager
def _as_float64() -> Iterator[None]:
    """Make code of transformers that always computes in float32 compute in float64."""
    with (
        patch.object(torch.Tensor, "float", torch.Tensor.double),
        patch.object(torch, "float32", torch.float64),
        patch.object(torch, "float", torch.float64),
    ):
        yield


@dataclass(frozen=True)
class ZooModel:
    """A checkpoint folder, and the transformers model that was saved in it.

    Results of `logits`, `generate` and `beams` are cached: many tests ask for the same ones.
    """

    folder: Path
    oracle: Any
    found: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    def prompt(self, length: int, seed: int = 0) -> tuple[int, ...]:
        """Return random token ids."""
        generator = torch.Generator().manual_seed(seed)
        return tuple(torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist())

    @torch.inference_mode()
    def logits(self, token_ids: tuple[int, ...] | list[int]) -> torch.Tensor:
        """Return the oracle's logits at every position, [positions, vocab_size], computed in float64.

        In float32 the oracle's own rounding errors would be as large as those of the tested engine.
        """
        if "in float64" not in self.found:
            self.found["in float64"] = copy.deepcopy(self.oracle).double()
        key = ("logits", tuple(token_ids))
        if key not in self.found:
            with _as_float64():
                logits = self.found["in float64"](torch.tensor([token_ids])).logits[0]
            self.found[key] = logits.float()
        return self.found[key].clone()

    def greedy(self, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
        """Return the tokens of the oracle's own `generate`, without end ids."""
        return self.generate(tuple(prompt), num_tokens, min_new_tokens=num_tokens)

    def generate(
        self, prompt: tuple[int, ...], num_tokens: int, end_id: int | None = None, **options: Any
    ) -> list[int]:
        """Return the tokens of the oracle's greedy `generate`, with logits processors; includes the end id."""
        return list(self._ask(prompt, num_tokens, end_id, options)[0][0])

    def beams(
        self, prompt: tuple[int, ...], num_tokens: int, end_id: int | None = None, **options: Any
    ) -> list[tuple[list[int], float]]:
        """Return the oracle's own beam search: each sequence's new tokens and final score, best first."""
        found = self._ask(prompt, num_tokens, end_id, options | {"output_scores": True})
        return [(list(tokens), score) for tokens, score in zip(*found, strict=True)]

    def _ask(
        self, prompt: tuple[int, ...], num_tokens: int, end_id: int | None, options: dict[str, Any]
    ) -> tuple[list[list[int]], list[float]]:
        """Return the new tokens of every sequence, and the scores of a beam search."""
        key = (tuple(prompt), num_tokens, end_id, repr(sorted(options.items())))
        if key not in self.found:
            with torch.inference_mode():
                found = self.oracle.generate(
                    torch.tensor([prompt]),
                    attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                    max_new_tokens=num_tokens,
                    do_sample=False,
                    eos_token_id=end_id,
                    return_dict_in_generate=True,
                    **options,
                )
            scores = found.get("sequences_scores")
            sequences = found.sequences[:, len(prompt) :].tolist()
            # Keeping the options keeps their objects alive: the cache's key has their addresses.
            self.found[key] = options, (sequences, [] if scores is None else scores.tolist())
        return self.found[key][1]


@dataclass
class Zoo:
    """Creates each model once."""

    root: Path
    _made: dict[str, ZooModel] = field(default_factory=dict)

    def __getitem__(self, case: str) -> ZooModel:
        if case not in self._made:
            self._made[case] = make_model(self.root / case, case)
        return self._made[case]


def make_model(folder: Path, case: str, seed: int = 0, **save_options: Any) -> ZooModel:
    """Draw the weights of `case` and save the model in `folder`."""
    if case in MULTIMODAL:
        return _make_multimodal(folder, case, seed)
    family, changes = (CASES | WITHOUT_MAP | WITH_KERNELS)[case]
    values = _GPT2 if family == "GPT2" else dict(_COMMON)
    foreign = {"GPTNeoX": ("num_key_value_heads",), "OPT": ("num_key_value_heads", "intermediate_size")}
    for name in foreign.get(family, ()):
        del values[name]
    has_text_config = family in ("Gemma3", "Gemma4", "Qwen3_5", "Qwen3_5Moe")
    config_name = f"{family}TextConfig" if has_text_config else f"{family}Config"
    config = getattr(transformers, config_name)(**{**values, **changes})
    class_name = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    oracle = _draw(class_name, config, seed)
    if family == "OlmoHybrid":
        _save_as_published(oracle, folder)
    else:
        oracle.save_pretrained(folder, **save_options)
    return ZooModel(folder, oracle)


def _make_multimodal(folder: Path, case: str, seed: int) -> ZooModel:
    family, kind, changes = MULTIMODAL[case]
    text = {**_COMMON, **changes, "model_type": kind, "tie_word_embeddings": False}
    config_class = getattr(transformers, f"{family}Config")
    config = config_class(text_config=text, tie_word_embeddings=False, **_OTHER_PARTS[family])
    config.text_config._experts_implementation = "eager"
    oracle = _draw(f"{family}ForConditionalGeneration", config, seed)
    oracle.save_pretrained(folder)
    if family == "Kimi_K25":  # transformers 5 renames the text part's layers too when it saves the model
        path = folder / "model.safetensors"
        tensors = {
            name.replace("language_model.model.blocks.", "language_model.model.layers."): tensor
            for name, tensor in load_file(path).items()
        }
        save_file(tensors, path, {"format": "pt"})
    return ZooModel(folder, oracle)


def _draw(class_name: str, config: Any, seed: int) -> Any:
    """Return a model of this class with random weights."""
    torch.manual_seed(seed)
    config._experts_implementation = "eager"  # the only one that supports float64
    oracle = getattr(transformers, class_name)._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        biases = [
            pair
            for pair in oracle.named_buffers()
            if pair[0].endswith(("correction_bias", "expert_bias", "layer_scalar"))
        ]
        for name, parameter in (*oracle.named_parameters(), *biases):
            # initialized as 0 and 1, so that errors would not be noticed
            if name.endswith(("bias", "scale", "layer_scalar")) or "norm" in name or "sinks" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return oracle


def _save_as_published(oracle: Any, folder: Path) -> None:
    """Save an OLMo Hybrid with the names of published checkpoints.

    transformers' own conversion to these names divides convolutions into equal parts, and renames norms of other
    layers too.
    """
    oracle.save_pretrained(folder, save_original_format=False)
    path, config = folder / "model.safetensors", oracle.config
    tensors, whole = load_file(path), "linear_attn.conv1d.weight"
    key_width = config.linear_num_key_heads * config.linear_key_head_dim
    for name in [each for each in tensors if each.endswith(whole)]:
        prefix, conv = name.removesuffix(whole), tensors.pop(name)
        parts = conv.split((key_width, key_width, len(conv) - 2 * key_width))
        tensors |= {
            f"{prefix}linear_attn.{each}_conv1d.weight": part.clone() for each, part in zip("qkv", parts)
        }
        for ours, theirs in _RECURRENT_NORMS.items():
            tensors[f"{prefix}{theirs}.weight"] = tensors.pop(f"{prefix}{ours}.weight")
    save_file(tensors, path, {"format": "pt"})

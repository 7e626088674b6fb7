"""Configurations of small random multimodal models: the text part, and the smallest towers beside it."""

from __future__ import annotations

from typing import Any

from tests.models.zoo_configs import CASES, DEEPSEEK, GEMMA4_UNIFIED, rope

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
_QWEN3_5_ROPE = {
    "head_dim": 32,
    **rope("default", partial_rotary_factor=0.25, mrope_section=[2, 1, 1], mrope_interleaved=True),
}
OTHER_PARTS: dict[str, dict[str, Any]] = {
    "Gemma3": {"vision_config": _CLIP, "mm_tokens_per_image": 1},
    "Gemma3n": {
        "vision_config": {"hidden_size": 16, "vocab_size": 8, "vocab_offset": 300},
        "audio_config": {
            "hidden_size": 16,
            "vocab_size": 8,
            "vocab_offset": 310,
            "input_feat_size": 16,
            "conf_num_attention_heads": 2,
            "conf_num_hidden_layers": 1,
            "sscp_conv_channel_size": (4, 4),
        },
    },
    "Gemma4": {
        "vision_config": {**_CLIP, "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16},
        "audio_config": None,
    },
    "Gemma4Unified": {
        "vision_config": {"patch_size": 4, "mm_embed_dim": 16, "mm_posemb_size": 16, "output_proj_dims": 64},
        "audio_config": {"audio_embed_dim": 16},
    },
    "Mistral3": {"vision_config": {"model_type": "pixtral", "head_dim": 8, **_CLIP}},
    "Llama4": {
        "vision_config": {
            **_CLIP,
            "num_channels": 3,
            "intermediate_size": 64,
            "vision_output_dim": 16,
            "projector_input_dim": 16,
            "projector_output_dim": 16,
        }
    },
    "Qwen2VL": {
        "vision_config": {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 64, "patch_size": 4}
    },
    "Qwen2_5_VL": {"vision_config": _QWEN_VISION},
    "Qwen3VL": {"vision_config": {**_QWEN3_VISION, "depth": 2, "deepstack_visual_indexes": [0, 1]}},
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
    "Idefics3": {"vision_config": _CLIP, "scale_factor": 2},
    "SmolVLM": {"vision_config": _CLIP, "scale_factor": 2},
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
    "gemma3n-vision": ("Gemma3n", "gemma3n_text", CASES["gemma3n"][1]),
    "gemma4-vision": ("Gemma4", "gemma4_text", CASES["gemma4-shared"][1]),
    "gemma4-large": (
        "Gemma4",
        "gemma4_text",
        {**CASES["gemma4"][1], "use_bidirectional_attention": "vision"},
    ),
    "gemma4-moe-vision": (
        "Gemma4",
        "gemma4_text",
        {**CASES["gemma4-moe"][1], "use_bidirectional_attention": "vision"},
    ),
    "gemma4-unified": ("Gemma4Unified", "gemma4_unified_text", GEMMA4_UNIFIED),
    "mistral3": ("Mistral3", "mistral", CASES["mistral-no-window"][1]),
    "mistral3-ministral3": ("Mistral3", "ministral3", CASES["ministral3"][1]),
    "mistral3-mistral4": ("Mistral3", "mistral4", CASES["mistral4"][1]),
    "llama4-vision": ("Llama4", "llama4_text", CASES["llama4"][1]),
    "qwen2-vl": (
        "Qwen2VL",
        "qwen2_vl_text",
        {"num_key_value_heads": 2, **rope("default", mrope_section=[1, 1, 2])},
    ),
    "qwen2.5-vl": (
        "Qwen2_5_VL",
        "qwen2_5_vl_text",
        {
            "num_key_value_heads": 2,
            **rope("yarn", factor=4.0, original_max_position_embeddings=64, mrope_section=[2, 1, 1]),
        },
    ),
    "qwen3-vl": (
        "Qwen3VL",
        "qwen3_vl_text",
        {
            "num_key_value_heads": 4,
            "head_dim": 24,
            **rope("default", mrope_section=[4, 4, 4], mrope_interleaved=True),
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
            **rope("default", mrope_section=[2, 2, 2], mrope_interleaved=True),
        },
    ),
    "qwen3.5-vision": ("Qwen3_5", "qwen3_5_text", {**CASES["qwen3.5"][1], **_QWEN3_5_ROPE}),
    "qwen3.5-moe-vision": ("Qwen3_5Moe", "qwen3_5_moe_text", {**CASES["qwen3.5-moe"][1], **_QWEN3_5_ROPE}),
    "kimi-k2.5": ("Kimi_K25", "deepseek_v3", {**DEEPSEEK, "norm_topk_prob": True}),
    "llava": ("Llava", "llama", {"num_key_value_heads": 2}),
    "llava-next": ("LlavaNext", "mistral", {"num_key_value_heads": 2, "sliding_window": 19}),
    "llava-onevision": ("LlavaOnevision", "qwen2", {"num_key_value_heads": 2}),
    "internvl": ("InternVL", "qwen3", {"num_key_value_heads": 4, "head_dim": 24}),
    "lfm2-vl": ("Lfm2Vl", "lfm2", CASES["lfm2"][1]),
    "idefics3": ("Idefics3", "llama", {"num_key_value_heads": 2}),
    "smolvlm": ("SmolVLM", "llama", {"num_key_value_heads": 2}),
    "voxtral": ("Voxtral", "llama", {"num_key_value_heads": 2, "head_dim": 8}),
}
"""Multimodal models: the class, and model type and keys of the text part."""

"""config.json and generation_config.json → DecoderConfig, and the errors for invalid files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inflight.errors import ConfigError
from inflight.hub import find_checkpoint
from inflight.models import DecoderConfig, read_model_description
from inflight.models.checkpoint import Checkpoint

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 100,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
}


def _as(architecture: str, **values: Any) -> dict[str, Any]:
    model_type = architecture.removesuffix("ForCausalLM").lower()
    return {**LLAMA, "architectures": [architecture], "model_type": model_type, **values}


def _read(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> DecoderConfig:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_model_description(folder).decoder


def test_llama_config_is_translated(tmp_path: Path) -> None:
    decoder = _read(tmp_path, LLAMA)
    assert (decoder.num_heads, decoder.num_kv_heads, decoder.head_dim) == (4, 2, 8)
    assert (decoder.query_size, decoder.kv_size) == (32, 16)
    assert decoder.sliding_windows == (None,) * 4
    assert (decoder.norm, decoder.norm_eps, decoder.activation, decoder.gated_mlp) == (
        "rms",
        1e-6,
        "silu",
        True,
    )
    assert not (decoder.qkv_bias or decoder.output_bias or decoder.mlp_bias or decoder.tied_embeddings)


def test_gpt2_config_is_translated(tmp_path: Path) -> None:
    decoder = _read(tmp_path, GPT2)
    assert decoder.learned_positions and set(decoder.ropes) == {None}
    assert (decoder.intermediate_size, decoder.max_positions) == (128, 128)
    assert (decoder.norm, decoder.activation, decoder.gated_mlp) == ("layer", "gelu_tanh", False)
    assert decoder.qkv_bias and decoder.output_bias and decoder.mlp_bias and decoder.tied_embeddings


def test_model_type_decides_without_architectures(tmp_path: Path) -> None:
    config = {key: value for key, value in LLAMA.items() if key != "architectures"}
    assert _read(tmp_path, {**config, "model_type": "qwen2"}).qkv_bias


@pytest.mark.parametrize(
    ("architecture", "values", "expected"),
    [
        ("MistralForCausalLM", {}, (4096,) * 4),
        ("MistralForCausalLM", {"sliding_window": None}, (None,) * 4),
        ("MistralForCausalLM", {"sliding_window": 7}, (7,) * 4),
        (
            "MistralForCausalLM",
            {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"] * 2},
            (7, None, 7, None),
        ),
        ("MinistralForCausalLM", {"sliding_window": 7}, (7,) * 4),
        ("Qwen2ForCausalLM", {"sliding_window": 7}, (None,) * 4),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 7}, (None,) * 4),
        (
            "Qwen2ForCausalLM",
            {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 3},
            (None, None, None, 7),
        ),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "max_window_layers": 0}, (4096,) * 4),
        (
            "Qwen2ForCausalLM",
            {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
            (None,) * 4,
        ),
        (
            "Qwen3ForCausalLM",
            {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0},
            (7,) * 4,
        ),
        (
            "Qwen3ForCausalLM",
            {
                "use_sliding_window": True,
                "sliding_window": 7,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (7, None, 7, None),
        ),
    ],
)
def test_sliding_windows_are_read_by_each_familys_keys(
    tmp_path: Path, architecture: str, values: dict[str, Any], expected: tuple[int | None, ...]
) -> None:
    assert _read(tmp_path, _as(architecture, **values)).sliding_windows == expected


_DEEPSEEK = {
    **LLAMA,
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV2ForCausalLM"},
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "moe_intermediate_size": 24,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 4,
    "pretraining_tp": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 128,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
    "torch_dtype": "bfloat16",
    "v_head_dim": 8,
}
# config.json files as published beside weights, with all their keys.
PUBLISHED: dict[str, dict[str, Any]] = {
    "smollm2": {
        **LLAMA,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "hidden_act": "silu",
        "initializer_range": 0.041666666666666664,
        "is_llama_config": True,
        "pad_token_id": 2,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
        "transformers_version": "4.42.3",
        "use_cache": True,
    },
    "the first llama": {
        **{key: value for key, value in LLAMA.items() if key != "max_position_embeddings"},
        "max_sequence_length": 2048,
        "pad_token_id": -1,
        "torch_dtype": "float16",
    },
    "qwen2.5": {
        **LLAMA,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "max_window_layers": 28,
        "rope_theta": 1000000.0,
        "sliding_window": 131072,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_mrope": False,
        "use_sliding_window": False,
    },
    "qwen2.5 with yarn": {
        **LLAMA,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 128, "type": "yarn"},
    },
    "qwen as a llama": {
        **LLAMA,
        "max_window_layers": 28,
        "sliding_window": 131072,
        "use_sliding_window": False,
    },
    "deepseek v2 lite": {**_DEEPSEEK, "aux_loss_alpha": 0.001, "seq_aux": True},
    "deepseek v3": {
        **_DEEPSEEK,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "n_group": 2,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 12,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
    "a fine-tune": {
        **LLAMA,
        "_name_or_path": "somewhere/llama",
        "_commit_hash": None,
        "_attn_implementation_autoset": True,
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.9,
        "unsloth_version": "2024.9",
        "auto_map": {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"},
        "num_labels": 1,
    },
    "yarn's authors' llama": {
        **LLAMA,
        "rope_scaling": {
            "factor": 32.0,
            "original_max_position_embeddings": 128,
            "type": "yarn",
            "finetuned": True,
        },
    },
    "gpt2-xl": {
        **GPT2,
        "activation_function": "gelu_new",
        "attn_pdrop": 0.1,
        "bos_token_id": 50256,
        "embd_pdrop": 0.1,
        "eos_token_id": 50256,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "model_type": "gpt2",
        "n_ctx": 1024,
        "n_special": 0,
        "output_past": True,
        "predict_special_tokens": True,
        "resid_pdrop": 0.1,
        "summary_activation": None,
        "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True,
        "summary_type": "cls_index",
        "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_further_keys_of_published_checkpoints_are_accepted(tmp_path: Path, name: str) -> None:
    assert _read(tmp_path, PUBLISHED[name]).hidden_size == 32


@pytest.mark.parametrize(
    "values",
    [
        {"num_experts": 0, "shared_expert_intermediate_size": 0, "num_nextn_predict_layers": 0},
        {"sliding_window": False, "max_window_layers": 28},
        {"sliding_window": 0},
        {"sliding_window": None, "rope_scaling": False, "layer_types": None},
        {"rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 2.0}},
    ],
)
def test_zero_and_null_keys_of_absent_parts_are_accepted(tmp_path: Path, values: dict[str, Any]) -> None:
    assert _read(tmp_path, {**LLAMA, **values}).sliding_windows == (None,) * 4


def test_experts_that_a_dense_family_does_not_have_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="key 'num_experts' is 8, expected no such key"):
        _read(tmp_path, {**LLAMA, "num_experts": 8})


def test_a_checkpoints_own_code_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _read(tmp_path, PUBLISHED["a fine-tune"])
    assert "auto_map names the checkpoint's own code for AutoModelForCausalLM" in caplog.text
    assert "the model is computed as LlamaForCausalLM" in caplog.text


@pytest.mark.parametrize(
    ("config_ids", "generation", "expected"),
    [
        (2, None, (2,)),
        ([2, 5, 2], None, (2, 5)),
        (2, {"eos_token_id": [7, 8]}, (7, 8)),
        (2, {"eos_token_id": 7}, (7,)),
        (2, {"temperature": 0.5}, (2,)),
        (None, None, ()),
        (0, None, (0,)),
    ],
)
def test_eos_token_ids_of_generation_config_override_those_of_config(
    tmp_path: Path, config_ids: Any, generation: dict[str, Any] | None, expected: tuple[int, ...]
) -> None:
    assert _read(tmp_path, {**LLAMA, "eos_token_id": config_ids}, generation).eos_token_ids == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": "auto"}, None),
        ({"torch_dtype": "auto"}, None),
        ({}, None),
    ],
)
def test_dtype_and_torch_dtype_state_the_dtype_and_auto_states_none(
    tmp_path: Path, values: dict[str, Any], expected: str | None
) -> None:
    assert _read(tmp_path, {**LLAMA, **values}).dtype == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            _as("MptForCausalLM"),
            "key 'architectures' is ['MptForCausalLM'], expected one of LlamaForCausalLM, MistralForCausalLM",
        ),
        ({"model_type": "mpt"}, "key 'model_type' is 'mpt', expected one of llama, mistral"),
        ({}, "key 'model_type' is missing"),
        (
            {**LLAMA, "quantization_config": {"bits": 4}},
            "key 'quantization_config.quant_method' is missing, expected one of fp8, fbgemm_fp8, compressed-te",
        ),
        ({**_DEEPSEEK, "norm_topk_prob": True}, "key 'norm_topk_prob' is True, expected no such key"),
        (
            {**_DEEPSEEK, "num_key_value_heads": 2},
            "expected num_attention_heads, 4: all heads share the latent",
        ),
        ({**PUBLISHED["deepseek v3"], "n_group": 3}, "expected groups of at least 2 of 8 n_routed_experts"),
        ({**_DEEPSEEK, "attention_bias": True}, "expected false where q_lora_rank is null"),
        (
            {
                **_as("HunYuanDenseV1ForCausalLM"),
                "model_type": "hunyuan_v1_dense",
                "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "partial_rotary_factor": 0.5},
            },
            "key 'rope_scaling.partial_rotary_factor' is 0.5, expected no such key",
        ),
        ({**LLAMA, "hidden_size": None}, "key 'hidden_size' is None, expected an integer >= 1"),
        ({**LLAMA, "hidden_size": "32"}, "key 'hidden_size' is '32', expected an integer >= 1"),
        ({**LLAMA, "num_key_value_heads": 3}, "expected a divisor of num_attention_heads, 4"),
        ({**LLAMA, "hidden_size": 30}, "hidden size 30 is not a multiple of 4 heads"),
        ({**LLAMA, "head_dim": 7}, "7 dimensions of a head are rotated"),
        (
            {
                **LLAMA,
                "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 2},
            },
            "'long_factor' of 'rope_scaling' has 2 numbers, expected 4: one for each pair of a head's",
        ),
        ({**LLAMA, "hidden_act": "quick_gelu"}, "key 'hidden_act' is 'quick_gelu', expected one of silu"),
        ({**LLAMA, "dtype": "float8_e4m3fn"}, "expected one of float32, bfloat16, float16"),
        ({**LLAMA, "eos_token_id": "</s>"}, "expected a token id or a list of them"),
        ({**LLAMA, "attention_bias": 1}, "key 'attention_bias' is 1, expected true or false"),
        (
            _as("Qwen2ForCausalLM", layer_types=["full_attention"]),
            "expected full_attention or sliding_attention for each of num_hidden_layers, 4",
        ),
        (
            _as("Qwen2ForCausalLM", layer_types=[]),
            "expected full_attention or sliding_attention for each of num_hidden_layers, 4",
        ),
        (
            _as("Qwen2ForCausalLM", layer_types=["sliding_attention"] * 4),
            "key 'use_sliding_window' is missing, expected true",
        ),
        ({**GPT2, "scale_attn_by_inverse_layer_idx": True}, "is True, expected false"),
        (
            {**LLAMA, "model_type": "mistral"},
            "key 'model_type' is 'mistral', expected 'llama', as architectures has",
        ),
        ({**LLAMA, "logit_scale": 0.5}, "key 'logit_scale' is 0.5, expected no such key"),
        ({**LLAMA, "is_causal": False}, "key 'is_causal' is False, expected no such key"),
        ({**LLAMA, "sliding_window": 8}, "key 'sliding_window' is 8, expected null: this family has no"),
        ({**LLAMA, "rope_scaling": {"type": "yarn", "factor": 2, "own": 1}}, "key 'rope_scaling.own' is 1"),
        (
            {**LLAMA, "quantization": {"bits": 4}},
            "key 'quantization' is {'bits': 4}, expected no such key: take the unquantized",
        ),
        (
            _as("MistralForCausalLM", layer_types=["sliding_attention"] * 4, sliding_window=None),
            "key 'sliding_window' is None, expected an integer >= 1, since layer_types has sliding_attention",
        ),
        (
            _as("MiniMaxM2ForCausalLM", model_type="minimax_m2", num_local_experts=8, attn_type_list=[]),
            "key 'attn_type_list' is [], expected 1, softmax attention, for every layer",
        ),
        ({**GPT2, "hidden_size": 64}, "key 'hidden_size' is 64, expected 32 like n_embd"),
        ({**GPT2, "n_embd": 33}, "hidden size 33 is not a multiple of 4 heads"),
        ({**GPT2, "n_embd": 2}, "key 'n_head' is 4, expected at most the hidden size, 2"),
        ({**LLAMA, "hidden_size": 2}, "key 'num_attention_heads' is 4, expected at most the hidden size, 2"),
    ],
)
def test_errors_name_file_key_value_and_what_was_expected(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        _read(tmp_path, config)
    assert message in str(error.value)
    assert str(tmp_path / "config.json") in str(error.value)


def test_a_folder_of_gguf_files_is_refused_with_advice_to_name_a_file(tmp_path: Path) -> None:
    """The advice comes for a folder of GGUF files, one beside config.json, and a name on the hub."""
    said = r"a GGUF file \(llama\.cpp's format\) is read if --model names the file itself"
    file, named = tmp_path / "model-Q4_K_M.gguf", tmp_path / "Model-GGUF"
    file.touch()
    named.mkdir()
    with pytest.raises(ConfigError, match=said):
        read_model_description(file)
    for path in (tmp_path, named):
        with pytest.raises(ConfigError, match=said):
            read_model_description(path)
        with pytest.raises(ConfigError, match=said):
            find_checkpoint(str(path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=rf"found model-Q4_K_M\.gguf\. .*{said}"):
        Checkpoint(tmp_path)


def test_missing_and_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder"):
        read_model_description(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        read_model_description(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        read_model_description(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="holds a list, expected a JSON object"):
        read_model_description(tmp_path)

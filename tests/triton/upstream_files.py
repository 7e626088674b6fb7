"""What users of tensorrtllm_backend bring along: its documented command lines, and what its fill_template does."""

from __future__ import annotations

import re
from string import Template

QUICK_START = [
    ("ensemble", "triton_max_batch_size:4,logits_datatype:TYPE_FP32"),
    ("preprocessing", "tokenizer_dir:/models/x,triton_max_batch_size:4,preprocessing_instance_count:1"),
    (
        "tensorrt_llm",
        "triton_backend:tensorrtllm,triton_max_batch_size:4,decoupled_mode:false,engine_dir:/models/x,"
        "max_queue_delay_microseconds:0,batching_strategy:inflight_fused_batching,max_queue_size:0,"
        "encoder_input_features_data_type:TYPE_FP16,logits_datatype:TYPE_FP32",
    ),
    ("postprocessing", "tokenizer_dir:/models/x,triton_max_batch_size:4,postprocessing_instance_count:1"),
]
"""Of its README, without the one for tensorrt_llm_bls."""

DOCUMENTED = [
    *QUICK_START,
    # docs/llama.md
    (
        "tensorrt_llm",
        "triton_backend:tensorrtllm,triton_max_batch_size:64,decoupled_mode:True,max_beam_width:1,"
        "engine_dir:/models/x,max_tokens_in_paged_kv_cache:2560,max_attention_window_size:2560,"
        "kv_cache_free_gpu_mem_fraction:0.5,exclude_input_in_output:True,enable_kv_cache_reuse:False,"
        "batching_strategy:inflight_batching,max_queue_delay_microseconds:0,"
        "encoder_input_features_data_type:TYPE_FP16,logits_datatype:TYPE_FP32,"
        "prompt_embedding_table_data_type:TYPE_FP16",
    ),
    # of an older version
    (
        "preprocessing",
        "tokenizer_dir:/models/x,tokenizer_type:sp,triton_max_batch_size:64,preprocessing_instance_count:1,"
        "add_special_tokens:True",
    ),
    (
        "postprocessing",
        "tokenizer_dir:/models/x,tokenizer_type:sp,triton_max_batch_size:64,postprocessing_instance_count:1,"
        "skip_special_tokens:True",
    ),
    # its documentation of several modalities, for a text model
    (
        "preprocessing",
        "tokenizer_dir:/models/x,triton_max_batch_size:4,preprocessing_instance_count:1,multimodal_model_path:,"
        "engine_dir:/models/x,max_num_images:1,max_queue_delay_microseconds:20000",
    ),
    # its tests: every variable of the file, some of them empty
    (
        "tensorrt_llm",
        "triton_backend:python,engine_dir:/models/x,decoupled_mode:False,max_tokens_in_paged_kv_cache:,"
        "max_attention_window_size:,batch_scheduler_policy:guaranteed_no_evict,"
        "batching_strategy:inflight_fused_batching,kv_cache_free_gpu_mem_fraction:0.2,"
        "exclude_input_in_output:False,triton_max_batch_size:64,max_queue_delay_microseconds:0,"
        "max_beam_width:1,enable_kv_cache_reuse:False,normalize_log_probs:True,enable_chunked_context:False,"
        "gpu_device_ids:,decoding_mode:top_k_top_p,max_queue_size:0,enable_context_fmha_fp32_acc:False,"
        "encoder_input_features_data_type:TYPE_FP16,prompt_embedding_table_data_type:TYPE_FP16,"
        "logits_datatype:TYPE_FP32,lookahead_window_size:,lookahead_ngram_size:,"
        "lookahead_verification_set_size:",
    ),
]
"""(model, second argument of fill_template.py)."""


def fill_template(text: str, arguments: str) -> str:
    """The text with `name:value,name:value` filled in; a backslash takes the next character as it is.

    Variables that are not named stay, but for two that have a value of 0 then; a name that is nowhere in the text
    is an error.
    """
    values = {"max_queue_size": "0", "max_queue_delay_microseconds": "0"}
    for argument in re.split(r"(?<!\\),", arguments):
        name, value = re.split(r"(?<!\\):", argument)
        assert name in text, f"there is no {name} in the file"
        values[name] = re.sub(r"\\(.)", r"\1", value)
    return Template(text).safe_substitute(values)

"""Fill in config.pbtxt files like fill_template.py, with command lines that tensorrtllm_backend documents.

A command line has `name:value` pairs separated by commas. Every name must be in the file. A variable without
a pair stays, except for two that become 0.
"""

from __future__ import annotations

import shutil
import string
from collections.abc import Mapping
from pathlib import Path

SOURCE = Path(__file__).parents[3] / "all_models" / "inflight_batcher_llm"

# From the README, for a model with one response.
QUICK_START = {
    "ensemble": "triton_max_batch_size:4,logits_datatype:TYPE_FP32",
    "preprocessing": "tokenizer_dir:{checkpoint},triton_max_batch_size:4,preprocessing_instance_count:1",
    "tensorrt_llm": (
        "triton_backend:tensorrtllm,triton_max_batch_size:4,decoupled_mode:false,engine_dir:{checkpoint},"
        "max_queue_delay_microseconds:0,batching_strategy:inflight_fused_batching,max_queue_size:0,"
        "encoder_input_features_data_type:TYPE_FP16,logits_datatype:TYPE_FP32"
    ),
    "postprocessing": "tokenizer_dir:{checkpoint},triton_max_batch_size:4,postprocessing_instance_count:1",
}
# From the tests of per-request metrics, for a model that streams.
PERF_METRICS = {
    "ensemble": "triton_max_batch_size:64,logits_datatype:TYPE_FP32",
    "preprocessing": "tokenizer_dir:{checkpoint},triton_max_batch_size:64,preprocessing_instance_count:1",
    "tensorrt_llm": (
        "triton_backend:python,triton_max_batch_size:64,decoupled_mode:true,engine_dir:{checkpoint},"
        "max_queue_delay_microseconds:0,batching_strategy:inflight_batching,max_queue_size:0,"
        "max_tokens_in_paged_kv_cache:2560,max_attention_window_size:2560,kv_cache_free_gpu_mem_fraction:0.5,"
        "request_stats_max_iterations:10,exclude_input_in_output:True,enable_kv_cache_reuse:True,"
        "encoder_input_features_data_type:TYPE_FP16,logits_datatype:TYPE_FP32,"
        "prompt_embedding_table_data_type:TYPE_FP16"
    ),
    "postprocessing": "tokenizer_dir:{checkpoint},triton_max_batch_size:64,postprocessing_instance_count:1",
}
# From the Llama guide, for a model that streams; it leaves max_queue_size out.
LLAMA = {
    "ensemble": "triton_max_batch_size:64,logits_datatype:TYPE_FP32",
    "preprocessing": "tokenizer_dir:{checkpoint},triton_max_batch_size:64,preprocessing_instance_count:1",
    "tensorrt_llm": (
        "triton_backend:tensorrtllm,triton_max_batch_size:64,decoupled_mode:True,max_beam_width:1,"
        "engine_dir:{checkpoint},max_tokens_in_paged_kv_cache:2560,max_attention_window_size:2560,"
        "kv_cache_free_gpu_mem_fraction:0.5,exclude_input_in_output:True,enable_kv_cache_reuse:False,"
        "batching_strategy:inflight_fused_batching,max_queue_delay_microseconds:0,"
        "encoder_input_features_data_type:TYPE_FP16,logits_datatype:TYPE_FP32,"
        "prompt_embedding_table_data_type:TYPE_FP16"
    ),
    "postprocessing": "tokenizer_dir:{checkpoint},triton_max_batch_size:64,postprocessing_instance_count:1",
}
# From the guide to guided decoding, which gives the engine a tokenizer.
GUIDED = LLAMA | {
    "tensorrt_llm": (
        "triton_backend:python,triton_max_batch_size:64,decoupled_mode:True,max_beam_width:1,"
        "engine_dir:{checkpoint},kv_cache_free_gpu_mem_fraction:0.5,exclude_input_in_output:True,"
        "enable_kv_cache_reuse:False,batching_strategy:inflight_fused_batching,max_queue_delay_microseconds:0,"
        "encoder_input_features_data_type:TYPE_FP16,logits_datatype:TYPE_FP32,tokenizer_dir:{checkpoint},"
        "guided_decoding_backend:xgrammar"
    ),
}
COMMAND_LINES = {"quick start": QUICK_START, "tests": PERF_METRICS, "Llama": LLAMA, "guided": GUIDED}
ALWAYS = {"max_queue_size": "0", "max_queue_delay_microseconds": "0"}


def pairs(command_line: str) -> dict[str, str]:
    """Return values by name."""
    return dict(pair.split(":", 1) for pair in command_line.split(","))


def missing(text: str, command_line: str) -> list[str]:
    """Return names of a command line that are not in a config.pbtxt; the original refuses them."""
    return [name for name in pairs(command_line) if name not in text]


def fill(text: str, command_line: str, checkpoint: Path) -> str:
    """Return the config.pbtxt with the values of a command line filled in."""
    values = {name: value.format(checkpoint=checkpoint) for name, value in pairs(command_line).items()}
    return string.Template(text).safe_substitute(ALWAYS | values)


def fill_repository(target: Path, command_lines: Mapping[str, str], checkpoint: Path) -> dict[str, list[str]]:
    """Copy the templates and fill them in; return the names that were missing, by model."""
    shutil.copytree(SOURCE, target, ignore=shutil.ignore_patterns("__pycache__"))
    absent = {}
    for model, command_line in command_lines.items():
        path = target / model / "config.pbtxt"
        text = path.read_text(encoding="utf-8")
        if names := missing(text, command_line):
            absent[model] = names
        path.write_text(fill(text, command_line, checkpoint), encoding="utf-8")
    return absent

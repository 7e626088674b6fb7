"""Other names of parameters: the flags of `scripts/serve` that set them, their names in vLLM and TensorRT-LLM.

The reference page of all settings (docs/settings.md) shows them. Keys of TensorRT-LLM's backend for Triton
are parameters here under the same names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OtherNames:
    """Other names of one parameter; each may be empty.

    Attributes:
        flag: The flag of `scripts/serve` that sets the parameter, beside --set.
        vllm: The flag of `vllm serve`, or the environment variable.
        tensorrt_llm: The field of TensorRT-LLM's LlmArgs or ExecutorConfig.
        is_of_backend: Whether tensorrtllm_backend's config.pbtxt has a parameter of the same name.
    """

    flag: str = ""
    vllm: str = ""
    tensorrt_llm: str = ""
    is_of_backend: bool = False


def _of_backend(flag: str = "", vllm: str = "", tensorrt_llm: str = "") -> OtherNames:
    return OtherNames(flag, vllm, tensorrt_llm, is_of_backend=True)


OTHER_NAMES: Mapping[str, OtherNames] = {
    "max_batch_size": _of_backend("", "--max-num-seqs", "max_batch_size"),
    "decoupled_mode": _of_backend(),
    "gpt_model_path": _of_backend("--model", "--model", "model"),
    "tokenizer_dir": _of_backend("", "--tokenizer", "tokenizer"),
    "dtype": OtherNames("--dtype", "--dtype, --quantization", "dtype"),
    "engine": OtherNames("--engine", "--model-impl", "backend"),
    "tensorrt_engine_dir": OtherNames("--engine-dir"),
    "weights": OtherNames("--weights"),
    "cuda_graph_mode": _of_backend("", "--enforce-eager", "cuda_graph_config"),
    "max_sequence_length": OtherNames("", "--max-model-len", "max_seq_len"),
    "max_attention_window_size": _of_backend("", "", "kv_cache_config.max_attention_window"),
    "sink_token_length": _of_backend("", "", "kv_cache_config.sink_token_length"),
    "enable_sleep_mode": OtherNames("", "--enable-sleep-mode"),
    "normalize_log_probs": _of_backend("", "--logprobs-mode", "normalize_log_probs"),
    "gpt_model_type": _of_backend("", "", "batching_type"),
    "batch_scheduler_policy": _of_backend("", "", "scheduler_config.capacity_scheduler_policy"),
    "enable_chunked_context": _of_backend("", "--enable-chunked-prefill", "enable_chunked_prefill"),
    "context_chunking_policy": OtherNames("", "", "scheduler_config.context_chunking_policy"),
    "speculative_decoding_mode": OtherNames("--speculate", "--speculative-config", "speculative_config"),
    "speculative_model_dir": OtherNames(
        "--draft-model", "--speculative-config", "speculative_config.speculative_model_dir"
    ),
    "max_num_tokens": OtherNames("", "--max-num-batched-tokens", "max_num_tokens"),
    "max_queue_size": _of_backend("", "", "max_queue_size"),
    "max_beam_width": _of_backend("", "", "max_beam_width"),
    "stream_interval": OtherNames("", "--stream-interval", "stream_interval"),
    "enable_kv_cache_reuse": _of_backend("", "--enable-prefix-caching", "kv_cache_config.enable_block_reuse"),
    "tokens_per_block": OtherNames("", "--block-size", "kv_cache_config.tokens_per_block"),
    "kv_cache_dtype": OtherNames("", "--kv-cache-dtype", "kv_cache_config.dtype"),
    "max_tokens_in_paged_kv_cache": _of_backend("", "VLLM_CPU_KVCACHE_SPACE", "kv_cache_config.max_tokens"),
    "kv_cache_free_gpu_mem_fraction": _of_backend(
        "", "--gpu-memory-utilization", "kv_cache_config.free_gpu_memory_fraction"
    ),
    "kv_cache_host_memory_bytes": _of_backend("", "--kv-offloading-size", "kv_cache_config.host_cache_size"),
    "kv_cache_onboard_blocks": _of_backend("", "", "kv_cache_config.onboard_blocks"),
    "secondary_offload_min_priority": OtherNames("", "", "kv_cache_config.secondary_offload_min_priority"),
    "kv_cache_dir": OtherNames("--kv-cache-dir"),
    "kv_cache_disk_bytes": OtherNames("--kv-cache-disk"),
    "kv_events_config": OtherNames("--kv-events-config", "--kv-events-config"),
    "otlp_traces_endpoint": OtherNames("--otlp-traces-endpoint", "--otlp-traces-endpoint"),
    "kv_cache_free_cpu_mem_fraction": OtherNames("", "VLLM_CPU_KVCACHE_SPACE"),
    "exclude_input_in_output": _of_backend(),
    "cancellation_check_period_ms": _of_backend(),
    "add_special_tokens": _of_backend(),
    "skip_special_tokens": _of_backend(),
    "additional_model_outputs": OtherNames("", "", "additional_model_outputs"),
    "prompt_embedding_table_data_type": _of_backend(),
    "lora_weights_data_type": _of_backend(),
    "lora_adapters": OtherNames("--lora", "--lora-modules"),
    "lora_cache_optimal_adapter_size": _of_backend("", "", "peft_cache_config.optimal_adapter_size"),
    "lora_cache_max_adapter_size": _of_backend("", "--max-lora-rank", "peft_cache_config.max_adapter_size"),
    "lora_cache_gpu_memory_fraction": _of_backend(
        "", "--max-loras", "peft_cache_config.device_cache_percent"
    ),
    "lora_cache_host_memory_bytes": _of_backend("", "--max-cpu-loras", "peft_cache_config.host_cache_size"),
    "lora_prefetch_dir": _of_backend("", "", "peft_cache_config.lora_prefetch_dir"),
    "guided_decoding_backend": _of_backend("", "--structured-outputs-config", "guided_decoding_backend"),
    "tensorrt_llm_model_name": _of_backend(),
    "tensorrt_llm_draft_model_name": _of_backend(),
    "accumulate_tokens": _of_backend(),
    "tensor_parallel_size": OtherNames("--tp", "--tensor-parallel-size", "tensor_parallel_size"),
    "pipeline_parallel_size": OtherNames("--pp", "--pipeline-parallel-size", "pipeline_parallel_size"),
    "moe_expert_parallel_size": OtherNames("--ep", "--enable-expert-parallel", "moe_expert_parallel_size"),
    "launch_mode": OtherNames("--mode", "--distributed-executor-backend"),
    "mpirun_arguments": OtherNames("--mpirun-arguments"),
    "gpu_device_ids": _of_backend("", "CUDA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    "stats_check_period_ms": _of_backend(),
    "iter_stats_max_iterations": _of_backend("", "", "iter_stats_max_iterations"),
    "request_stats_max_iterations": _of_backend("", "", "request_stats_max_iterations"),
    "hang_timeout_ms": OtherNames("", "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"),
    "debug_input_tensors": OtherNames("", "", "debug_config.debug_input_tensors"),
    "debug_output_tensors": OtherNames("", "", "debug_config.debug_output_tensors"),
    "debug_tensor_names": OtherNames("", "", "debug_config.debug_tensor_names"),
    "debug_tensors_max_iterations": OtherNames("", "", "debug_config.debug_tensors_max_iterations"),
    "logits_post_processor_module": OtherNames("", "--logits-processors", "logits_post_processor_config"),
}
"""The names by key of config.pbtxt. Parameters that are not in it have no other name."""

_OWN_TOKENS = (
    "a draft token is accepted if it is the model's own token, so leave it out; an EAGLE-3 head is set by "
    "speculative_model_dir"
)
_CHAINS = (
    "drafts are chains and not trees, so leave it out; speculative_decoding_mode eagle3:K sets their length"
)
NOT_NEEDED: Mapping[str, str] = {
    "posterior_threshold": _OWN_TOKENS,
    "greedy_sampling": _OWN_TOKENS,
    "typical_acceptance": _OWN_TOKENS,
    "use_dynamic_tree": _CHAINS,
    "dynamic_tree_max_topk": _CHAINS,
}
"""Advice for settings of TensorRT-LLM that have no parameter here, by their names in lower case."""


def in_other_words(name: str) -> str | None:
    """Return what another server's setting is here, as the end of an error about it; None if it is no such name.

    Args:
        name: A field of TensorRT-LLM's LlmArgs, with or without its parents, or a flag of vLLM without the dashes.
    """
    word = name.replace("-", "_")
    if reason := NOT_NEEDED.get(word.lower()):
        return reason
    keys = [key for key, names in OTHER_NAMES.items() if word in _words(names)]
    return f"here it is {' or '.join(map(_with_flag, keys))}" if keys else None


def _words(names: OtherNames) -> set[str]:
    flags = {flag.lstrip("-").replace("-", "_") for flag in names.vllm.split(", ")}
    return (flags | {names.tensorrt_llm, names.tensorrt_llm.rpartition(".")[2]}) - {""}


def _with_flag(key: str) -> str:
    flag = OTHER_NAMES[key].flag
    return f"{key} ({flag})" if flag else key

"""Flags of vLLM and TensorRT-LLM's `trtllm-serve`: those with the same meaning here, and answers to others.

Standard library only.
"""

from collections.abc import Sequence

from inflight.server.errors import OptionError

SAME = {
    "--tensor-parallel-size": "--tp",
    "--tp_size": "--tp",
    "--pipeline-parallel-size": "--pp",
    "--pp_size": "--pp",
    "--ep_size": "--ep",
    "--model-impl": "--engine",
    "--max-model-len": "--set max_sequence_length",
    "--max_seq_len": "--set max_sequence_length",
    "--max-num-seqs": "--set max_batch_size",
    "--max_batch_size": "--set max_batch_size",
    "--max-num-batched-tokens": "--set max_num_tokens",
    "--max_num_tokens": "--set max_num_tokens",
    "--max_beam_width": "--set max_beam_width",
    "--kv_cache_free_gpu_memory_fraction": "--set kv_cache_free_gpu_mem_fraction",
    "--kv-cache-dtype": "--set kv_cache_dtype",
    "--kv_cache_dtype": "--set kv_cache_dtype",
    "--block-size": "--set tokens_per_block",
    "--tokenizer": "--set tokenizer_dir",
    "--max-lora-rank": "--set lora_cache_max_adapter_size",
}
"""The option here, by another server's flag with one value: a flag, or `--set` and a parameter."""

DIFFERENT = {
    "--gpu-memory-utilization": "take --set kv_cache_free_gpu_mem_fraction=0.9, the share of the memory that is "
    "free after the weights are loaded",
    "--enable-prefix-caching": "nothing to set: equal prefixes are computed once",
    "--no-enable-prefix-caching": "take --set enable_kv_cache_reuse=false",
    "--enable-chunked-prefill": "take --set enable_chunked_context=true",
    "--enable_chunked_prefill": "take --set enable_chunked_context=true",
    "--enforce-eager": "take --set cuda_graph_mode=false",
    "--enable-lora": "nothing to set: --lora NAME=FOLDER is enough",
    "--lora-modules": "take --lora NAME=FOLDER, once for each adapter",
    "--enable-auto-tool-choice": "nothing to set: tools are always on",
    "--quantization": "it is read from the checkpoint; --dtype int8 or fp8 quantizes any checkpoint",
    "--backend": "take --engine torch, transformers or tensorrt",
    "--trust-remote-code": "not supported: code that comes with a checkpoint is never run",
    "--trust_remote_code": "not supported: code that comes with a checkpoint is never run",
    "--swap-space": "not supported: a paused sequence is computed again",
    "--cpu-offload-gb": "not supported: all weights are on the device",
    "--enable-log-requests": "take --log-verbose",
}
"""Advice by another server's flag that has no option with the same values here."""


def translate(arguments: Sequence[str]) -> list[str]:
    """Return the command line with flags of `SAME` replaced; raise OptionError for a flag of `DIFFERENT`."""
    translated: list[str] = []
    rest = iter(arguments)
    for word in rest:
        flag, equals, value = word.partition("=")
        if flag in DIFFERENT:
            raise OptionError(f"{flag} is a flag of another server: {DIFFERENT[flag]}")
        if flag not in SAME:
            translated.append(word)
            continue
        if not equals and (value := next(rest, "")) == "":
            raise OptionError(f"{flag}: expected a value, as for {SAME[flag]}")
        option, _, key = SAME[flag].partition(" ")
        translated += [option, f"{key}={value}" if key else value]
    return translated

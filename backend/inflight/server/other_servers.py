"""Flags of vLLM and TensorRT-LLM's `trtllm-serve`: those with the same meaning here, and answers to others.

As in vLLM, a flag may be written with underscores instead of dashes. Standard library only.
"""

import re
from collections.abc import Mapping, Sequence

from inflight.server.errors import OptionError

SAME: Mapping[str, str] = {
    "--tensor-parallel-size": "--tp",
    "-tp": "--tp",
    "--tp-size": "--tp",
    "--pipeline-parallel-size": "--pp",
    "-pp": "--pp",
    "--pp-size": "--pp",
    "--moe-expert-parallel-size": "--ep",
    "--ep-size": "--ep",
    "--model-impl": "--engine",
    "--backend": "--engine",
    "--tool-parser": "--tool-call-parser",
    "--tokenizer": "--set tokenizer_dir",
    "--max-model-len": "--set max_sequence_length",
    "--max-seq-len": "--set max_sequence_length",
    "--max-num-seqs": "--set max_batch_size",
    "--max-batch-size": "--set max_batch_size",
    "--max-num-batched-tokens": "--set max_num_tokens",
    "--max-num-tokens": "--set max_num_tokens",
    "--max-beam-width": "--set max_beam_width",
    "--stream-interval": "--set stream_interval",
    "--kv-cache-free-gpu-memory-fraction": "--set kv_cache_free_gpu_mem_fraction",
    "--free-gpu-memory-fraction": "--set kv_cache_free_gpu_mem_fraction",
    "--kv-cache-dtype": "--set kv_cache_dtype",
    "--block-size": "--set tokens_per_block",
    "--max-lora-rank": "--set lora_cache_max_adapter_size",
}
"""Flags of other servers that take one value, each with the option here: a flag, or `--set` and a parameter."""


SAME_VALUES: Mapping[str, Mapping[str, str]] = {
    "--dtype": {
        "auto": "",
        "half": "float16",
        "float": "float32",
        "fp16": "float16",
        "bf16": "bfloat16",
        "fp32": "float32",
    },
    "--set max_sequence_length": {"auto": "", "-1": ""},
    "--engine": {"auto": "", "vllm": "torch", "pytorch": "torch", "trt": "tensorrt"},
    "--reasoning-parser": {
        "qwen3": "think",
        "glm45": "think",
        "kimi_k2": "think",
        "olmo3": "think",
        "deepseek_v3": "think",
        "deepseek-r1": "deepseek_r1",
    },
    "--tool-call-parser": {"qwen3_xml": "qwen3_coder", "llama4_json": "llama3_json", "xlam": "json"},
}
"""The value here, by an option and another server's value; "": the option is left out."""

SIZES = ("--set max_sequence_length", "--set max_num_tokens")
"""The options of `SAME` for which other servers' names take sizes such as 32k or 32K, as in `vllm serve`."""

SWITCHES: Mapping[str, Sequence[str]] = {
    "--enable-prefix-caching": (),
    "--no-enable-prefix-caching": ("--set", "enable_kv_cache_reuse=false"),
    "--enable-chunked-prefill": ("--set", "enable_chunked_context=true"),
    "--no-enable-chunked-prefill": ("--set", "enable_chunked_context=false"),
    "--enforce-eager": ("--set", "cuda_graph_mode=false"),
    "--async-scheduling": (),
    "--enable-lora": (),
    "--enable-auto-tool-choice": (),
    "--enable-prompt-tokens-details": (),
    "--enable-request-id-headers": (),
    "--enable-tokenizer-info-endpoint": (),
    "--language-model-only": ("--no-vision",),
    "--enable-log-requests": (),
    "--disable-log-requests": (),
    "--no-enable-log-requests": (),
    "--disable-log-stats": (),
    "--disable-uvicorn-access-log": ("--no-access-log",),
    "--disable-fastapi-docs": (),
}
"""The options here, by another server's flag without a value; none: the server always does this."""

_KV_TOKENS = "take --set max_tokens_in_paged_kv_cache=N, the size of the KV cache in tokens"
_ONE_SERVER = "not supported: a server computes the prompts and the answers of its requests"
_IN_CONFIG = "not supported: change config.json in a copy of the checkpoint's folder"
_NO_OWN_CODE = "not supported: code that comes with a checkpoint is never run"
_PICTURES = "not supported: pictures are processed as the checkpoint's processor_config.json says"
_NO_PARSERS = "not supported: take one of the parsers that --help lists"
_TASKS = (
    "take --convert embed or classify; a checkpoint with a pooling of sentence-transformers, or for sequence "
    "classification, needs no flag"
)
_TOKENIZER = "nothing to set: the tokenizer is tokenizer.json, and requests with token ids need none"
_ACCESS = "nothing to set: --allowed-origins is enough, and browsers send API keys as a header"
_REPLICAS = "not supported: start a server for each replica, behind a load balancer"
_HOSTS = "take --mpirun-arguments with a hostfile: mpirun starts the ranks of all hosts"
_PICTURE_CACHE = "nothing to set: up to 1 GiB of encoded pictures is kept for further prompts"
_FINGERPRINT = "nothing to set: system_fingerprint is a hash of the version, the checkpoint and its limits"
_EXPERTS = "take --ep N, the number of groups of ranks that share the experts"
_TLS = "not supported: TLS is for the server's certificate only; API keys identify clients"

DIFFERENT: Mapping[str, str] = {
    # the model and its files
    "--quantization": "it is read from the checkpoint; --dtype int8 or fp8 quantizes any checkpoint",
    "-q": "it is read from the checkpoint; --dtype int8 or fp8 quantizes any checkpoint",
    "--load-format": "nothing to set: safetensors and GGUF files are recognized automatically",
    "--safetensors-load-strategy": "take --weights mmap, on a CPU, to map packed weights from a file",
    "--download-dir": "set the environment variable HF_HOME to the folder of downloads",
    "--hf-token": "set the environment variable HF_TOKEN",
    "--tokenizer-revision": "take --revision, which is for all files of the checkpoint",
    "--code-revision": _NO_OWN_CODE,
    "--trust-remote-code": _NO_OWN_CODE,
    "--tokenizer-mode": _TOKENIZER,
    "--skip-tokenizer-init": _TOKENIZER,
    "--custom-tokenizer": _TOKENIZER,
    "--config-format": "nothing to set: config.json in the form of Hugging Face is read",
    "--hf-config-path": _IN_CONFIG,
    "--hf-overrides": _IN_CONFIG,
    "--disable-sliding-window": "take --set max_sequence_length=N, with the size of the window",
    "--rope-scaling": _IN_CONFIG,
    "--rope-theta": _IN_CONFIG,
    "--task": _TASKS,
    "--runner": _TASKS,
    "--pooler-config": "nothing to set: an embedding is the hidden state of the last token",
    "--config": "take a flag or --set KEY=VALUE for each of the file's settings",
    "--extra-llm-api-options": "take a flag or --set KEY=VALUE for each of the file's settings",
    # sampling
    "--seed": "set seed in each request: equal seeds give equal tokens",
    "--generation-config": "only the end ids of generation_config.json are read; defaults of /v1 are OpenAI's, "
    "and requests can set others",
    "--override-generation-config": "take --default-max-tokens N for max_new_tokens, and set other values in each "
    "request",
    "--max-logprobs": "nothing to set: a request can ask for the 1024 most likely tokens at most",
    "--logprobs-mode": "log probabilities are the model's own; --set normalize_log_probs=true gives those after "
    "the sampling controls, at Triton's endpoints",
    "--return-tokens-as-token-ids": "set return_tokens_as_token_ids in each request",
    "--logits-processors": "take --set logits_post_processor_module=FILE with functions that requests name",
    "--guided-decoding-backend": "take --set guided_decoding_backend=llguidance or xgrammar",
    "--structured-outputs-config": "take --set guided_decoding_backend=llguidance or xgrammar",
    "--speculative-config": "take --speculate suffix:K, prompt-lookup:K for the method ngram, or mtp:K, or "
    "--draft-model DIR for the method eagle3 and for Gemma 4's heads; docs/speculation.md describes draft models",
    "--temperature": "set temperature in each request",
    "--top-k": "set top_k in each request",
    "--top-p": "set top_p in each request",
    "--max-tokens": "set max_tokens in each request; --default-max-tokens N is for requests without it",
    # memory
    "--gpu-memory-utilization": "take --set kv_cache_free_gpu_mem_fraction=0.9, the share of the memory that is "
    "free after the weights are loaded",
    "--kv-cache-memory-bytes": _KV_TOKENS,
    "--num-gpu-blocks-override": _KV_TOKENS,
    "--swap-space": "not supported: a paused sequence is computed again",
    "--kv-offloading-size": "take --set kv_cache_host_memory_bytes=N, host memory for KV blocks; "
    "--kv-cache-dir DIR saves them in files",
    "--cpu-offload-gb": "not supported: all weights are on the device",
    "--calculate-kv-scales": "nothing to set: with --set kv_cache_dtype=fp8 each token and head has its own scale",
    "--fail-fast-on-attention-window-too-large": "nothing to set: a request that is too long for the KV cache is "
    "refused",
    "--enable-sleep-mode": "take --set enable_sleep_mode=true",
    # the batch
    "--scheduling-policy": "nothing to set: the priority of a request always counts",
    "--max-num-partial-prefills": "take --set enable_chunked_context=true and --set max_num_tokens=N",
    "--long-prefill-token-threshold": "take --set enable_chunked_context=true and --set max_num_tokens=N",
    "--compilation-config": "nothing to set but --set cuda_graph_mode=true or false",
    "-O": "nothing to set but --set cuda_graph_mode=true or false",
    "--cudagraph-capture-sizes": "nothing to set but --set cuda_graph_mode=true or false",
    "--attention-backend": "nothing to set: the fastest kernel whose results were checked is used",
    # adapters
    "--lora-modules": "take --lora NAME=FOLDER, once for each adapter",
    "--max-loras": "take --set lora_cache_gpu_memory_fraction=0.05, the share for adapters of the memory "
    "that is free after the weights are loaded",
    "--max-cpu-loras": "take --set lora_cache_host_memory_bytes=N, the memory of the host for adapters",
    # several processors and servers
    "--device": "nothing to set: GPUs are used if the machine has some, and else its processors",
    "--data-parallel-size": _REPLICAS,
    "-dp": _REPLICAS,
    "--data-parallel-size-local": _REPLICAS,
    "--data-parallel-rank": _REPLICAS,
    "--data-parallel-address": _REPLICAS,
    "--data-parallel-rpc-port": _REPLICAS,
    "--data-parallel-backend": _REPLICAS,
    "--nnodes": _HOSTS,
    "--node-rank": _HOSTS,
    "--master-addr": _HOSTS,
    "--master-port": _HOSTS,
    "--headless": _HOSTS,
    "--distributed-timeout-seconds": "the closest is --set rank_timeout_ms=N: the time after which a rank without "
    "heartbeats is lost",
    "--enable-expert-parallel": _EXPERTS,
    "--moe-cluster-parallel-size": f"not supported: {_EXPERTS}",
    "--cluster-size": f"not supported: {_EXPERTS}",
    "--distributed-executor-backend": "take --mode leader or orchestrator: mpirun starts the ranks",
    "--decode-context-parallel-size": "not supported: take --tp or --pp",
    "--context-parallel-size": "not supported: take --tp or --pp",
    "--cp-size": "not supported: take --tp or --pp",
    "--gpus-per-node": "take --set gpu_device_ids=0,1, the GPUs of the ranks of one host",
    "--kv-transfer-config": _ONE_SERVER,
    "--server-role": _ONE_SERVER,
    "--disagg-cluster-uri": _ONE_SERVER,
    "--metadata-server-config-file": _ONE_SERVER,
    "--api-server-count": "nothing to set: /v1 is one process",
    "--num-postprocess-workers": "nothing to set: /v1 is one process",
    "--disable-frontend-multiprocessing": "nothing to set: /v1 is one process",
    # /v1
    "--root-path": "not supported: let the proxy remove the prefix",
    "--uds": "not supported: take --host and --port",
    "--middleware": "not supported: put a proxy before /v1",
    "--allow-credentials": _ACCESS,
    "--allowed-methods": _ACCESS,
    "--allowed-headers": _ACCESS,
    "--ssl-ca-certs": _TLS,
    "--ssl-cert-reqs": _TLS,
    "--ssl-ciphers": "not supported: put a proxy before /v1",
    "--enable-ssl-refresh": "not supported: start the server again after its certificate has changed",
    "--response-role": "not supported: the role of an answer is assistant",
    "--tool-parser-plugin": _NO_PARSERS,
    "--reasoning-parser-plugin": _NO_PARSERS,
    "--trust-request-chat-template": "not supported: take --chat-template",
    "--default-chat-template-kwargs": "set chat_template_kwargs in each request",
    "--enable-force-include-usage": "set stream_options.include_usage in each request",
    "--chat-template-content-format": "nothing to set: a message's content is converted to the form that the "
    "template can render",
    "--exclude-tools-when-tool-choice-none": "not supported: leave tools out of such a request",
    "--tool-server": "not supported: the server runs no tools",
    "--enable-prompt-embeds": "not supported in /v1; at Triton's endpoints, the tensor prompt_embedding_table has "
    "embeddings",
    "--fingerprint-mode": _FINGERPRINT,
    "--fingerprint-value": _FINGERPRINT,
    "--mm-processor-cache-gb": _PICTURE_CACHE,
    "--mm-processor-cache-type": _PICTURE_CACHE,
    "--mm-processor-kwargs": _PICTURES,
    "--media-io-kwargs": _PICTURES,
    # the log and metrics
    "--uvicorn-log-level": "take --log-verbose for more lines, or --no-access-log for fewer",
    "--log-level": "take --log-verbose for more lines, or --no-access-log for fewer",
    "--log-config-file": "take --log-format json, which writes every line as a JSON object",
    "--disable-access-log-for-endpoints": "nothing to set: GET requests have no line in the log",
    "--max-log-len": "nothing to set: the log has no prompts",
    "--enable-log-outputs": "take --set record_path=FILE, which records whole requests",
    "--collect-detailed-traces": "not supported: a request's line in the log has its times",
}
"""Advice by another server's flag that has no option with the same values here."""

FLAGS = (*SAME, *SWITCHES, *DIFFERENT)
"""Flags of other servers that are understood or answered."""

_FLAG = re.compile(r"--[a-zA-Z][\w-]*")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kmgt])|(\d+)([KMGT])", re.ASCII)


def flags_that_set(parameter: str) -> list[str]:
    """Return the other servers' flags that set a parameter."""
    return [flag for flag, option in SAME.items() if option == f"--set {parameter}"]


def given_as(arguments: Sequence[str]) -> dict[str, str]:
    """Return the other servers' flags on a command line, as they are written, by the option here."""
    words = (word.partition("=")[0] for word in arguments if _FLAG.match(word))
    return {SAME[flag]: word for word in words if (flag := word.replace("_", "-")) in SAME}


def translate(arguments: Sequence[str]) -> list[str]:
    """Return the command line with flags of `SAME` and `SWITCHES` replaced.

    Raises OptionError if a flag of `DIFFERENT` is among them, with the advice for each.
    """
    translated: list[str] = []
    advice: list[str] = []
    rest = iter(arguments)
    for word in rest:
        written, equals, value = word.partition("=")
        flag = written.replace("_", "-") if _FLAG.fullmatch(written) else written
        if flag in DIFFERENT:
            advice.append(f"{written} is a flag of another server: {DIFFERENT[flag]}")
        elif flag in SWITCHES:
            if equals:
                raise OptionError(f"{word}: {written} takes no value")
            translated += SWITCHES[flag]
        elif flag in SAME or flag in SAME_VALUES:
            same = SAME.get(flag, flag)
            if not equals and (value := next(rest, "")) == "":
                raise OptionError(f"{written}: expected a value, as for {same}")
            value = SAME_VALUES.get(same, {}).get(value, value)
            if same in SIZES:
                value = _plain_number(value)
            option, _, key = same.partition(" ")
            if value:
                translated += [option, f"{key}={value}" if key else value]
        else:
            translated.append(f"{flag}{equals}{value}")
    if advice:
        raise OptionError("\n".join(dict.fromkeys(advice)))
    return translated


def _plain_number(value: str) -> str:
    """Return a size of vLLM as a whole number: 32k is 32000, 32K is 32768, 25.6k is 25600. Leave other texts."""
    found = _SIZE.fullmatch(value.strip())
    if found is None:
        return value
    decimal, power_of_1000, binary, power_of_1024 = found.groups()
    if decimal is not None:
        return str(round(float(decimal) * 1000 ** (1 + "kmgt".index(power_of_1000))))
    return str(int(binary) << 10 * (1 + "KMGT".index(power_of_1024)))

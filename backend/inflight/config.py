"""Every parameter of the engine, declared once: its name, type, default, range and meaning.

A parameter is a field of `Parameters` or of its parts `SchedulingConfig` and `EngineConfig`, from which the
scheduler and the engine are built. These fields determine the rows of config.pbtxt, their comments, and the
values that `parameter_reader.py` accepts. Keys of TensorRT-LLM that have no effect here are rows without a
field (`idle_parameters.py`).

TensorRT-LLM's keys keep their meaning and, if it is known, their default. Types, ranges and rows are
declared with `parameter_spec.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from inflight.additional_outputs import NAMES as OUTPUT_NAMES
from inflight.additional_outputs import WantedOutput, are_distinct, parse_outputs
from inflight.errors import ConfigError
from inflight.idle_parameters import NO_EFFECT, UNBUILT
from inflight.parameter_spec import (
    BOOLEAN,
    CHOICES,
    DATA_TYPES,
    DEVICES,
    ENGINE_ONLY,
    KV_EVENTS,
    NAMED_FOLDERS,
    NAMES,
    SPECIAL_TOKENS,
    SPECULATION,
    TEXT,
    TOKEN_IDS,
    URL,
    WINDOWS,
    DraftTree,
    KvEventsConfig,
    ParameterKind,
    ParameterSpec,
    Role,
    SpecialTokens,
    Speculation,
    choice,
    declared_rows,
    integer,
    member,
    parameter,
    share,
)

__all__ = [
    "FP8",
    "INT8",
    "MMAP",
    "PARAMETERS",
    "QUANTIZED",
    "SEQUENCES_PER_ITERATION",
    "CapacityPolicy",
    "ChunkingPolicy",
    "EngineConfig",
    "KvEventsConfig",
    "ParameterSpec",
    "Parameters",
    "Role",
    "SchedulePolicy",
    "SchedulingConfig",
    "SpecialTokens",
    "Speculation",
]

INT8 = "int8"
FP8 = "fp8"
QUANTIZED = (INT8, FP8)
"""Dtypes that apply to the weights of linear layers only; all other tensors are bfloat16."""
MMAP = "mmap"
"""Value of the parameter `weights` with which weights are mapped from a file."""

SEQUENCES_PER_ITERATION = 256
"""Maximum number of sequences that one iteration accepts, and also the maximum number that it ends because
of a client, a deadline or an event. Accepting or ending this many takes a few milliseconds."""

DEBUG_INPUTS = ("input_ids", "positions", "sequence_length")
DEBUG_OUTPUTS = ("logits",)
"""Tensors of an iteration's result that debug output can include."""

_BLS = frozenset({Role.BLS})
_FRONT_END = _BLS | {Role.FRONT_END}
_MODELS = ENGINE_ONLY | _FRONT_END
_PREPROCESSING = frozenset({Role.PREPROCESSING})
_ALL = frozenset(Role)
_OUTPUTS = ParameterKind(
    f"any of {OUTPUT_NAMES}, each at most once, separated by commas; with :context behind its name, a tensor is "
    "also returned for the prompt's tokens",
    parse_outputs,
    lambda value: all(isinstance(each, WantedOutput) for each in value) and are_distinct(value),
)
_DEBUG_TENSORS = ParameterKind(
    f"any of {', '.join(DEBUG_INPUTS + DEBUG_OUTPUTS)}, separated by commas",
    NAMES.convert,
    lambda value: set(value) <= {*DEBUG_INPUTS, *DEBUG_OUTPUTS},
)


# ---------------------------------------------------------------------- parameters


class CapacityPolicy(Enum):
    """TensorRT-LLM's `batch_scheduler_policy`. Specification: The Batch Manager, GptManager Design.

    GUARANTEED_NO_EVICT admits a request only if there are certainly enough KV blocks until its end.
    MAX_UTILIZATION admits a request if its context fits. When blocks run out, it pauses a request of the
    lowest priority, the one that started last.
    STATIC_BATCH is V1 batching: requests are admitted only when none runs, so that a batch ends before the
    next one starts.
    """

    GUARANTEED_NO_EVICT = "guaranteed_no_evict"
    MAX_UTILIZATION = "max_utilization"
    STATIC_BATCH = "static_batch"


class ChunkingPolicy(Enum):
    """TensorRT-LLM's `ContextChunkingPolicy`: which contexts get an iteration's remaining tokens, with chunking.

    FIRST_COME_FIRST_SERVED gives the oldest context as many tokens as it needs, then the next oldest.
    EQUAL_PROGRESS gives every context one block's worth of tokens in turn.
    """

    FIRST_COME_FIRST_SERVED = "first_come_first_served"
    EQUAL_PROGRESS = "equal_progress"


class SchedulePolicy(Enum):
    """SGLang's `--schedule-policy`: which of a client's waiting requests of one priority starts next.

    FCFS starts them in order of arrival (first come, first served).
    LPM starts the one with the longest prefix in the KV cache (longest prefix match); no request is overtaken more
    than `SchedulingConfig.max_overtaken` times.
    """

    FCFS = "fcfs"
    LPM = "lpm"


@dataclass(frozen=True, slots=True)
class SchedulingConfig:
    """Policies and limits by which the scheduler chooses the requests and rows of an iteration.

    Attributes:
        policy: Rule for which sequences may hold KV blocks. STATIC_BATCH if `gpt_model_type` is V1.
        max_num_tokens: Maximum number of context and generation tokens in one packed forward pass.
        enable_chunked_context: Whether to split long prompts; a prompt may then exceed max_num_tokens.
        context_chunking_policy: Rule for which contexts get the remaining tokens. Used only with
            enable_chunked_context.
        schedule_policy: Order in which the waiting requests of one client and priority start.
        max_queue_size: A new request is refused if this many sequences of its priority or a higher one wait.
        max_num_requests: Maximum number of active requests, including waiting ones; negative: no limit.
        sequences_per_iteration: Maximum number of sequences that an iteration ends because of a stop, a
            cancellation, a deadline or an error; more sequences end in later iterations. Sequences of one
            request end together.
        max_overtaken: Maximum number of later requests that LPM starts before a waiting request.
        kv_event_buffer_size: Number of KV cache events kept until they are fetched; 0: no events are made.
        has_block_store: Whether KV blocks are saved in host memory or files.
    """

    policy: CapacityPolicy = parameter(
        CapacityPolicy.GUARANTEED_NO_EVICT,
        # Static batching is chosen by gpt_model_type, not by this parameter.
        member(CapacityPolicy, CapacityPolicy.STATIC_BATCH),
        "when a waiting sequence starts; guaranteed_no_evict: when KV blocks for its whole length can be "
        "reserved; max_utilization: when its prompt fits into the KV cache, at the risk that the sequence is "
        "paused later",
        key="batch_scheduler_policy",
        behind="gpt_model_type",
    )
    enable_chunked_context: bool = parameter(False, BOOLEAN, "split long prompts over several iterations")
    context_chunking_policy: ChunkingPolicy = parameter(
        ChunkingPolicy.FIRST_COME_FIRST_SERVED,
        member(ChunkingPolicy),
        "how split prompts (enable_chunked_context) share the tokens of an iteration that generation does not "
        "need; first_come_first_served: the oldest prompt gets as many tokens as it needs, then the next "
        "oldest prompt; equal_progress: each prompt gets one block of tokens in turn",
    )
    schedule_policy: SchedulePolicy = parameter(
        SchedulePolicy.FCFS,
        member(SchedulePolicy),
        "which of a client's waiting requests of the same priority starts first; fcfs: the oldest request; "
        "lpm: the request with the longest cached prefix, but at most 32 later requests may overtake a "
        "request",
    )
    enable_kv_cache_reuse: bool = parameter(
        True, BOOLEAN, "reuse KV blocks of earlier sequences with the same prefix (prefix caching)"
    )
    kv_cache_onboard_blocks: bool = parameter(
        True,
        BOOLEAN,
        "copy saved KV blocks from host memory or files back into the cache when prompts need them; "
        "false: save blocks, but never copy them back",
    )
    secondary_offload_min_priority: int = parameter(
        30, integer(0), "lowest retention priority of the KV blocks that are saved in host memory or files"
    )
    max_num_tokens: int = parameter(8192, integer(1), "maximum number of tokens in one iteration")
    max_queue_size: int = parameter(
        0,
        integer(0),
        "maximum number of waiting sequences; a request is refused if this many sequences of the same or a "
        "higher priority are already waiting; 0: no limit",
    )
    max_beam_width: int | None = parameter(
        None, integer(1), "maximum number of beams of a beam search; default: max_batch_size"
    )
    max_sequences_per_request: int = parameter(
        2048,
        integer(1),
        "maximum number of sequences of a request; the number of sequences is the number of prompts times "
        "num_return_sequences",
    )
    speculative_decoding_mode: Speculation | None = parameter(
        None,
        SPECULATION,
        "draft up to K next tokens of each sequence; prompt-lookup (K is 8 by default): draft from the "
        "sequence's own tokens; suffix (K is 8 by default): draft from the sequence's own tokens and recent "
        "answers; mtp (K is 1 by default): draft with the checkpoint's draft head, or with Gemma 4's draft "
        "head in speculative_model_dir; eagle3 (K is 3 by default): draft with the EAGLE-3 head in "
        "speculative_model_dir; none: draft only for requests that ask for prompt lookup; default: none",
    )
    speculative_model_dir: str | None = parameter(
        None,
        TEXT,
        "folder of a draft head; an EAGLE-3 head implies speculative_decoding_mode eagle3, and Gemma 4's draft "
        "head implies speculative_decoding_mode mtp:3",
    )
    eagle_choices: DraftTree | None = parameter(
        None,
        CHOICES,
        "draft tree of an EAGLE-3 or MTP head, as in TensorRT-LLM; only one chain of its nodes is drafted: first "
        "{0}, then {0, 0}, then {0, 0, 0} and so on; the chain's length sets K of speculative_decoding_mode",
    )
    max_num_requests: int = -1
    sequences_per_iteration: int = SEQUENCES_PER_ITERATION
    max_overtaken: int = 32
    kv_event_buffer_size: int = 0
    has_block_store: bool = False

    def validate(self, max_num_sequences: int, tokens_per_block: int) -> None:
        """Raise ConfigError if these settings cannot work with that many slots and that block size."""
        if self.max_num_tokens < max_num_sequences:
            raise ConfigError(
                f"max_num_tokens is {self.max_num_tokens}; it must be at least max_batch_size "
                f"({max_num_sequences}), so that every running request gets a token in an iteration"
            )
        if self.max_num_tokens < tokens_per_block:
            raise ConfigError(
                f"max_num_tokens is {self.max_num_tokens}; it must hold at least one KV block of "
                f"{tokens_per_block} tokens, because long contexts are computed in chunks of blocks"
            )
        if self.secondary_offload_min_priority > 100:
            raise ConfigError(
                f"secondary_offload_min_priority is {self.secondary_offload_min_priority}, expected at most 100, "
                "the highest retention priority: no KV block would be saved"
            )
        if self.max_beam_width is not None and self.max_beam_width > max_num_sequences:
            raise ConfigError(
                f"max_beam_width is {self.max_beam_width}; it can be at most max_batch_size "
                f"({max_num_sequences}), because every beam runs as a sequence of the batch"
            )
        beside_others = max_num_sequences - 1 + tokens_per_block
        if self.enable_chunked_context and self.max_num_tokens < beside_others:
            raise ConfigError(
                f"max_num_tokens is {self.max_num_tokens}; with enable_chunked_context it must be at least "
                f"{beside_others}, so that a chunk of one KV block ({tokens_per_block} tokens) fits beside "
                "a token for every other running request; else running streams would keep prompts waiting"
            )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The settings that an engine is loaded with.

    Attributes:
        dtype: float32, bfloat16 and float16 are the dtype of weights, activations and KV cache. With int8
            and fp8, the weights of linear layers are quantized, and with native kernels or fp8 also their
            inputs; all other tensors are bfloat16.
        implementation: The code that runs the layers: `inflight.engine`, transformers' own code, or TensorRT
            plans.
        engine_dir: Folder of plans. If given, `gpt_model_path` is the checkpoint that they were built from.
        weights: Place of packed weights: memory or a mapped file. mmap has no effect without compiled layers.
        kv_cache_dtype: With int8 and fp8, keys and values are stored in 8 bits with a scale per token and
            head, and attention is computed in the dtype of activations.
        max_attention_window_size: Number of keys that a token attends to, including its own; layer i uses
            entry i % n. If the checkpoint also has a sliding window, the smaller window applies. Keys
            outside the window stay in the cache, so that no memory is saved.
        sink_token_length: Number of first tokens that stay in every window; no effect in layers without a
            window. `layer_windows` documents the difference from TensorRT-LLM.
        normalize_log_probs: Whether log probs are those of the distribution that a token was sampled from.
            cum_log_probs and the log probs of the top tokens are always the model's own.
        engine_threads: On a CPU, number of threads of compiled layers and of torch in this process.
        max_num_sequences: Number of slots: how many sequences can run at a time. Triton's max_batch_size.
        max_num_tokens: Maximum number of tokens in one packed forward pass, as in SchedulingConfig.
        device: A torch device; None: cuda if available, else cpu.
        ranks_on_host: Number of ranks that share this machine's memory. On a CPU, each rank uses an equal
            part of the free memory.
        max_adapter_pages: Maximum number of pages for LoRA adapters; None: no other limit than the memory and
            what all slots can use.
        shares_blocks: Whether several sequences may use one KV block, by prefix reuse or as beams.
        has_draft_head: Whether `speculative_decoding_mode` is mtp: the head in `draft_head_dir` drafts, or the
            checkpoint's own if there is no folder.
        draft_head_dir: `speculative_model_dir`.
    """

    gpt_model_path: str | None = parameter(
        None,
        TEXT,
        "folder of the checkpoint; default: the demo model",
        ENGINE_ONLY | _PREPROCESSING,
        template="engine_dir",
    )
    dtype: str | None = parameter(
        None,
        choice("float32", "bfloat16", "float16", "int8", "fp8"),
        "data type of the weights and the KV cache; int8 and fp8: only the weights have this type, and the "
        "rest is bfloat16; default: the checkpoint's",
        behind="tokenizer_dir",
    )
    implementation: str | None = parameter(
        None,
        choice("torch", "transformers", "tensorrt"),
        "what computes the layers; torch: this server's own code; transformers: the code of Hugging Face "
        "transformers, which is slower, but also runs other model families; tensorrt: TensorRT engines "
        "(plans) that scripts/build wrote; default: tensorrt for a folder of plans, torch for the model "
        "families that torch supports, transformers for other families",
        key="engine",
    )
    engine_dir: str | None = parameter(
        None,
        TEXT,
        "folder of TensorRT engines (plans) that scripts/build wrote; gpt_model_path may also be such a "
        "folder",
        key="tensorrt_engine_dir",
    )
    kernels: str | None = parameter(
        None,
        choice("native", "torch"),
        "what computes the layers if the setting engine is torch; native: compiled layers, for CPUs; torch: "
        "torch's operators; default: native if possible",
    )
    weights: str = parameter(
        "memory",
        choice("memory", MMAP),
        "load the weights into memory, or map them from a file; mmap: compiled layers map their packed "
        "weights from a file that the first load writes to the user's cache",
    )
    cuda_graph_mode: bool = parameter(
        True, BOOLEAN, "on a GPU, run iterations of up to 1,024 tokens as CUDA graphs"
    )
    max_sequence_length: int | None = parameter(
        None,
        integer(2),
        "maximum number of tokens of prompt and output together; default: the model's number of positions",
        behind="max_beam_width",
    )
    max_attention_window_size: tuple[int, ...] = parameter(
        (),
        WINDOWS,
        "number of the latest tokens to which a layer attends; a list of several numbers, one for each layer, "
        "is repeated if the model has more layers; default: all tokens",
    )
    sink_token_length: int = parameter(
        0,
        integer(0),
        "number of attention sinks, which are the first tokens of a sequence; every attention window keeps "
        "these tokens, and they count towards the window's size",
    )
    tokens_per_block: int = parameter(32, integer(1), "number of tokens in a KV cache block")
    kv_cache_dtype: str = parameter(
        "auto",
        choice("auto", INT8, FP8),
        "data type of stored keys and values; int8 and fp8 (e4m3): quantized, which takes about half of the "
        "memory of 16-bit keys and values; auto: not quantized",
    )
    max_tokens_in_paged_kv_cache: int | None = parameter(
        None,
        integer(1),
        "maximum size of the KV cache in tokens; default: as many tokens as kv_cache_free_gpu_mem_fraction "
        "or kv_cache_free_cpu_mem_fraction allows, but on a CPU at most twice the product of max_batch_size "
        "and max_sequence_length",
    )
    kv_cache_host_memory_bytes: int = parameter(
        0,
        integer(0),
        "size of the host memory for KV blocks that do not fit into the GPU's KV cache; on a CPU, this "
        "memory is added to the KV cache",
    )
    recurrent_state_snapshots: int | None = parameter(
        None,
        integer(0),
        "number of copies (snapshots) of recurrent states that are kept for prefix reuse; default: twice "
        "max_batch_size",
    )
    kv_cache_free_gpu_mem_fraction: float = parameter(
        0.9,
        share(above=True),
        "maximum size of the KV cache, as a fraction of the GPU memory that is free after loading the weights",
    )
    kv_cache_free_cpu_mem_fraction: float = parameter(
        0.5,
        share(above=True),
        "maximum size of the KV cache on a CPU, as a fraction of the memory that is free after loading the "
        "weights",
    )
    lora_cache_optimal_adapter_size: int = parameter(
        8,
        integer(1),
        "size of a page of the device memory for adapters, given as the highest LoRA rank that fits into a "
        "page",
        behind="guided_decoding_max_guide_bytes",
    )
    lora_cache_max_adapter_size: int = parameter(64, integer(1), "highest rank of a LoRA adapter")
    lora_cache_gpu_memory_fraction: float | None = parameter(
        None,
        share(),
        "maximum memory for LoRA adapters, as a fraction of the device memory that is free after loading the "
        "weights; 0: no adapters; default: 0.05, or 0 if that is too little for one adapter "
        "of the highest rank",
    )
    normalize_log_probs: bool = parameter(
        False,
        BOOLEAN,
        "take output_log_probs from the distribution from which tokens are sampled; false: take them from "
        "the model's own distribution",
        behind="exclude_input_in_output",
    )
    engine_threads: int | None = parameter(
        None,
        integer(1),
        "number of threads of a rank's forward pass; default: depends on the rank's cores and processor quota",
        behind="engine_endpoint",
    )
    additional_model_outputs: tuple[WantedOutput, ...] = parameter(
        (),
        _OUTPUTS,
        "tensors of the model that requests can get as outputs context_<name> and generation_<name>",
        _MODELS,
        behind="max_repeated_logits_bytes",
    )
    debug_input_tensors: bool = parameter(
        False,
        BOOLEAN,
        f"write {', '.join(DEBUG_INPUTS[:-1])} and {DEBUG_INPUTS[-1]} of every iteration to files",
        behind="watchdog_timeout_ms",
    )
    debug_output_tensors: bool = parameter(
        False,
        BOOLEAN,
        f"write {', '.join(DEBUG_OUTPUTS)} of every iteration to files",
        behind="debug_input_tensors",
    )
    debug_tensor_names: tuple[str, ...] = parameter(
        (), _DEBUG_TENSORS, "write these tensors of every iteration to files", behind="debug_output_tensors"
    )
    debug_tensors_max_iterations: int = parameter(
        0,
        integer(0),
        "number of latest iterations whose debug tensors are kept in memory; 0: the tensors are written to "
        "files",
        behind="debug_tensor_names",
    )
    debug_tensors_dir: str = parameter(
        "/tmp/tllm_debug", TEXT, "folder of the debug tensors' files", behind="debug_tensors_max_iterations"
    )
    max_num_sequences: int = 8
    max_num_tokens: int = 8192
    device: str | None = None
    ranks_on_host: int = 1
    max_adapter_pages: int | None = None
    shares_blocks: bool = True
    has_draft_head: bool = False
    draft_head_dir: str | None = None

    @property
    def drafts(self) -> bool:
        """Whether a draft head guesses tokens."""
        return self.has_draft_head or self.draft_head_dir is not None

    def validate(self) -> None:
        """Raise ConfigError, with parameter, value and expected values, if a value is not valid."""
        for name, spec in declared_rows(EngineConfig).items():
            value = getattr(self, name)
            if value is not None and not _accepts(spec.kind, value):
                raise ConfigError(f"{name} is {value!r}, expected {spec.kind.expected}")
        for name in ("max_num_sequences", "max_num_tokens", "ranks_on_host"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"{name} is {value}, expected at least 1")
        if self.implementation == "transformers" and self.dtype in QUANTIZED:
            raise ConfigError(
                f"dtype is {self.dtype}, expected float32, bfloat16 or float16: engine is transformers, which has "
                "no int8 and fp8 here"
            )
        if self.drafts and self.implementation not in (None, "torch"):
            method = "mtp" if self.has_draft_head else "eagle3"
            raise ConfigError(
                f"speculative_decoding_mode is {method}, expected none, prompt-lookup or suffix: engine is "
                f"{self.implementation}, and only torch computes draft heads"
            )


def _accepts(kind: ParameterKind, value: Any) -> bool:
    try:
        return kind.accepts(value)
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class Parameters:
    """All parameters of a model from config.pbtxt, checked, with defaults. None means not given."""

    tokenizer_dir: str | None = parameter(
        None, TEXT, "folder of tokenizer.json; default: the checkpoint", _ALL - {Role.ENCODERS}
    )
    gpt_model_type: str = parameter(
        "inflight_fused_batching",
        choice("V1", "inflight_batching", "inflight_fused_batching", any_case=True),
        "kind of batching; V1: static batching, in which a batch ends before the next one starts; "
        "inflight_batching and inflight_fused_batching: in-flight batching, with prompts and generation in "
        "one forward pass",
        template="batching_strategy",
        complaint="{key} value of {text!r} is not supported",
    )
    exclude_input_in_output: bool | None = parameter(
        None,
        BOOLEAN,
        "leave the prompt out of the output, unless a request says otherwise; default: false for "
        "tensorrt_llm, and the value of tensorrt_llm for the other models",
        _MODELS,
    )
    ignored_request_parameters: tuple[str, ...] = parameter(
        (),
        NAMES,
        "request parameters to accept and ignore, for instance HTTP headers that Triton forwards",
        _ALL,
    )
    default_end_ids: tuple[int, ...] = parameter(
        (),
        TOKEN_IDS,
        "ids of the tokens at which an output ends if the request has input_ids, but no end_id",
    )
    receipt_key_file: str | None = parameter(
        None,
        TEXT,
        "file whose bytes are the key with which the server signs receipts; default: receipts are not signed",
        behind="default_end_ids",
    )
    kv_cache_dir: str | None = parameter(
        None,
        TEXT,
        "folder in which the server saves KV blocks, to reuse them even after a restart; default: no blocks "
        "are saved",
        behind="receipt_key_file",
    )
    kv_cache_disk_bytes: int = parameter(
        10 << 30, integer(1), "maximum size of the files in kv_cache_dir", behind="kv_cache_dir"
    )
    kv_cache_max_age_s: int = parameter(
        7 * 24 * 3600,
        integer(1),
        "a file in kv_cache_dir is removed after this many seconds without use",
        behind="kv_cache_disk_bytes",
    )
    kv_events_config: KvEventsConfig | None = parameter(
        None,
        KV_EVENTS,
        "publish KV cache events over ZeroMQ, in vLLM's format; the value is JSON with the fields of vLLM's "
        "--kv-events-config; default: no events are published",
        behind="kv_cache_max_age_s",
    )
    otlp_traces_endpoint: str | None = parameter(
        None,
        URL,
        "address to which the server sends OpenTelemetry spans of all requests, by OTLP over HTTP; default: "
        "no spans are sent",
        behind="kv_events_config",
    )
    cancellation_check_period_ms: int = parameter(
        20, integer(1), "milliseconds between two checks for cancelled requests", _MODELS
    )
    stream_interval: int = parameter(
        1,
        integer(1),
        "number of tokens in each response of a stream, except in the first and the last response; larger "
        "numbers cost less processor time",
        _MODELS,
    )
    repeat_log_probs: bool = parameter(
        True,
        BOOLEAN,
        "each response of a stream has output_log_probs of all tokens so far; false: only those of the "
        "response's own tokens",
        _MODELS,
    )
    max_repeated_logits_bytes: int = parameter(
        8 << 20,
        integer(0),
        "maximum size in bytes of context_logits that every response of a stream repeats; larger context_logits "
        "are only in the first response",
        _MODELS,
    )
    stats_check_period_ms: int = parameter(
        100, integer(1), "milliseconds between two publications of statistics"
    )
    iter_stats_max_iterations: int = parameter(
        1000, integer(0), "number of iterations whose statistics are kept until they are fetched"
    )
    request_stats_max_iterations: int = parameter(
        0,
        integer(0),
        "number of iterations whose statistics about each request are kept until they are fetched",
    )
    enable_state_requests: bool = parameter(
        False, BOOLEAN, "let clients read what is queued, running and cached"
    )
    logits_post_processor_module: str | None = parameter(
        None,
        TEXT,
        "Python module, or path of a .py file, with logits post-processors that requests may name",
    )
    record_path: str | None = parameter(
        None, TEXT, "file in which requests and the scheduler's decisions are recorded for a replay"
    )
    watchdog_timeout_ms: int = parameter(
        60000,
        integer(0),
        "milliseconds after which a running iteration is reported as hanging; 0: never",
    )
    hang_timeout_ms: int = parameter(
        120000,
        integer(0),
        "time limit of an iteration in milliseconds; if an iteration takes longer, requests in flight fail, "
        "and the engine ends; scripts/serve starts it again, except with --no-triton; 0: no limit",
        behind="watchdog_timeout_ms",
    )
    engine_endpoint: str | None = parameter(
        None, TEXT, "path of the engine's socket; default: a path that is unique for each server", _MODELS
    )
    tensor_parallel_size: int = parameter(1, integer(1), "number of ranks that share every layer")
    pipeline_parallel_size: int = parameter(
        1, integer(1), "number of pipeline stages among which the layers are divided"
    )
    moe_expert_parallel_size: int = parameter(
        1,
        integer(1),
        "number of groups of tensor-parallel ranks; each group has a part of the experts; "
        "tensor_parallel_size must be a multiple of the number of groups",
    )
    launch_mode: str | None = parameter(
        None,
        choice("in_process", "leader", "orchestrator"),
        "where the ranks run and what starts them; in_process: there is one rank, in the model's process; "
        "leader: mpirun or srun starts tritonserver and the ranks; orchestrator: the model's process starts "
        "the ranks; default: chosen automatically",
    )
    mpirun_arguments: str | None = parameter(None, TEXT, "further arguments for mpirun, in a shell's syntax")
    rank_timeout_ms: int = parameter(
        5000, integer(100), "a rank counts as lost after this many milliseconds without a heartbeat"
    )
    gpu_device_ids: tuple[int, ...] = parameter(
        (), DEVICES, "GPUs to use, one for each rank of a host; default: 0, 1 and so on"
    )
    prompt_embedding_table_data_type: str = parameter(
        "TYPE_FP16",
        DATA_TYPES,
        "data type of the input prompt_embedding_table; Triton accepts no other type",
        _MODELS,
    )
    tensorrt_llm_model_name: str = parameter(
        "tensorrt_llm", TEXT, "name of the model with the engine", _FRONT_END, template_value="tensorrt_llm"
    )
    tensorrt_llm_draft_model_name: str | None = parameter(
        None,
        TEXT,
        "name of the model that drafts tokens for requests with num_draft_tokens; default: none",
        _BLS,
    )
    draft_engine_endpoint: str | None = parameter(
        None,
        TEXT,
        "path of the draft model's socket; needed if the draft model's engine_endpoint is set",
        _BLS,
    )
    accumulate_tokens: bool = parameter(
        False, BOOLEAN, "each response of a stream has the whole text so far; false: only the new text", _BLS
    )
    add_special_tokens: SpecialTokens = parameter(
        SpecialTokens.ADDED,
        SPECIAL_TOKENS,
        "add the tokenizer's special tokens around a prompt; auto: add them unless the prompt begins with "
        "them",
        _MODELS | _PREPROCESSING,
    )
    skip_special_tokens: bool = parameter(
        True, BOOLEAN, "leave special tokens out of the output text", _MODELS | {Role.POSTPROCESSING}
    )
    guided_decoding_backend: str = parameter(
        "llguidance",
        choice("llguidance", "xgrammar", any_case=True),
        "library for guided decoding; to use xgrammar, install it by .venv/bin/pip install -e "
        "'.[guided-xgrammar]'",
    )
    guided_decoding_compile_timeout_ms: int = parameter(
        5000,
        integer(1),
        "maximum time to compile a guide (a schema, grammar or regular expression), in milliseconds; guides "
        "that take longer are refused",
    )
    guided_decoding_max_guide_bytes: int = parameter(65536, integer(1), "maximum size of a guide in bytes")
    lora_cache_host_memory_bytes: int | None = parameter(
        None,
        integer(1),
        "size in bytes of the host memory for LoRA adapters; weights in requests may take as much memory in "
        "addition until they are stored there; default: 1 GiB, or the size of one adapter of the highest rank "
        "if that is more",
    )
    lora_prefetch_dir: str | None = parameter(
        None,
        TEXT,
        "folder with a subfolder for each adapter; the subfolder has two .npy files, and its name is the "
        "adapter's task id; adapters are read at the start, and later when a request names one that is not in "
        "the cache",
    )
    lora_dir: str | None = parameter(
        None,
        TEXT,
        "folder of PEFT folders that requests may name; a PEFT folder is read when a request first names it, "
        "and may be added at any time",
    )
    lora_adapters: tuple[tuple[str, str], ...] = parameter(
        (), NAMED_FOLDERS, "PEFT folders of adapters, with the names that requests use for the adapters"
    )
    enable_adapter_commands: bool = parameter(False, BOOLEAN, "let clients list, load and unload adapters")
    enable_sleep_mode: bool = parameter(
        False,
        BOOLEAN,
        "let clients put the engine to sleep and wake it up; a sleeping engine has no weights in memory; it "
        "also has no KV cache, unless the client asked to keep it",
    )
    lora_weights_data_type: str = parameter(
        "TYPE_FP16",
        DATA_TYPES,
        "data type of the input lora_weights; Triton accepts no other type",
        _MODELS,
    )
    scheduler: SchedulingConfig = field(default_factory=SchedulingConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)

    def validate_end_ids(self, vocab_size: int) -> None:
        """Raise ConfigError if default_end_ids has a token id that the vocabulary lacks."""
        for end_id in self.default_end_ids:
            if end_id >= vocab_size:
                raise ConfigError(
                    f"default_end_ids has {end_id}, expected token ids in [0, {vocab_size - 1}], the vocabulary"
                )

    def validate_saved_blocks(self, has_host_tier: bool = False) -> None:
        """Raise ConfigError if these parameters contradict each other in how KV blocks are saved.

        Args:
            has_host_tier: Whether blocks are saved in host memory; on a CPU it is a part of the cache instead.
        """
        if self.kv_cache_dir is None:
            for name in ("kv_cache_disk_bytes", "kv_cache_max_age_s"):
                if getattr(self, name) != declared_rows(Parameters)[name].default:
                    raise ConfigError(f"{name} is given, but kv_cache_dir is not, so no files are written")
            if not has_host_tier:
                return
        name = "kv_cache_host_memory_bytes" if self.kv_cache_dir is None else "kv_cache_dir"
        if not self.scheduler.enable_kv_cache_reuse:
            raise ConfigError(
                f"{name} is given, but enable_kv_cache_reuse is false, so no request would find a saved KV block"
            )


# ---------------------------------------------------------------------- all rows


def _built() -> list[ParameterSpec]:
    """Return the rows of all fields, in the order of config.pbtxt."""
    rows: list[ParameterSpec] = []
    for owner in (Parameters, SchedulingConfig, EngineConfig):
        place = 0
        for spec in declared_rows(owner).values():
            if spec.behind:
                place = 1 + [row.key for row in rows].index(spec.behind)
            rows.insert(place, spec)
            place += 1
    return rows


_TRITONS_OWN = ParameterSpec(
    "FORCE_CPU_ONLY_INPUT_TENSORS",
    choice("yes", "no"),
    None,
    "read by Triton's Python backend",
    _ALL,
    template_value="yes",
    read_by_triton=True,
)

PARAMETERS: tuple[ParameterSpec, ...] = (*_built(), _TRITONS_OWN, *NO_EFFECT, *UNBUILT)

DEFAULT_NUM_SEQUENCES = 64
"""Number of slots if max_batch_size is 0."""

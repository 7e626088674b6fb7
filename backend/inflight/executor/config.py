"""Configuration of an executor: `ExecutorConfig` and its parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import Any, ClassVar

from inflight.executor.enums import (
    BatchingType,
    CacheTransceiverBackendType,
    CapacitySchedulerPolicy,
    CommunicationMode,
    CommunicationType,
    ContextChunkingPolicy,
    DecodingMode,
    Numbered,
)
from inflight.executor.errors import InvalidValue
from inflight.executor.request import EagleConfig, LookaheadDecodingConfig
from inflight.executor.sampling import AdditionalModelOutput
from inflight.executor.typed import FRACTION, NOT_NEGATIVE, POSITIVE, SHARE, Frozen, Range, Typed, within

_WINDOWS = Range("numbers >= 1", lambda windows: all(window >= 1 for window in windows))
_NOT_EMPTY = Range("at least one", lambda values: len(values) > 0)


@dataclass(frozen=True)
class DynamicBatchConfig(Frozen):
    """Whether to adapt the batch size and the tokens of an iteration while the server runs."""

    enable_batch_size_tuning: bool
    enable_max_num_tokens_tuning: bool
    dynamic_batch_moving_average_window: int = 128


@dataclass(frozen=True)
class SchedulerConfig(Frozen):
    """How the scheduler chooses the requests of an iteration.

    Attributes:
        capacity_scheduler_policy: Choice of the sequences that may hold KV blocks.
        context_chunking_policy: Choice of the contexts that get the remaining tokens of an iteration.
        dynamic_batch_config: Tuning at run time.
    """

    capacity_scheduler_policy: CapacitySchedulerPolicy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
    context_chunking_policy: ContextChunkingPolicy | None = None
    dynamic_batch_config: DynamicBatchConfig | None = None


@dataclass(frozen=True)
class RuntimeDefaults(Frozen):
    """A model's own KV cache settings, used for fields that a KvCacheConfig leaves unset."""

    max_attention_window: list[int] | None = None
    sink_token_length: int | None = None


@dataclass
class KvCacheConfig(Typed):
    """Configuration of the KV cache.

    Attributes:
        enable_block_reuse: Whether to share blocks of equal prefixes.
        max_tokens: Size in tokens; None: as many as fit into memory.
        max_attention_window: Attention window of each layer, in tokens; repeated if there are more layers.
        sink_token_length: Number of first tokens that stay in every window.
        free_gpu_memory_fraction: Fraction of free memory for the cache (0.9).
        host_cache_size: Bytes of host memory for saved blocks; on a CPU they are added to the cache.
        onboard_blocks: Whether to copy saved blocks back into the cache.
        cross_kv_cache_fraction: Fraction of the cache for cross attention.
        secondary_offload_min_priority: Blocks of lower priority are not saved; None: 30.
        event_buffer_max_size: Largest number of events to keep; 0: none.
        enable_partial_reuse: Whether to reuse a block if only its beginning matches.
        copy_on_partial_reuse: Whether to copy a block of which only the beginning matches.
        use_uvm: Whether to use memory shared by host and device.
        attention_dp_events_gather_period_ms: Interval in milliseconds at which events of several ranks are
            collected.
        max_gpu_total_bytes: Largest size in bytes; 0: no limit.
    """

    enable_block_reuse: bool = True
    max_tokens: int | None = within(None, POSITIVE)
    max_attention_window: list[int] | None = within(None, _WINDOWS)
    sink_token_length: int | None = within(None, POSITIVE)
    free_gpu_memory_fraction: float | None = within(None, FRACTION)
    host_cache_size: int | None = within(None, NOT_NEGATIVE)
    onboard_blocks: bool = True
    cross_kv_cache_fraction: float | None = within(None, FRACTION)
    secondary_offload_min_priority: int | None = None
    event_buffer_max_size: int = within(0, NOT_NEGATIVE)
    _: KW_ONLY
    enable_partial_reuse: bool = True
    copy_on_partial_reuse: bool = True
    use_uvm: bool = False
    attention_dp_events_gather_period_ms: int = within(5, POSITIVE)
    runtime_defaults: InitVar[RuntimeDefaults | None] = None
    max_gpu_total_bytes: int = within(0, NOT_NEGATIVE)

    def __post_init__(self, runtime_defaults: RuntimeDefaults | None) -> None:
        if runtime_defaults is not None:
            self.fill_empty_fields_from_runtime_defaults(runtime_defaults)

    def fill_empty_fields_from_runtime_defaults(self, runtime_defaults: RuntimeDefaults) -> None:
        """Set attention windows and sink tokens to the model's, if they are unset."""
        if self.max_attention_window is None:
            self.max_attention_window = runtime_defaults.max_attention_window
        if self.sink_token_length is None:
            self.sink_token_length = runtime_defaults.sink_token_length


@dataclass
class OrchestratorConfig(Typed):
    """How ranks are started in orchestrator mode.

    Attributes:
        is_orchestrator: Whether this process takes requests.
        worker_executable_path: TensorRT-LLM's program of a rank; ranks here run this package.
        orch_leader_comm: An MPI communicator.
        spawn_processes: Whether this process starts the ranks.
    """

    is_orchestrator: bool = True
    worker_executable_path: str = ""
    orch_leader_comm: Any = None
    spawn_processes: bool = True


@dataclass
class ParallelConfig(Typed):
    """How ranks are started, and their devices.

    Attributes:
        communication_type: How ranks communicate.
        communication_mode: The way in which the ranks are started.
        device_ids: GPUs, one for each rank of a host.
        participant_ids: MPI ranks that take part.
        orchestrator_config: Settings of orchestrator mode.
        num_nodes: Number of hosts.
    """

    communication_type: CommunicationType = CommunicationType.MPI
    communication_mode: CommunicationMode = CommunicationMode.LEADER
    device_ids: list[int] | None = within(None, _NOT_EMPTY)
    participant_ids: list[int] | None = None
    orchestrator_config: OrchestratorConfig | None = None
    num_nodes: int | None = within(None, POSITIVE)


@dataclass(frozen=True)
class PeftCacheConfig(Frozen):
    """Configuration of the cache of adapters.

    Attributes:
        optimal_adapter_size: Low-rank dimensions in a page of device memory.
        max_adapter_size: Largest low-rank dimension of an adapter.
        device_cache_percent: Fraction of free device memory for the cache (0.05).
        host_cache_size: Host memory for the cache in bytes (1 GiB).
        lora_prefetch_dir: Folder of adapters to load at the start.
    """

    num_host_module_layer: int = 0
    num_device_module_layer: int = 0
    optimal_adapter_size: int = within(8, POSITIVE)
    max_adapter_size: int = within(64, POSITIVE)
    num_put_workers: int = 1
    num_ensure_workers: int = 1
    num_copy_streams: int = 1
    max_pages_per_block_host: int = 24
    max_pages_per_block_device: int = 8
    device_cache_percent: float | None = within(None, SHARE)
    host_cache_size: int | None = within(None, POSITIVE)
    lora_prefetch_dir: str | None = None


@dataclass
class DecodingConfig(Typed):
    """Sampling defaults for requests. Assigning one of the last three fields sets the mode too."""

    decoding_mode: DecodingMode | None = None
    lookahead_decoding_config: LookaheadDecodingConfig | None = None
    medusa_choices: list[list[int]] | None = None
    eagle_config: EagleConfig | None = None

    def __post_init__(self) -> None:
        mode = self.decoding_mode
        if self.lookahead_decoding_config is not None:
            if mode is None:
                raise InvalidValue("LookaheadDecodingConfig is set, but DecodingMode is not set")
            if not mode.isLookahead():
                raise InvalidValue("LookaheadDecodingConfig is set, but DecodingMode is not set to Lookahead")
        if self.medusa_choices is not None and (mode is None or not mode.isMedusa()):
            raise InvalidValue("MedusaChoices are set, but DecodingMode is not set to Medusa")
        if self.eagle_config is not None and (mode is None or not mode.isEagle()):
            raise InvalidValue("EagleConfig is set, but DecodingMode is not set to Eagle")

    def __setattr__(self, name: str, value: Any) -> None:
        is_made = "eagle_config" in vars(self)  # true after the constructor, which assigns this field last
        if is_made and name == "decoding_mode" and value in _SET_BY_CONFIGURATION:
            raise InvalidValue(
                f"Decoding mode {value.name} is set by assigning its configuration, or by the constructor"
            )
        super().__setattr__(name, value)
        if is_made and name in _MODE_OF and value is not None:
            super().__setattr__("decoding_mode", _MODE_OF[name])


_MODE_OF = {
    "lookahead_decoding_config": DecodingMode.Lookahead(),
    "medusa_choices": DecodingMode.Medusa(),
    "eagle_config": DecodingMode.Eagle(),
}
_SET_BY_CONFIGURATION = (*_MODE_OF.values(), DecodingMode.ExplicitDraftTokens())


@dataclass
class DebugConfig(Typed):
    """Tensors of iterations to keep for debugging.

    Attributes:
        debug_input_tensors: Whether to keep all inputs of the model.
        debug_output_tensors: Whether to keep all outputs of the model.
        debug_tensor_names: Names of further tensors to keep.
        debug_tensors_max_iterations: Number of iterations to keep for fetching; 0: write them to files.
    """

    debug_input_tensors: bool = False
    debug_output_tensors: bool = False
    debug_tensor_names: list[str] | None = None
    debug_tensors_max_iterations: int = within(0, NOT_NEGATIVE)

    def __post_init__(self) -> None:
        self.debug_tensor_names = self.debug_tensor_names or []


@dataclass(eq=False)
class LogitsPostProcessorConfig(Typed):
    """Callables that may change logits before sampling.

    Attributes:
        processor_map: Callables by name. Each is called with (request id, logits, tokens so far, stream,
            client id) of one request.
        processor_batched: Callable that is called with lists of these arguments, for all requests that name
            it.
        replicate: Whether every rank of the first tensor-parallel group calls the callables, or only rank 0.
    """

    processor_map: dict[str, Callable[..., Any] | None] | None = None
    processor_batched: Callable[..., Any] | None = None
    replicate: bool = True


@dataclass
class ExtendedRuntimePerfKnobConfig(Typed):
    """Switches of TensorRT's kernels and of CUDA graphs."""

    multi_block_mode: bool = True
    enable_context_fmha_fp32_acc: bool = False
    cuda_graph_mode: bool = field(default=False, init=False)
    cuda_graph_cache_size: int = field(default=0, init=False)


@dataclass
class SpeculativeDecodingConfig(Typed):
    """Draft tokens from another engine. With `fast_logits`, that engine sends the drafts' logits over MPI."""

    fast_logits: bool = False


@dataclass
class GuidedDecodingConfig(Typed):
    """Library and tokenizer that compile guides to masks over the vocabulary.

    Attributes:
        backend: The library that compiles guides.
        encoded_vocab: Texts of the tokens by id; None: the checkpoint's.
        tokenizer_str: JSON of a Hugging Face tokenizer; None: the checkpoint's.
        stop_token_ids: Tokens that end a guided output; None: the checkpoint's.
    """

    class GuidedDecodingBackend(Numbered):
        """The library that turns a JSON schema, regex or grammar into the tokens it allows."""

        XGRAMMAR = 0
        LLGUIDANCE = 1

    backend: GuidedDecodingBackend
    encoded_vocab: list[str] | None = None
    tokenizer_str: str | None = None
    stop_token_ids: list[int] | None = None


@dataclass
class CacheTransceiverConfig(Typed):
    """Transfer of KV blocks to another server."""

    backend: CacheTransceiverBackendType | None = None
    max_tokens_in_buffer: int | None = None
    kv_transfer_timeout_ms: int | None = None


@dataclass(eq=False)
class ExecutorConfig(Typed):
    """All settings of an executor. docs/executor-fields.md describes each field's effect here.

    Attributes:
        max_beam_width: Largest number of beams of a beam search.
        scheduler_config: Policies of the scheduler.
        kv_cache_config: Configuration of the KV cache.
        enable_chunked_context: Whether to split long prompts over iterations.
        normalize_log_probs: Whether log probs are those of the distribution that a token was sampled from.
        iter_stats_max_iterations: Number of iterations whose statistics are kept for fetching.
        request_stats_max_iterations: Number of iterations whose statistics of requests are kept for fetching.
        batching_type: STATIC ends a batch before it starts the next.
        max_batch_size: Largest number of sequences that run at a time.
        max_num_tokens: Largest number of tokens in one iteration.
        parallel_config: Configuration of several ranks.
        peft_cache_config: Configuration of the cache of adapters.
        logits_post_processor_config: Callables that may change logits.
        decoding_config: Sampling defaults for requests.
        use_gpu_direct_storage: Whether to read weights directly to the device.
        gpu_weights_percent: Fraction of the weights that stays on the device.
        max_queue_size: Largest number of waiting sequences; None or 0: no limit.
        extended_runtime_perf_knob_config: Switches of kernels.
        debug_config: Tensors to keep for debugging.
        recv_poll_period_ms: Interval in milliseconds at which a leader looks for requests.
        max_seq_idle_microseconds: How long a slot may be idle, in microseconds.
        spec_dec_config: Draft tokens from another engine.
        guided_decoding_config: Compilation of guides.
        additional_model_outputs: Tensors of the model that requests may select as outputs.
        cache_transceiver_config: Configuration of disaggregated serving.
        gather_generation_logits: Whether requests may have generation logits as outputs.
        mm_embedding_offloading: Whether to keep image embeddings on the host.
        enable_trt_overlap: Whether to overlap iterations.
        fail_fast_on_attention_window_too_large: Whether to refuse a window that is larger than the KV cache.
    """

    accepts_unknown: ClassVar[bool] = True

    max_beam_width: int = within(1, POSITIVE)
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    kv_cache_config: KvCacheConfig = field(default_factory=KvCacheConfig)
    enable_chunked_context: bool = False
    normalize_log_probs: bool = True
    iter_stats_max_iterations: int = within(1000, NOT_NEGATIVE)
    request_stats_max_iterations: int = within(0, NOT_NEGATIVE)
    batching_type: BatchingType = BatchingType.INFLIGHT
    max_batch_size: int | None = within(None, POSITIVE)
    max_num_tokens: int | None = within(None, POSITIVE)
    parallel_config: ParallelConfig | None = None
    peft_cache_config: PeftCacheConfig = field(default_factory=PeftCacheConfig)
    logits_post_processor_config: LogitsPostProcessorConfig | None = None
    decoding_config: DecodingConfig | None = None
    use_gpu_direct_storage: bool = False
    gpu_weights_percent: float = 1.0
    max_queue_size: int | None = None
    extended_runtime_perf_knob_config: ExtendedRuntimePerfKnobConfig = field(
        default_factory=ExtendedRuntimePerfKnobConfig
    )
    debug_config: DebugConfig | None = None
    recv_poll_period_ms: int = within(0, NOT_NEGATIVE)
    max_seq_idle_microseconds: int = within(180_000_000, POSITIVE)
    spec_dec_config: SpeculativeDecodingConfig | None = None
    guided_decoding_config: GuidedDecodingConfig | None = None
    additional_model_outputs: list[AdditionalModelOutput] | None = None
    cache_transceiver_config: CacheTransceiverConfig | None = None
    gather_generation_logits: bool = False
    mm_embedding_offloading: bool = False
    enable_trt_overlap: bool = False
    fail_fast_on_attention_window_too_large: bool = False

    @property
    def logits_post_processor_map(self) -> dict[str, Callable[..., Any] | None] | None:
        """The value of `logits_post_processor_config.processor_map`, by its name in version 0.12."""
        config = self.logits_post_processor_config
        return None if config is None else config.processor_map

    @logits_post_processor_map.setter
    def logits_post_processor_map(self, processors: dict[str, Callable[..., Any] | None] | None) -> None:
        self._post_processors().processor_map = processors

    @property
    def logits_post_processor_batched(self) -> Callable[..., Any] | None:
        """The value of `logits_post_processor_config.processor_batched`, by its name in version 0.12."""
        config = self.logits_post_processor_config
        return None if config is None else config.processor_batched

    @logits_post_processor_batched.setter
    def logits_post_processor_batched(self, processor: Callable[..., Any] | None) -> None:
        self._post_processors().processor_batched = processor

    def _post_processors(self) -> LogitsPostProcessorConfig:
        if self.logits_post_processor_config is None:
            self.logits_post_processor_config = LogitsPostProcessorConfig()
        assert self.logits_post_processor_config is not None
        return self.logits_post_processor_config

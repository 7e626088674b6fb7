"""How each field of the Executor API is treated: it works, is ignored, or is refused.

`FieldChecker` raises an error for refused fields and logs ignored ones; docs/executor-fields.md is generated
from the same table (`fields_page.py`). Neutral values, which are the default and the values in `neutral`,
are neither refused nor logged.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields
from enum import Enum
from typing import Any, cast

from inflight.core.request.sampling_config import CONTROLS
from inflight.executor.config import (
    CacheTransceiverConfig,
    DebugConfig,
    DecodingConfig,
    ExecutorConfig,
    ExtendedRuntimePerfKnobConfig,
    GuidedDecodingConfig,
    KvCacheConfig,
    LogitsPostProcessorConfig,
    OrchestratorConfig,
    ParallelConfig,
    PeftCacheConfig,
    SchedulerConfig,
    SpeculativeDecodingConfig,
)
from inflight.executor.enums import DecodingMode, KvCacheTransferMode, ModelType, RequestType
from inflight.executor.errors import NotSupported
from inflight.executor.request import (
    EagleConfig,
    ExternalDraftTokensConfig,
    KvCacheRetentionConfig,
    LoraConfig,
    PromptTuningConfig,
    Request,
)
from inflight.executor.sampling import AdditionalModelOutput, OutputConfig, SamplingConfig
from inflight.executor.typed import Frozen, Typed

_log = logging.getLogger(__name__)


class Treatment(Enum):
    """How a field of TensorRT-LLM's classes is treated."""

    WORKS = "works"
    IGNORED = "ignored"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class FieldNote:
    """A field's treatment, and the reason for it.

    Attributes:
        owner: Class that has the field.
        name: Name of the field.
        treatment: The field's treatment.
        text: The field's effect, or the reason why it has none, for errors and the log.
        neutral: Values without effect, besides the default and None.
    """

    owner: type
    name: str
    treatment: Treatment
    text: str
    neutral: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class _Note:
    """A FieldNote without owner and name."""

    treatment: Treatment
    text: str
    neutral: tuple[Any, ...] = ()


def _works(text: str) -> _Note:
    return _Note(Treatment.WORKS, text)


def _ignored(text: str, *neutral: Any) -> _Note:
    return _Note(Treatment.IGNORED, text, neutral)


def _refused(text: str, *neutral: Any) -> _Note:
    return _Note(Treatment.REFUSED, text, neutral)


def _of(owner: type, **notes: _Note) -> list[FieldNote]:
    """Return the notes about one class; keywords are names of its fields."""
    return [FieldNote(owner, name, note.treatment, note.text, note.neutral) for name, note in notes.items()]


_NO_ENCODER = "no model here has an encoder"
_NO_IMAGES = "the Executor takes no pictures; pass their embeddings in prompt_tuning_config"

_ONE_SERVER = "one engine computes both context and generation, so there is no disaggregated serving"
_NO_LOOKAHEAD = (
    "lookahead decoding is not implemented; send drafts with a request (external_draft_tokens_config), or let the "
    "engine draft from earlier tokens (speculative_decoding_mode of the argument `parameters`)"
)
_NO_MEDUSA = (
    "Medusa heads are not supported; send drafts with a request (external_draft_tokens_config), or use the "
    "checkpoint's own head (eagle_config)"
)
_NO_THRESHOLDS = (
    "a draft token is accepted only if the model chooses the same token, so drafts change no output"
)
_NO_TREES = "each draft is one chain of tokens, not a tree"
_NO_TUNER = "the batch size and the number of tokens of an iteration are not tuned while the engine runs"
_TENSORRT = "it concerns only kernels of TensorRT"
_ALWAYS_COPIED = "if only the beginning of a block matches, a copy of the block is always reused"

_SAMPLES = tuple(
    make()
    for make in (
        DecodingMode.Auto,
        DecodingMode.TopK,
        DecodingMode.TopP,
        DecodingMode.TopKTopP,
        DecodingMode.BeamSearch,
    )
)


# ---------------------------------------------------------------------- requests

_REQUEST = _of(
    Request,
    input_token_ids=_works("the prompt"),
    max_tokens=_works(
        "maximum number of tokens to generate; prompt and generated tokens together may not "
        "exceed the model's maximum length"
    ),
    streaming=_works("if set, responses are returned while tokens are being generated"),
    sampling_config=_works("copied into the request; later changes to the original have no effect"),
    output_config=_works("copied into the request; later changes to the original have no effect"),
    end_id=_works("token that ends an output and is left out of it; None or -1: no token ends the output"),
    pad_id=_ignored("beams are returned as lists of different lengths, without padding"),
    position_ids=_refused("positions always count from 0"),
    bad_words=_works("token sequences that are never generated, not even if they begin in the prompt"),
    stop_words=_works(
        "an output ends after its first stop word; a stop word that begins in the prompt has no effect"
    ),
    embedding_bias=_works("one number for each token of the vocabulary, added to its logit"),
    external_draft_tokens_config=_works("draft tokens, which are all verified in one forward pass"),
    prompt_tuning_config=_works(
        "embeddings for prompt tokens whose ids are vocab_size or higher; see PromptTuningConfig"
    ),
    multimodal_input=_refused(_NO_IMAGES),
    multimodal_embedding=_refused(_NO_IMAGES),
    mrope_config=_works("rotary positions of the prompt, for models with multimodal rotary embedding"),
    lora_config=_works(
        "the first request with an adapter needs the adapter's weights; later requests need only the task_id"
    ),
    lookahead_config=_refused(_NO_LOOKAHEAD),
    kv_cache_retention_config=_works(
        "priorities of KV blocks: blocks of the lowest priority are evicted first; among blocks of equal "
        "priority, the least recently used block is evicted first"
    ),
    logits_post_processor_name=_works("a name in LogitsPostProcessorConfig.processor_map, or `batched`"),
    logits_post_processor=_works("a callable for this request only; refused with several ranks"),
    encoder_input_token_ids=_refused(_NO_ENCODER),
    client_id=_works(
        "returned in every response; if waiting requests of several clients have equal priority, the clients "
        "take turns"
    ),
    return_all_generated_tokens=_works(
        "if set, each streamed response has all tokens so far; responses of beam searches always have all "
        "tokens, because earlier tokens may change"
    ),
    priority=_works("waiting requests of higher priority start first"),
    request_type=_refused(_ONE_SERVER, RequestType.REQUEST_TYPE_CONTEXT_AND_GENERATION),
    context_phase_params=_refused(_ONE_SERVER),
    encoder_input_features=_refused(_NO_ENCODER),
    encoder_output_length=_refused(_NO_ENCODER),
    cross_attention_mask=_refused(_NO_ENCODER),
    num_return_sequences=_works("number of sequences, unless SamplingConfig.num_return_sequences is set"),
    eagle_config=_refused("set DecodingConfig.eagle_config, which applies to all requests"),
    skip_cross_attn_blocks=_refused(_NO_ENCODER),
    guided_decoding_params=_works(
        "a guide; refused for beam searches; without GuidedDecodingConfig, guides use the checkpoint's "
        "tokenizer"
    ),
    language_adapter_uid=_refused("a request has one adapter, set by lora_config"),
    allotted_time_ms=_works(
        "time limit, counted from the request's arrival; rounded down to milliseconds, but at least 1 ms"
    ),
    cache_salt_id=_works("requests with different salts share no KV blocks; 0 and None are the same salt"),
)

_CONTROLS = {
    control.executor.name: _works(control.executor.note) for control in CONTROLS.values() if control.executor
}

_PARTS_OF_REQUESTS = [
    *_of(
        SamplingConfig,
        **_CONTROLS,
        prompt_ignore_length=_refused("penalties apply to the whole prompt", 0),
        beam_width_array=_refused("a beam search has the same number of beams at every step"),
    ),
    *_of(
        OutputConfig,
        return_log_probs=_works(
            "returns log probabilities: the model's own, unless ExecutorConfig.normalize_log_probs is set"
        ),
        return_context_logits=_works(
            "returns the logits of the prompt's tokens; no part of the prompt is then taken from the KV cache"
        ),
        return_generation_logits=_works(
            "returns the model's logits, before sampling controls are applied; refused for streamed beam "
            "searches"
        ),
        exclude_input_from_output=_works(
            "if set, outputs do not contain the prompt; has an effect only on requests without streaming"
        ),
        return_encoder_output=_refused(_NO_ENCODER),
        return_perf_metrics=_works("returns RequestPerfMetrics; its times are those of a monotonic clock"),
        additional_model_outputs=_works(
            "tensors to return; ExecutorConfig.additional_model_outputs must name them, too"
        ),
        return_receipt=_works(
            "returns a record of the request, answer, model and settings; TensorRT-LLM does not have this "
            "field"
        ),
    ),
    *_of(
        AdditionalModelOutput,
        name=_works("name of a tensor of the model"),
        gather_context=_works(
            "if set, the tensor's rows for the prompt are returned, too; no part of the prompt is then taken "
            "from the KV cache"
        ),
    ),
    *_of(
        ExternalDraftTokensConfig,
        tokens=_works("the draft tokens, which must be fewer than max_tokens"),
        logits=_works(
            "draft logits of shape [tokens, vocab_size]; if given, draft tokens are accepted by "
            "rejection sampling"
        ),
        acceptance_threshold=_works(
            "has an effect only with logits: a draft token is accepted if its probability in the model is at "
            "least this number times its probability in the draft logits"
        ),
        fast_logits=_refused("draft logits are sent with the request, not by a draft engine", False),
    ),
    *_of(
        LoraConfig,
        task_id=_works(
            "the adapter's id; weights that are sent with the id of a stored adapter are ignored, so a new "
            "version of an adapter needs a new id"
        ),
        weights=_works("float32, float16 or bfloat16, whatever the model's dtype is"),
        config=_works(
            "in each row: module id, layer, rank, and optionally 1 for DoRA; a module that the model does not "
            "have is an error"
        ),
    ),
    *_of(
        PromptTuningConfig,
        embedding_table=_works(
            "float32, float16 or bfloat16; requests share KV blocks only if their tables are equal"
        ),
        input_token_extra_ids=_works(
            "requests share KV blocks only if these ids are equal, in addition to the tables; different tables "
            "may have the same ids, because requests with different tables never share KV blocks"
        ),
    ),
    *_of(
        KvCacheRetentionConfig,
        token_range_retention_configs=_works(
            "ranges of the prompt's tokens, with a priority for the blocks of each range"
        ),
        decode_retention_priority=_works("priority of the blocks of generated tokens"),
        decode_duration_ms=_works(
            "how long a block keeps decode_retention_priority after the last sequence has stopped using the block"
        ),
        transfer_mode=_refused(
            "requests cannot choose which blocks are saved in files", KvCacheTransferMode.DRAM
        ),
        directory=_refused("requests cannot choose the folder of saved blocks", ""),
    ),
]


# ---------------------------------------------------------------------- configuration

_CONFIGURATION = _of(
    ExecutorConfig,
    max_beam_width=_works(
        "maximum beam width of a request; requests that run at the same time may have different beam widths"
    ),
    scheduler_config=_works("see SchedulerConfig"),
    kv_cache_config=_works("see KvCacheConfig"),
    enable_chunked_context=_works("if it is not set, a prompt may have at most max_num_tokens tokens"),
    normalize_log_probs=_works(
        "if set, log probabilities are computed after the sampling controls are applied; cumulative log "
        "probabilities are always the model's own"
    ),
    iter_stats_max_iterations=_works("number of iterations whose statistics are kept; 0 keeps none"),
    request_stats_max_iterations=_works(
        "number of iterations whose statistics about each request are kept; 0 keeps none"
    ),
    batching_type=_works("STATIC: a batch starts only when all requests of the previous batch have finished"),
    max_batch_size=_works(
        "maximum number of sequences that run at once, where each beam counts as a sequence; by default 64, "
        "or fewer if max_num_tokens, kv_cache_config.max_tokens or the TensorRT plans have room for fewer"
    ),
    max_num_tokens=_works("maximum number of tokens in an iteration; 8192 by default"),
    parallel_config=_works("see ParallelConfig"),
    peft_cache_config=_works("see PeftCacheConfig"),
    logits_post_processor_config=_works("see LogitsPostProcessorConfig"),
    decoding_config=_works("see DecodingConfig"),
    use_gpu_direct_storage=_ignored("weights are read into host memory first"),
    gpu_weights_percent=_refused("all weights are kept on the device", 1.0),
    max_queue_size=_works(
        "maximum number of waiting sequences; enqueue_request refuses requests that would exceed it; None "
        "and 0: no limit"
    ),
    extended_runtime_perf_knob_config=_works("see ExtendedRuntimePerfKnobConfig"),
    debug_config=_works("see DebugConfig"),
    recv_poll_period_ms=_ignored("the engine does not poll, because requests wake it"),
    max_seq_idle_microseconds=_ignored("a slot is free as soon as its sequence has finished"),
    spec_dec_config=_works("see SpeculativeDecodingConfig"),
    guided_decoding_config=_works("see GuidedDecodingConfig"),
    additional_model_outputs=_works("names of the tensors that requests may ask for"),
    cache_transceiver_config=_works("see CacheTransceiverConfig"),
    gather_generation_logits=_ignored("requests may ask for generation logits even if this field is not set"),
    mm_embedding_offloading=_ignored(_NO_IMAGES),
    enable_trt_overlap=_ignored("iterations overlap where the overlap does not change the results"),
    fail_fast_on_attention_window_too_large=_ignored(
        "an attention window needs no memory of its own in the KV cache, so no window is too large"
    ),
)

_PARTS_OF_CONFIGURATION = [
    *_of(
        SchedulerConfig,
        capacity_scheduler_policy=_works("STATIC_BATCH has the same effect as batching_type STATIC"),
        context_chunking_policy=_works(
            "FIRST_COME_FIRST_SERVED by default; has an effect only with enable_chunked_context"
        ),
        dynamic_batch_config=_ignored(_NO_TUNER),
    ),
    *_of(
        KvCacheConfig,
        enable_block_reuse=_works("a block is reused if its tokens and all tokens before them are the same"),
        max_tokens=_works(
            "size of the KV cache in tokens, rounded down to whole blocks; must allow one block for "
            "each sequence"
        ),
        max_attention_window=_works("limits the tokens that attention sees, but saves no memory"),
        sink_token_length=_works(
            "number of first tokens that stay in every attention window; they count as part of the window"
        ),
        free_gpu_memory_fraction=_works(
            "share of the device's free memory for the KV cache; by default 0.9 on a GPU, 0.5 on a CPU"
        ),
        host_cache_size=_works(
            "bytes of host memory for saved blocks; on a CPU, this memory is added to the KV cache"
        ),
        onboard_blocks=_works("if False, saved blocks are never loaded again"),
        cross_kv_cache_fraction=_refused(_NO_ENCODER),
        secondary_offload_min_priority=_works("lowest priority of the blocks that are saved; 30 by default"),
        event_buffer_max_size=_works(
            "maximum number of KV cache events that are kept; if it is 0, there is no event manager"
        ),
        enable_partial_reuse=_ignored(_ALWAYS_COPIED),
        copy_on_partial_reuse=_ignored(_ALWAYS_COPIED),
        use_uvm=_refused("the KV cache is only in the device's own memory"),
        attention_dp_events_gather_period_ms=_ignored(
            "there is only one KV cache, so no events have to be gathered"
        ),
        max_gpu_total_bytes=_refused("set max_tokens or free_gpu_memory_fraction instead"),
    ),
    *_of(
        ParallelConfig,
        communication_type=_works("MPI is the only value"),
        communication_mode=_works(
            "LEADER: the ranks are started by mpirun or srun; ORCHESTRATOR: this process starts them"
        ),
        device_ids=_works("ids of the GPUs that a host's ranks use, one for each rank"),
        participant_ids=_works(
            "ids of all ranks, in order; in orchestrator mode, the list's length is the number of ranks"
        ),
        orchestrator_config=_works("see OrchestratorConfig"),
        num_nodes=_ignored("mpirun determines the hosts", 1),
    ),
    *_of(
        OrchestratorConfig,
        is_orchestrator=_refused("the process that makes the Executor is always the orchestrator"),
        worker_executable_path=_ignored("ranks run this package, not the program at this path"),
        orch_leader_comm=_refused("the orchestrator communicates with its ranks over a socket of its own"),
        spawn_processes=_refused(
            "an orchestrator always starts its ranks; for ranks started by mpirun, use LEADER"
        ),
    ),
    *_of(
        PeftCacheConfig,
        num_host_module_layer=_ignored("host_cache_size sets the cache's size in host memory"),
        num_device_module_layer=_ignored("device_cache_percent sets the cache's size on the device"),
        optimal_adapter_size=_works("highest rank of an adapter that fits into one page of device memory"),
        max_adapter_size=_works("adapters of a higher rank are refused"),
        num_put_workers=_ignored("an adapter is stored as soon as its request arrives"),
        num_ensure_workers=_ignored("the first iteration that needs an adapter copies it to the device"),
        num_copy_streams=_ignored(
            "there are no separate streams for copies; the device does copies and its other work one after the "
            "other"
        ),
        max_pages_per_block_host=_ignored("on the host an adapter is kept in one piece"),
        max_pages_per_block_device=_ignored(
            "there are no blocks of pages; optimal_adapter_size sets the size of a page"
        ),
        device_cache_percent=_works(
            "size of the cache on the device: a share (0 to 1) of the memory that is free after the weights are "
            "loaded; 0.05 by default"
        ),
        host_cache_size=_works("size in bytes of the cache in host memory; 1 GiB by default"),
        lora_prefetch_dir=_works(
            "folder with a subfolder for each adapter; the subfolder's name is the adapter's task id; "
            "adapters are read at the start, and later when a request needs one that is not in the cache"
        ),
    ),
    *_of(
        DecodingConfig,
        decoding_mode=_refused(
            "each request sets its own sampling; with the mode Eagle, an EAGLE-3 or MTP head makes drafts; for "
            "other drafts, set speculative_decoding_mode of the argument `parameters`, or send drafts with a "
            "request (external_draft_tokens_config)",
            *_SAMPLES,
            DecodingMode.Eagle(),
        ),
        lookahead_decoding_config=_refused(_NO_LOOKAHEAD),
        medusa_choices=_refused(_NO_MEDUSA),
        eagle_config=_works(
            "drafts are made by the EAGLE-3 head that the argument `parameters` names, or by the "
            "checkpoint's own head (MTP); see EagleConfig"
        ),
    ),
    *_of(
        EagleConfig,
        eagle_choices=_works(
            "the nodes with only zeros (`[0]`, then `[0, 0]`, then `[0, 0, 0]` and so on) form a chain, whose "
            "length is the maximum length of a draft; other nodes have no effect, and the log says so"
        ),
        greedy_sampling=_refused(_NO_THRESHOLDS, True),
        posterior_threshold=_refused(_NO_THRESHOLDS),
        use_dynamic_tree=_refused(_NO_TREES),
        dynamic_tree_max_topK=_refused(_NO_TREES),
    ),
    *_of(
        LogitsPostProcessorConfig,
        processor_map=_works(
            "functions by name; a function with five parameters gets the client id as the fifth; refused in "
            "orchestrator mode"
        ),
        processor_batched=_works(
            "called once in an iteration, for all requests whose post-processor has the reserved name `batched`; "
            "refused in orchestrator mode"
        ),
        replicate=_works(
            "if set, every rank that has logits calls the post-processors; otherwise, only one of these "
            "ranks calls them"
        ),
    ),
    *_of(
        DebugConfig,
        debug_input_tensors=_works("if set, all inputs of every iteration are debug tensors"),
        debug_output_tensors=_works("if set, the outputs of every iteration are debug tensors"),
        debug_tensor_names=_works("names of debug tensors: input_ids, positions, sequence_length, logits"),
        debug_tensors_max_iterations=_works(
            "0 (the default): debug tensors are written to files; N: get_latest_debug_tensors returns "
            "those of the last N iterations, except in orchestrator mode"
        ),
    ),
    *_of(
        ExtendedRuntimePerfKnobConfig,
        multi_block_mode=_ignored(_TENSORRT),
        enable_context_fmha_fp32_acc=_ignored(_TENSORRT),
        cuda_graph_mode=_ignored(
            "on a GPU, iterations of up to 1,024 tokens run as CUDA graphs, whatever this field is; to turn CUDA "
            "graphs off, set EngineConfig.cuda_graph_mode of the argument `parameters` to False",
            False,
        ),
        cuda_graph_cache_size=_ignored("all recorded CUDA graphs are kept"),
    ),
    *_of(
        SpeculativeDecodingConfig,
        fast_logits=_refused("draft logits are sent with the request, not by a draft engine"),
    ),
    *_of(
        GuidedDecodingConfig,
        backend=_works("LLGUIDANCE is installed with this package; XGRAMMAR has to be installed separately"),
        encoded_vocab=_works("the checkpoint's vocabulary by default; refused in orchestrator mode"),
        tokenizer_str=_works("the checkpoint's tokenizer by default; refused in orchestrator mode"),
        stop_token_ids=_works(
            "ids of the special tokens in encoded_vocab, which a guide never takes for text; despite the "
            "field's name, outputs do not end at these tokens, but at "
            "Request.end_id"
        ),
    ),
    *_of(
        CacheTransceiverConfig,
        backend=_refused(_ONE_SERVER),
        max_tokens_in_buffer=_refused(_ONE_SERVER),
        kv_transfer_timeout_ms=_refused(_ONE_SERVER),
    ),
]

FIELDS: tuple[FieldNote, ...] = (*_REQUEST, *_PARTS_OF_REQUESTS, *_CONFIGURATION, *_PARTS_OF_CONFIGURATION)
"""All fields of requests and configurations."""


# ---------------------------------------------------------------------- the check


class FieldChecker:
    """Refuses and logs fields, according to their treatment.

    Each executor has one, and logs an ignored field once.
    """

    def __init__(self) -> None:
        self._notes = {
            (note.owner, note.name): note for note in FIELDS if note.treatment is not Treatment.WORKS
        }
        self._logged: set[str] = set()

    def check(self, given: Request | ExecutorConfig) -> None:
        """Raise NotSupported for a refused field that is not neutral, and log ignored fields that are not."""
        for owner, each in _all_fields(given):
            note = self._notes.get((type(owner), each.name))
            if note is None or not _asks(getattr(owner, each.name), each, note):
                continue
            place = f"{type(owner).__name__}.{each.name}"
            if note.treatment is Treatment.REFUSED:
                raise NotSupported(f"{place} is not supported: {note.text}")
            self._log_once(place, f"{place} has no effect: {note.text}")
        for name in sorted(vars(given).keys() - {each.name for each in fields(given)}):
            place = f"{type(given).__name__}.{name}"
            self._log_once(place, f"{place} has no effect: there is no such field")

    def _log_once(self, place: str, message: str) -> None:
        if place not in self._logged:
            self._logged.add(place)
            _log.warning("%s", message)


def check_model_type(model_type: ModelType) -> None:
    """Raise NotSupported unless the model type has no encoder."""
    if model_type is not ModelType.DECODER_ONLY:
        raise NotSupported(f"ModelType.{model_type.name} is not supported: {_NO_ENCODER}")


def _all_fields(owner: Any) -> Iterator[tuple[object, Field[Any]]]:
    """Yield every field of an object of the API and of the objects in it."""
    for each in fields(owner):
        yield owner, each
        value = getattr(owner, each.name)
        # A list has objects of the API only if its first item is one. Other lists, such as prompts, may be
        # long.
        parts = cast(list[Any], value) if isinstance(value, list) else [value]
        if parts and isinstance(parts[0], Typed | Frozen):
            for part in parts:
                yield from _all_fields(part)


def _asks(value: Any, each: Field[Any], note: FieldNote) -> bool:
    """Return whether a value is not neutral. A tensor, which cannot be compared, is never neutral."""
    if value is None:
        return False
    default = each.default if each.default_factory is MISSING else each.default_factory()
    return not any(type(value) is type(nothing) and value == nothing for nothing in (default, *note.neutral))

"""Conversion of the Executor API's classes to an engine's request, and to the parameters that load it.

Owns the meaning of each field here. Fields without effect belong to `fields.py`, whose checker refuses or
logs them; call it first. Plain functions, any thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inflight.adapters.lora_tensors import lora_weights
from inflight.additional_outputs import WantedOutput, are_distinct
from inflight.arrays import BFLOAT16, to_prompt_table
from inflight.config import DEBUG_INPUTS, DEBUG_OUTPUTS, CapacityPolicy, ChunkingPolicy, Parameters
from inflight.core.kv.block_keys import PrefixIdentity
from inflight.core.kv.retention import Retention, RetentionConfig, TokenRangeRetention
from inflight.core.request.adapter import ITEM_SIZES, LoraRequest, PromptTable
from inflight.core.request.engine_description import ModelLimits
from inflight.core.request.guide import Guide, GuideKind
from inflight.core.request.request import ExternalDraft, FloatTensor, OutputOptions
from inflight.core.request.request import Request as CoreRequest
from inflight.core.request.sampling_config import CONTROLS
from inflight.core.request.sampling_config import SamplingConfig as CoreSamplingConfig
from inflight.engine_folder import is_engine_folder, num_slots
from inflight.errors import InvalidArgument, Name, Unsupported
from inflight.executor.config import DebugConfig, ExecutorConfig, KvCacheConfig, PeftCacheConfig
from inflight.executor.enums import BatchingType, CapacitySchedulerPolicy, CommunicationMode
from inflight.executor.errors import ExecutorError, InvalidValue, NotSupported, in_fields
from inflight.executor.request import (
    ExternalDraftTokensConfig,
    GuidedDecodingParams,
    KvCacheRetentionConfig,
    LoraConfig,
    PromptTuningConfig,
    Request,
)
from inflight.executor.sampling import AdditionalModelOutput, OutputConfig

DEFAULT_MAX_BATCH_SIZE = 64
"""Number of sequences that run at once if the configuration has room for them and names no other number."""

OWN_POST_PROCESSOR_NAME = "callable of the request"
"""Reserved name under which the engine calls `Request.logits_post_processor`."""

_MS = timedelta(milliseconds=1)


# ---------------------------------------------------------------------- requests


def to_core_request(request: Request, limits: ModelLimits, request_id: int = 0) -> CoreRequest:
    """Convert a request to the engine's.

    A request's own callable gets the name OWN_POST_PROCESSOR_NAME; the caller must register the callable when
    it submits the request. The caller also handles `return_all_generated_tokens`, which affects results only.

    Raises:
        InvalidArgument: The engine cannot serve the request, for the given reason. Clients get it in a
            Response.
        ExecutorError: The request names a logits post-processor that the engine does not have.
    """
    check_post_processor(request, limits.logits_post_processors)
    sampling = to_core_sampling(request)
    if request.streaming and sampling.uses_beams and request.output_config.return_generation_logits:
        raise InvalidArgument(
            "generation logits cannot be streamed with ", Name("beam_width"), " > 1, because beams change"
        )
    table = _prompt_table(request.prompt_tuning_config)
    converted = CoreRequest(
        request_id=request_id,
        input_token_ids=tuple(request.input_token_ids),
        max_new_tokens=request.max_tokens,
        streaming=request.streaming,
        end_ids=_end_ids(request),
        pad_id=None if request.pad_id is None or request.pad_id < 0 else request.pad_id,
        sampling=sampling,
        output=to_core_output(request.output_config),
        stop_words=_words(request.stop_words),
        bad_words=_words(request.bad_words),
        embedding_bias=_embedding_bias(request.embedding_bias, limits.vocab_size),
        draft=_draft(request.external_draft_tokens_config),
        logits_post_processor_name=_logits_post_processor(request),
        identity=_identity(request),
        retention=_retention(request.kv_cache_retention_config),
        priority=request.priority,
        client_id=request.client_id or 0,
        allotted_time_ms=_allotted_time_ms(request.allotted_time_ms),
        guide=_guide(request.guided_decoding_params),
        lora=to_lora_request(request.lora_config),
        prompt_table=table,
    )
    try:
        converted.validate(limits)
    except (InvalidArgument, Unsupported) as error:
        raise in_fields(error) from None
    return converted


def to_core_sampling(request: Request) -> CoreSamplingConfig:
    """Return a request's sampling config, with TensorRT-LLM's defaults for missing values."""
    given = {
        name: value
        for name, control in CONTROLS.items()
        if control.executor and (value := getattr(request.sampling_config, control.executor.name)) is not None
    }
    if request.num_return_sequences > 1:
        given.setdefault("num_return_sequences", request.num_return_sequences)
    given.setdefault("early_stopping", 1)
    # Without an end id, a minimum length has no effect.
    given.setdefault("min_length", 1 if _end_ids(request) else 0)
    return CoreSamplingConfig(**given)


def to_core_output(config: OutputConfig) -> OutputOptions:
    """Convert an OutputConfig of the Executor API to the core's."""
    return OutputOptions(
        exclude_input_from_output=config.exclude_input_from_output,
        return_log_probs=config.return_log_probs,
        return_context_logits=config.return_context_logits,
        return_generation_logits=config.return_generation_logits,
        return_perf_metrics=config.return_perf_metrics,
        additional_outputs=_additional_outputs(config.additional_model_outputs),
    )


def _end_ids(request: Request) -> tuple[int, ...]:
    return () if request.end_id is None or request.end_id == -1 else (request.end_id,)


def _words(words: list[list[int]] | None) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(word) for word in words or ())


def _embedding_bias(bias: Any, vocab_size: int) -> FloatTensor | None:
    if bias is None:
        return None
    tensor = to_float_tensor(bias)
    if tensor.shape != (vocab_size,):
        raise InvalidArgument(
            f"embedding bias shape is not as expected: {[vocab_size]}, the vocabulary; got {list(tensor.shape)}"
        )
    return tensor


def _prompt_table(config: PromptTuningConfig | None) -> PromptTable | None:
    if config is None:
        return None
    array = to_host_array(config.embedding_table)
    if array.dtype not in (BFLOAT16, np.float16, np.float32):
        raise InvalidArgument(
            f"embedding_table must be of float32, float16 or bfloat16, got {config.embedding_table.dtype}"
        )
    return to_prompt_table(array, "embedding_table")


def _identity(request: Request) -> PrefixIdentity:
    extra_ids = request.prompt_tuning_config and request.prompt_tuning_config.input_token_extra_ids
    return PrefixIdentity(
        cache_salt_id=request.cache_salt_id or 0,
        extra_ids=tuple(extra_ids or ()),
    )


def to_float_tensor(tensor: Any) -> FloatTensor:
    """Return a torch or numpy tensor, on any device, as float32."""
    on_host = tensor.detach().cpu().float().numpy() if hasattr(tensor, "detach") else tensor
    array = np.ascontiguousarray(on_host, np.float32)
    return FloatTensor(array.shape, array.tobytes())


def to_host_array(tensor: Any) -> NDArray[Any]:
    """Return a torch or numpy tensor as an array; bfloat16, which numpy lacks, becomes its bits as uint16."""
    if not hasattr(tensor, "detach"):
        return np.asarray(tensor)
    on_host = tensor.detach().cpu()
    if str(on_host.dtype) != "torch.bfloat16":
        return on_host.numpy()
    import torch

    return on_host.contiguous().view(torch.int16).numpy().view(np.uint16)


def to_lora_request(lora: LoraConfig | str | None) -> LoraRequest | None:
    """Return the adapter of a request, from a configuration or the name of one of the parameters' adapters.

    Raises InvalidArgument for weights that are not an adapter's.
    """
    if lora is None or isinstance(lora, str):
        return LoraRequest(name=lora) if lora else None
    if lora.weights is None or lora.config is None:
        return LoraRequest(lora.task_id)
    weights, dtype = to_host_array(lora.weights), str(lora.weights.dtype).removeprefix("torch.")
    if dtype not in ITEM_SIZES:
        raise InvalidArgument(f"lora weights must be one of {', '.join(ITEM_SIZES)}, got {dtype}")
    return LoraRequest(lora.task_id, weights=lora_weights(weights, to_host_array(lora.config), dtype))


def _draft(config: ExternalDraftTokensConfig | None) -> ExternalDraft | None:
    if config is None:
        return None
    logits = None if config.logits is None else to_float_tensor(config.logits)
    return ExternalDraft(tuple(config.tokens), logits, config.acceptance_threshold)


def _retention(config: KvCacheRetentionConfig | None) -> RetentionConfig:
    if config is None:
        return RetentionConfig()
    ranges = tuple(
        TokenRangeRetention(
            each.token_start, each.token_end, Retention(each.priority, _milliseconds(each.duration_ms))
        )
        for each in config.token_range_retention_configs
    )
    decode = Retention(config.decode_retention_priority, _milliseconds(config.decode_duration_ms))
    return RetentionConfig(ranges, decode)


def _milliseconds(duration: timedelta | None) -> int | None:
    return None if duration is None else duration // _MS


def _allotted_time_ms(time: timedelta | None) -> int:
    """Return whole milliseconds, at least 1, since 0 means no deadline; None becomes 0."""
    if time is None:
        return 0
    if time < timedelta(0):
        raise InvalidArgument(Name("allotted_time_ms"), f" must not be negative, got {time}")
    return max(1, time // _MS)


# ---------------------------------------------------------------------- guides, post-processors, tensors


def check_post_processor(request: Request, known: tuple[str, ...]) -> None:
    """Raise ExecutorError unless an engine with post-processors of these names has the request's."""
    name = request.logits_post_processor_name
    if request.logits_post_processor is not None and OWN_POST_PROCESSOR_NAME not in known:
        raise NotSupported(
            "Request.logits_post_processor needs an engine whose whole model is in this process and that has no "
            "logits_post_processor_module: use Request.logits_post_processor_name"
        )
    if not name or (name in known and name != OWN_POST_PROCESSOR_NAME):
        return
    if name == request.BATCHED_POST_PROCESSOR_NAME:
        raise ExecutorError("Batched logits post processor is not defined")
    raise ExecutorError(f"LogitsPostProcessor {name} not found")


def _guide(params: GuidedDecodingParams | None) -> Guide | None:
    return None if params is None else Guide(GuideKind[params.guide_type.name], params.guide or "")


def _logits_post_processor(request: Request) -> str:
    if request.logits_post_processor is not None:
        return OWN_POST_PROCESSOR_NAME
    return request.logits_post_processor_name or ""


def _additional_outputs(outputs: list[AdditionalModelOutput] | None) -> tuple[WantedOutput, ...]:
    return tuple(WantedOutput(each.name, each.gather_context) for each in outputs or ())


def _model_outputs(config: ExecutorConfig) -> dict[str, Any]:
    """Return the fields of EngineConfig for outputs of the model that requests may ask for."""
    if config.additional_model_outputs is None:
        return {}
    outputs = _additional_outputs(config.additional_model_outputs)
    try:
        if not are_distinct(outputs):
            raise InvalidValue("ExecutorConfig.additional_model_outputs has a name twice")
    except ValueError as error:
        raise InvalidValue(f"ExecutorConfig.additional_model_outputs: {error}") from error
    return {"additional_model_outputs": outputs}


def _debug_fields(debug: DebugConfig | None) -> dict[str, Any]:
    """Return the fields of EngineConfig for debug tensors."""
    if debug is None:
        return {}
    known = (*DEBUG_INPUTS, *DEBUG_OUTPUTS)
    names = tuple(debug.debug_tensor_names or ())
    for name in names:
        if name not in known:
            raise InvalidValue(
                f"DebugConfig.debug_tensor_names has {name!r}, expected some of {', '.join(known)}"
            )
    return {
        "debug_input_tensors": debug.debug_input_tensors,
        "debug_output_tensors": debug.debug_output_tensors,
        "debug_tensor_names": names,
        "debug_tensors_max_iterations": debug.debug_tensors_max_iterations,
    }


# ---------------------------------------------------------------------- configuration


_POLICIES = {
    CapacitySchedulerPolicy.MAX_UTILIZATION: CapacityPolicy.MAX_UTILIZATION,
    CapacitySchedulerPolicy.GUARANTEED_NO_EVICT: CapacityPolicy.GUARANTEED_NO_EVICT,
    CapacitySchedulerPolicy.STATIC_BATCH: CapacityPolicy.STATIC_BATCH,
}
_LAUNCH_MODES = {CommunicationMode.LEADER: "leader", CommunicationMode.ORCHESTRATOR: "orchestrator"}


def to_parameters(config: ExecutorConfig, model_path: str, base: Parameters | None = None) -> Parameters:
    """Return the parameters that load an engine and configure its scheduler.

    Args:
        config: The configuration. The executor itself handles `max_queue_size`,
            `parallel_config.orchestrator_config`, and reports for fetching other than statistics.
        model_path: Folder of the checkpoint or of plans.
        base: Values that the configuration does not have, such as data type, block size and number of ranks;
            None: parameters' defaults. `parallel_config` decides which process starts several ranks.

    Raises:
        InvalidValue: It names a tensor that does not exist.
    """
    base = base or Parameters()
    most = num_slots(model_path) if is_engine_folder(model_path) else None
    num_sequences = config.max_batch_size or _default_batch_size(config, base.engine.tokens_per_block, most)
    num_tokens = config.max_num_tokens or max(base.scheduler.max_num_tokens, num_sequences)
    chunking = config.scheduler_config.context_chunking_policy
    is_static = config.batching_type is BatchingType.STATIC
    policy = (
        CapacityPolicy.STATIC_BATCH
        if is_static
        else _POLICIES[config.scheduler_config.capacity_scheduler_policy]
    )
    cache, guides = config.kv_cache_config, config.guided_decoding_config
    scheduler = replace(
        base.scheduler,
        policy=policy,
        enable_chunked_context=config.enable_chunked_context,
        context_chunking_policy=(
            base.scheduler.context_chunking_policy if chunking is None else ChunkingPolicy[chunking.name]
        ),
        enable_kv_cache_reuse=cache.enable_block_reuse,
        max_num_tokens=num_tokens,
        max_beam_width=config.max_beam_width,
    )
    peft = config.peft_cache_config
    engine = replace(
        base.engine,
        gpt_model_path=model_path,
        normalize_log_probs=config.normalize_log_probs,
        max_num_sequences=num_sequences,
        max_num_tokens=num_tokens,
        **_cache_fields(cache),
        **_said(peft, base.engine, _PEFT_FIELDS_OF_ENGINE),
        **_model_outputs(config),
        **_debug_fields(config.debug_config),
    )
    return replace(
        base,
        gpt_model_type="V1" if policy is CapacityPolicy.STATIC_BATCH else base.gpt_model_type,
        iter_stats_max_iterations=config.iter_stats_max_iterations,
        request_stats_max_iterations=config.request_stats_max_iterations,
        scheduler=scheduler,
        engine=engine,
        **_said(peft, base, _PEFT_FIELDS),
        guided_decoding_backend=(
            base.guided_decoding_backend if guides is None else guides.backend.name.lower()
        ),
        **_parallel_fields(config, base),
    )


def _default_batch_size(config: ExecutorConfig, tokens_per_block: int, most: int | None) -> int:
    """Return the default number of running sequences, within the room of an iteration and the KV cache.

    `most`: the number that plans were built for; None without plans.
    """
    bounds = [DEFAULT_MAX_BATCH_SIZE if most is None else most]
    if config.max_num_tokens is not None:
        in_chunks = tokens_per_block - 1 if config.enable_chunked_context else 0
        bounds.append(config.max_num_tokens - in_chunks)
    if config.kv_cache_config.max_tokens is not None:
        bounds.append(config.kv_cache_config.max_tokens // tokens_per_block)
    return max(config.max_beam_width, min(bounds))


def _cache_fields(cache: KvCacheConfig) -> dict[str, Any]:
    """Return the fields of EngineConfig for the KV cache. The share of memory applies to GPU and CPU."""
    fields: dict[str, Any] = {
        "max_tokens_in_paged_kv_cache": cache.max_tokens,
        "max_attention_window_size": tuple(cache.max_attention_window or ()),
        "sink_token_length": cache.sink_token_length or 0,
    }
    if cache.free_gpu_memory_fraction is not None:
        fields["kv_cache_free_gpu_mem_fraction"] = cache.free_gpu_memory_fraction
        fields["kv_cache_free_cpu_mem_fraction"] = cache.free_gpu_memory_fraction
    return fields


_PEFT_FIELDS_OF_ENGINE = {
    "optimal_adapter_size": "lora_cache_optimal_adapter_size",
    "max_adapter_size": "lora_cache_max_adapter_size",
    "device_cache_percent": "lora_cache_gpu_memory_fraction",
}
_PEFT_FIELDS = {"host_cache_size": "lora_cache_host_memory_bytes", "lora_prefetch_dir": "lora_prefetch_dir"}


def _said(peft: PeftCacheConfig, base: Any, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of `base` whose values in the configuration are not the defaults."""
    defaults = PeftCacheConfig()
    values = {name: getattr(peft, name) for name in names if getattr(peft, name) != getattr(defaults, name)}
    return {names[name]: value for name, value in values.items()}


def _parallel_fields(config: ExecutorConfig, base: Parameters) -> dict[str, Any]:
    parallel = config.parallel_config
    if parallel is None:
        return {}
    fields: dict[str, Any] = {}
    if base.tensor_parallel_size * base.pipeline_parallel_size > 1:
        fields["launch_mode"] = _LAUNCH_MODES[parallel.communication_mode]
    if parallel.device_ids is not None:
        fields["gpu_device_ids"] = tuple(parallel.device_ids)
    return fields

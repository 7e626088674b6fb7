"""Convert an ExecutorConfig to the parameters that load an engine.

The checker in `fields.py` must be called first: it refuses or logs fields that have no effect. Any thread.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from inflight.additional_outputs import are_distinct
from inflight.config import (
    DEBUG_INPUTS,
    DEBUG_OUTPUTS,
    CapacityPolicy,
    ChunkingPolicy,
    Parameters,
    Speculation,
)
from inflight.engine_folder import is_engine_folder, num_slots
from inflight.executor.config import DebugConfig, ExecutorConfig, KvCacheConfig, PeftCacheConfig
from inflight.executor.convert import wanted_outputs
from inflight.executor.enums import (
    BatchingType,
    CapacitySchedulerPolicy,
    CommunicationMode,
    DecodingMode,
)
from inflight.executor.errors import InvalidValue, NotSupported
from inflight.parameter_spec import MAX_DRAFT_TOKENS, DraftTree

_logger = logging.getLogger(__name__)

DEFAULT_MAX_BATCH_SIZE = 64
"""Number of sequences that run at once if the configuration has room for them and names no other number."""

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
        InvalidValue: The configuration names a tensor that does not exist, or its eagle_choices are not a tree.
        NotSupported: Its eagle_choices have drafts of more than MAX_DRAFT_TOKENS tokens.
    """
    base = base or Parameters()
    policy = _policy(config)
    num_sequences = config.max_batch_size or _default_batch_size(config, model_path, base)
    num_tokens = config.max_num_tokens or max(base.scheduler.max_num_tokens, num_sequences)
    peft, guides = config.peft_cache_config, config.guided_decoding_config
    speculation = _find_speculation(config, base.scheduler.speculative_decoding_mode)
    return replace(
        base,
        gpt_model_type="V1" if policy is CapacityPolicy.STATIC_BATCH else base.gpt_model_type,
        iter_stats_max_iterations=config.iter_stats_max_iterations,
        request_stats_max_iterations=config.request_stats_max_iterations,
        scheduler=replace(
            base.scheduler,
            policy=policy,
            max_num_tokens=num_tokens,
            speculative_decoding_mode=speculation,
            **_scheduler_fields(config),
        ),
        engine=replace(
            base.engine,
            gpt_model_path=model_path,
            normalize_log_probs=config.normalize_log_probs,
            max_num_sequences=num_sequences,
            max_num_tokens=num_tokens,
            has_draft_head=speculation is not None and speculation.method == Speculation.MTP,
            **_cache_fields(config.kv_cache_config),
            **_non_default_fields(peft, _PEFT_FIELDS_OF_ENGINE),
            **_model_outputs(config),
            **_debug_fields(config.debug_config),
        ),
        **_non_default_fields(peft, _PEFT_FIELDS),
        guided_decoding_backend=(
            base.guided_decoding_backend if guides is None else guides.backend.name.lower()
        ),
        **_parallel_fields(config, base),
    )


def _policy(config: ExecutorConfig) -> CapacityPolicy:
    if config.batching_type is BatchingType.STATIC:
        return CapacityPolicy.STATIC_BATCH
    return _POLICIES[config.scheduler_config.capacity_scheduler_policy]


def _find_speculation(config: ExecutorConfig, base: Speculation | None) -> Speculation | None:
    """Return how tokens are drafted: as in the parameters, or by a head if the mode is Eagle."""
    decoding = config.decoding_config
    if decoding is None or decoding.decoding_mode != DecodingMode.Eagle():
        return base
    method = base.method if base is not None and base.has_head else Speculation.MTP
    choices = None if decoding.eagle_config is None else decoding.eagle_config.eagle_choices
    if choices is None:
        return base if base is not None and base.has_head else Speculation.parse(method)
    try:
        tree = DraftTree.of(choices)
    except ValueError as error:
        raise InvalidValue(
            f"EagleConfig.eagle_choices {choices} is not a tree that contains [0], such as [[0], [1], [0, 0]]"
        ) from error
    if tree.num_tokens > MAX_DRAFT_TOKENS:
        raise NotSupported(
            f"EagleConfig.eagle_choices has a path of {tree.num_tokens} likeliest guesses, expected at most "
            f"{MAX_DRAFT_TOKENS}"
        )
    if tree.note:
        _logger.warning("%s", tree.note)
    return Speculation(method, tree.num_tokens)


def _scheduler_fields(config: ExecutorConfig) -> dict[str, Any]:
    """Return the fields of SchedulerConfig that do not depend on others."""
    fields: dict[str, Any] = {
        "enable_chunked_context": config.enable_chunked_context,
        "enable_kv_cache_reuse": config.kv_cache_config.enable_block_reuse,
        "max_beam_width": config.max_beam_width,
        "kv_cache_onboard_blocks": config.kv_cache_config.onboard_blocks,
    }
    if (priority := config.kv_cache_config.secondary_offload_min_priority) is not None:
        fields["secondary_offload_min_priority"] = priority
    chunking = config.scheduler_config.context_chunking_policy
    if chunking is not None:
        fields["context_chunking_policy"] = ChunkingPolicy[chunking.name]
    return fields


def _default_batch_size(config: ExecutorConfig, model_path: str, base: Parameters) -> int:
    """Return the default number of running sequences, within the room of an iteration, the KV cache and plans."""
    tokens_per_block = base.engine.tokens_per_block
    most = num_slots(model_path) if is_engine_folder(model_path) else None
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
        "kv_cache_host_memory_bytes": cache.host_cache_size or 0,
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


def _non_default_fields(peft: PeftCacheConfig, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the values that are not the defaults, by their names in `names`."""
    defaults = PeftCacheConfig()
    values = {name: getattr(peft, name) for name in names if getattr(peft, name) != getattr(defaults, name)}
    return {names[name]: value for name, value in values.items()}


def _model_outputs(config: ExecutorConfig) -> dict[str, Any]:
    """Return the fields of EngineConfig for outputs of the model that requests may ask for."""
    if config.additional_model_outputs is None:
        return {}
    outputs = wanted_outputs(config.additional_model_outputs)
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

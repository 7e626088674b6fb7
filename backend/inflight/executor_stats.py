"""The Executor API's statistics: their classes, their JSON form, and the conversion from this engine's counters.

Clients of the Executor get the objects; the response to a `state` request has the same values as JSON.
Fields and keys have TensorRT-LLM's names. As in TensorRT-LLM, fields can be assigned.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import cast

from inflight.core.kv.store_stats import HOST
from inflight.core.report import stats as core
from inflight.core.report.stats import RequestStage

_NS_PER_MS = 1_000_000


class _WithJson:
    """A dataclass with a JSON form that has TensorRT-LLM's keys: the field names in camelCase."""

    def to_json_str(self) -> str:
        """Return a JSON object; absent values are null."""
        return json.dumps(self.to_plain(), separators=(",", ":"), sort_keys=True)

    def to_plain(self) -> dict[str, object]:
        """Return the content of the JSON object."""
        return {
            each.metadata.get("json") or _camel_case(each.name): _plain(getattr(self, each.name))
            for each in fields(self)  # pyright: ignore[reportArgumentType]  # every subclass is a dataclass
        }


@dataclass
class KvCacheStats(_WithJson):
    """KV cache blocks: current numbers, and counts since the start."""

    max_num_blocks: int = 0
    free_num_blocks: int = 0
    used_num_blocks: int = 0
    tokens_per_block: int = 0
    alloc_total_blocks: int = 0
    alloc_new_blocks: int = 0
    reused_blocks: int = 0
    missed_blocks: int = 0
    cache_hit_rate: float = 0.0


@dataclass
class KvCacheIterationStats(_WithJson):
    """The KV cache and host memory for saved blocks after an iteration, and what the iteration did with them.

    In TensorRT-LLM, this is `kvCacheIterationStats` of a statistics' JSON object.

    Attributes:
        primary_max_num_blocks, primary_free_num_blocks, primary_used_num_blocks: Blocks of the cache; used ones
            are held by running requests, all others are free.
        primary_evictable_num_blocks: Free blocks whose content can be found again.
        secondary_max_num_blocks, secondary_free_num_blocks, secondary_used_num_blocks: Blocks for which there is
            host memory; 0 on a CPU, where this memory is a part of the cache.
        secondary_evictable_num_blocks: The used ones, because none is held.
        primary_peak_free_num_blocks, primary_peak_used_num_blocks, primary_peak_evictable_num_blocks,
            secondary_peak_free_num_blocks, secondary_peak_used_num_blocks, secondary_peak_evictable_num_blocks:
            The highest numbers during the iteration.
        iter_alloc_total_blocks, iter_alloc_new_blocks: Free blocks that sequences took.
        iter_gen_alloc_blocks: Taken blocks that sequences in generation took.
        iter_reused_blocks, iter_missed_blocks: Blocks that admissions found in the cache, and full blocks that
            they did not find.
        iter_full_reused_blocks, iter_partial_reused_blocks: Reused blocks that were found as a whole, and those of
            which only the beginning was found.
        iter_cache_hit_rate: Found blocks / found and missed blocks.
        iter_intra_device_copy_blocks, iter_intra_device_copy_bytes: Blocks whose content was copied to another
            block of the cache.
        iter_onboard_blocks, iter_onboard_bytes: Saved blocks that were copied back into the cache, from host
            memory or files.
        iter_offload_blocks, iter_offload_bytes: Blocks that were copied to host memory or files.
        iter_host_dropped_blocks, iter_host_dropped_bytes: Blocks that were dropped from host memory.
    """

    primary_max_num_blocks: int = 0
    primary_free_num_blocks: int = 0
    primary_used_num_blocks: int = 0
    primary_evictable_num_blocks: int = 0
    secondary_max_num_blocks: int = 0
    secondary_free_num_blocks: int = 0
    secondary_used_num_blocks: int = 0
    secondary_evictable_num_blocks: int = 0
    primary_peak_free_num_blocks: int = 0
    primary_peak_used_num_blocks: int = 0
    primary_peak_evictable_num_blocks: int = 0
    secondary_peak_free_num_blocks: int = 0
    secondary_peak_used_num_blocks: int = 0
    secondary_peak_evictable_num_blocks: int = 0
    iter_alloc_total_blocks: int = 0
    iter_alloc_new_blocks: int = 0
    iter_gen_alloc_blocks: int = 0
    iter_reused_blocks: int = 0
    iter_full_reused_blocks: int = 0
    iter_partial_reused_blocks: int = 0
    iter_missed_blocks: int = 0
    iter_cache_hit_rate: float = 0.0
    iter_onboard_blocks: int = 0
    iter_onboard_bytes: int = 0
    iter_offload_blocks: int = 0
    iter_offload_bytes: int = 0
    iter_host_dropped_blocks: int = 0
    iter_host_dropped_bytes: int = 0
    iter_intra_device_copy_blocks: int = 0
    iter_intra_device_copy_bytes: int = 0


@dataclass
class KvCacheTierStats(_WithJson):
    """A tier of saved KV blocks, host memory or files: its content, and counts since the start.

    TensorRT-LLM has no such class.

    Attributes:
        medium: "host" or "disk".
        max_bytes: Maximum size of what it holds.
        used_num_blocks, used_bytes: The blocks that it holds.
        offload_blocks, offload_bytes: Blocks written to it.
        onboard_blocks, onboard_bytes: Blocks loaded from it into the cache.
        dropped_blocks, dropped_bytes: Blocks that it does not hold any more.
    """

    medium: str = ""
    max_bytes: int = 0
    used_num_blocks: int = 0
    used_bytes: int = 0
    offload_blocks: int = 0
    offload_bytes: int = 0
    onboard_blocks: int = 0
    onboard_bytes: int = 0
    dropped_blocks: int = 0
    dropped_bytes: int = 0


@dataclass
class StaticBatchingStats(_WithJson):
    """A static batch, since its start."""

    num_scheduled_requests: int = 0
    num_context_requests: int = 0
    num_ctx_tokens: int = 0
    num_gen_tokens: int = 0
    empty_gen_slots: int = 0


@dataclass
class InflightBatchingStats(_WithJson):
    """The batch of one iteration."""

    num_scheduled_requests: int = 0
    num_context_requests: int = 0
    num_gen_requests: int = 0
    num_paused_requests: int = 0
    num_ctx_tokens: int = 0
    micro_batch_id: int = 0
    avg_num_decoded_tokens_per_iter: float = 0.0


@dataclass
class SpecDecodingStats(_WithJson):
    """Draft tokens of one iteration. Drafting takes no extra pass here, so latency and overhead are 0."""

    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_requests_with_draft_tokens: int = 0
    acceptance_length: float = 0.0
    iter_latency_ms: float = 0.0
    draft_overhead: float = 0.0


@dataclass
class IterationStats(_WithJson):
    """TensorRT-LLM's `IterationStats`: statistics of one iteration and of the queue after it.

    Attributes:
        timestamp: Local time, with microseconds.
        iter: Number of the iteration.
        iter_latency_ms: Duration of the iteration in milliseconds.
        new_active_requests_queue_latency_ms: Total time in milliseconds that the requests started in the
            iteration had waited.
        num_new_active_requests: Number of requests started in the iteration.
        num_active_requests: Number of requests without a final response.
        num_queued_requests: Number of requests in the queue.
        num_completed_requests: Number of requests that got their final response in the iteration.
        max_num_active_requests: Maximum number of requests that can run at a time.
        max_batch_size_static, max_batch_size_tuner_recommended, max_batch_size_runtime: Maximum number of
            sequences that run at a time; there is no tuner.
        max_num_tokens_static, max_num_tokens_tuner_recommended, max_num_tokens_runtime: Maximum number of tokens
            per iteration.
        gpu_mem_usage, cpu_mem_usage, pinned_mem_usage: Memory of this process, in bytes.
        kv_cache_stats, cross_kv_cache_stats: The KV cache; there is no cross-attention cache.
        static_batching_stats, inflight_batching_stats: The batch; exactly one of them is set.
        specdec_stats: Draft tokens; None if there were none.
        kv_cache_iteration_stats: Statistics of the iteration's KV blocks, by the number of tokens to which
            attention extends; this server has one entry, whose key is the longest sequence. None outside of an
            iteration.
        kv_cache_tier_stats: Host memory and files for saved KV blocks; None if there are none.
    """

    timestamp: str = ""
    iter: int = 0
    iter_latency_ms: float = 0.0
    new_active_requests_queue_latency_ms: float = 0.0
    num_new_active_requests: int = 0
    num_active_requests: int = 0
    num_queued_requests: int = 0
    num_completed_requests: int = 0
    max_num_active_requests: int = 0
    max_batch_size_static: int = 0
    max_batch_size_tuner_recommended: int = 0
    max_batch_size_runtime: int = 0
    max_num_tokens_static: int = 0
    max_num_tokens_tuner_recommended: int = 0
    max_num_tokens_runtime: int = 0
    gpu_mem_usage: int = 0
    cpu_mem_usage: int = 0
    pinned_mem_usage: int = 0
    kv_cache_stats: KvCacheStats | None = None
    cross_kv_cache_stats: KvCacheStats | None = None
    static_batching_stats: StaticBatchingStats | None = None
    inflight_batching_stats: InflightBatchingStats | None = None
    specdec_stats: SpecDecodingStats | None = field(default=None, metadata={"json": "specDecodingStats"})
    kv_cache_iteration_stats: dict[int, KvCacheIterationStats] | None = None
    kv_cache_tier_stats: list[KvCacheTierStats] | None = None


@dataclass
class DisServingRequestStats(_WithJson):
    """Transfer of a request's KV blocks between servers in disaggregated serving."""

    kv_cache_transfer_ms: float = 0.0
    kv_cache_size: int = 0


@dataclass
class RequestStats(_WithJson):
    """TensorRT-LLM's `RequestStats`: one request after an iteration.

    Attributes:
        id: The request's id.
        stage: The request's stage.
        context_prefill_position: Number of computed prompt tokens.
        num_generated_tokens: Number of generated tokens so far.
        avg_num_decoded_tokens_per_iter: Average number of tokens over the iterations that generated tokens
            of the request.
        scheduled: Whether the request was in the iteration's batch.
        paused: Whether the request is paused.
        dis_serving_stats: None, because there is no disaggregated serving.
        alloc_total_blocks_per_request, alloc_new_blocks_per_request, reused_blocks_per_request,
            missed_blocks_per_request, kv_cache_hit_rate_per_request: KV blocks of the request's tokens at its
            start.
    """

    id: int = 0
    stage: RequestStage = RequestStage.QUEUED
    context_prefill_position: int = 0
    num_generated_tokens: int = 0
    avg_num_decoded_tokens_per_iter: float = 0.0
    scheduled: bool = False
    paused: bool = False
    dis_serving_stats: DisServingRequestStats | None = None
    alloc_total_blocks_per_request: int = 0
    alloc_new_blocks_per_request: int = 0
    reused_blocks_per_request: int = 0
    missed_blocks_per_request: int = 0
    kv_cache_hit_rate_per_request: float = 0.0


@dataclass
class RequestStatsPerIteration(_WithJson):
    """Statistics of all requests after iteration `iter`."""

    iter: int = 0
    request_stats: list[RequestStats] = field(default_factory=list[RequestStats])


def _plain(value: object) -> object:
    if isinstance(value, _WithJson):
        return value.to_plain()
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in cast("dict[object, object]", value).items()}
    return [_plain(each) for each in cast("list[object]", value)] if isinstance(value, list) else value


def _camel_case(name: str) -> str:
    """Convert a field's name to TensorRT-LLM's key: iter_latency_ms to iterLatencyMS."""
    first, *others = name.split("_")
    return first + "".join("MS" if part == "ms" else part.capitalize() for part in others)


# ---------------------------------------------------------------------- from this engine's counters


def iteration_stats(entry: core.KeptIteration, memory: core.MemoryUsage) -> IterationStats:
    """Return the statistics of an iteration. `memory` is the current memory use of the engine's process."""
    stats = entry.stats
    return IterationStats(
        timestamp=core.timestamp(entry.wall_clock_s),
        iter=stats.iteration,
        iter_latency_ms=stats.duration_ns / _NS_PER_MS,
        new_active_requests_queue_latency_ms=stats.new_requests_queue_ns / _NS_PER_MS,
        num_new_active_requests=stats.num_new_requests,
        num_active_requests=stats.num_active_requests,
        num_queued_requests=stats.num_waiting_requests,
        num_completed_requests=stats.num_completed_requests,
        max_num_active_requests=stats.max_num_requests,
        max_batch_size_static=stats.max_num_requests,
        max_batch_size_runtime=stats.max_num_requests,
        max_num_tokens_static=stats.max_num_tokens,
        max_num_tokens_runtime=stats.max_num_tokens,
        gpu_mem_usage=memory.gpu,
        cpu_mem_usage=memory.cpu,
        pinned_mem_usage=memory.pinned,
        kv_cache_stats=KvCacheStats(
            max_num_blocks=stats.max_num_blocks,
            free_num_blocks=stats.num_free_blocks,
            used_num_blocks=stats.num_used_blocks,
            tokens_per_block=stats.tokens_per_block,
            alloc_total_blocks=stats.num_taken_blocks,
            alloc_new_blocks=stats.num_taken_blocks,
            reused_blocks=stats.num_reused_blocks,
            missed_blocks=stats.num_missed_blocks,
            cache_hit_rate=stats.cache_hit_rate,
        ),
        static_batching_stats=_static_batching_stats(stats),
        inflight_batching_stats=_inflight_batching_stats(stats),
        specdec_stats=_spec_decoding_stats(stats),
        kv_cache_iteration_stats=None if entry.kv is None else _kv_cache_iteration_stats(stats, entry.kv),
        kv_cache_tier_stats=_kv_cache_tier_stats(stats),
    )


def _kv_cache_iteration_stats(
    stats: core.IterationCounts, changes: core.KvChanges
) -> dict[int, KvCacheIterationStats]:
    host, block_bytes = stats.block_store.tier(HOST), stats.block_store.block_bytes or 1
    max_in_host, free_in_host, most_free_in_host, least_free_in_host = (
        (host.max_bytes - num_bytes) // block_bytes
        for num_bytes in (0, host.num_bytes, host.least_bytes, host.most_bytes)
    )
    found = KvCacheIterationStats(
        primary_max_num_blocks=stats.max_num_blocks,
        primary_free_num_blocks=stats.num_free_blocks,
        primary_used_num_blocks=stats.num_used_blocks,
        primary_evictable_num_blocks=stats.num_cached_blocks,
        secondary_max_num_blocks=max_in_host,
        secondary_free_num_blocks=free_in_host,
        secondary_used_num_blocks=max_in_host - free_in_host,
        secondary_evictable_num_blocks=max_in_host - free_in_host,
        primary_peak_free_num_blocks=stats.block_peaks.free,
        primary_peak_used_num_blocks=stats.block_peaks.held,
        primary_peak_evictable_num_blocks=stats.block_peaks.cached,
        secondary_peak_free_num_blocks=most_free_in_host,
        secondary_peak_used_num_blocks=max_in_host - least_free_in_host,
        secondary_peak_evictable_num_blocks=max_in_host - least_free_in_host,
        iter_alloc_total_blocks=changes.num_taken,
        iter_alloc_new_blocks=changes.num_taken,
        iter_gen_alloc_blocks=changes.num_generation,
        iter_reused_blocks=changes.num_reused,
        iter_full_reused_blocks=changes.num_reused - changes.num_partly_reused,
        iter_partial_reused_blocks=changes.num_partly_reused,
        iter_missed_blocks=changes.num_missed,
        iter_cache_hit_rate=core.hit_rate(changes.num_reused, changes.num_missed),
        iter_onboard_blocks=changes.num_onboarded,
        iter_onboard_bytes=changes.onboarded_bytes,
        iter_offload_blocks=changes.num_offloaded,
        iter_offload_bytes=changes.offloaded_bytes,
        iter_host_dropped_blocks=changes.num_host_dropped,
        iter_host_dropped_bytes=changes.host_dropped_bytes,
        iter_intra_device_copy_blocks=changes.num_copied,
        iter_intra_device_copy_bytes=changes.copied_bytes,
    )
    return {stats.max_sequence_length: found}


def _kv_cache_tier_stats(stats: core.IterationCounts) -> list[KvCacheTierStats] | None:
    return [
        KvCacheTierStats(
            medium=tier.medium,
            max_bytes=tier.max_bytes,
            used_num_blocks=tier.num_blocks,
            used_bytes=tier.num_bytes,
            offload_blocks=tier.num_saved,
            offload_bytes=tier.saved_bytes,
            onboard_blocks=tier.num_loaded,
            onboard_bytes=tier.loaded_bytes,
            dropped_blocks=tier.num_dropped,
            dropped_bytes=tier.dropped_bytes,
        )
        for tier in stats.block_store.tiers
    ] or None


def _static_batching_stats(stats: core.IterationCounts) -> StaticBatchingStats | None:
    batch = stats.static_batch
    if batch is None:
        return None
    return StaticBatchingStats(
        num_scheduled_requests=stats.num_batched_requests,
        num_context_requests=stats.num_context_requests,
        num_ctx_tokens=batch.num_context_tokens,
        num_gen_tokens=batch.num_generation_tokens,
        empty_gen_slots=batch.num_empty_slots,
    )


def _inflight_batching_stats(stats: core.IterationCounts) -> InflightBatchingStats | None:
    if stats.static_batch is not None:
        return None
    return InflightBatchingStats(
        num_scheduled_requests=stats.num_scheduled_requests,
        num_context_requests=stats.num_context_requests,
        num_gen_requests=stats.num_generation_requests,
        num_paused_requests=stats.num_paused_requests,
        num_ctx_tokens=stats.num_context_tokens,
        micro_batch_id=stats.micro_batch_id,
        avg_num_decoded_tokens_per_iter=core.ratio(stats.num_generated_tokens, stats.num_advanced_sequences),
    )


def _spec_decoding_stats(stats: core.IterationCounts) -> SpecDecodingStats | None:
    steps, accepted = stats.num_drafted_requests, stats.num_accepted_draft_tokens
    if not steps:
        return None
    return SpecDecodingStats(
        num_draft_tokens=stats.num_draft_tokens,
        num_accepted_tokens=accepted,
        num_requests_with_draft_tokens=steps,
        acceptance_length=(steps + accepted) / steps,
    )


def request_stats(stats: core.RequestCountsOfIteration) -> RequestStatsPerIteration:
    """Return the statistics of all requests after an iteration."""
    return RequestStatsPerIteration(stats.iteration, [_request_stats(each) for each in stats.request_stats])


def _request_stats(stats: core.RequestCounts) -> RequestStats:
    return RequestStats(
        id=stats.request_id,
        stage=stats.stage,
        context_prefill_position=stats.context_prefill_position,
        num_generated_tokens=stats.num_generated_tokens,
        avg_num_decoded_tokens_per_iter=core.ratio(
            stats.num_generated_tokens, stats.num_generation_iterations
        ),
        scheduled=stats.is_scheduled,
        paused=stats.is_paused,
        alloc_total_blocks_per_request=stats.num_new_blocks,
        alloc_new_blocks_per_request=stats.num_new_blocks,
        reused_blocks_per_request=stats.num_reused_blocks,
        missed_blocks_per_request=stats.num_missed_blocks,
        kv_cache_hit_rate_per_request=core.hit_rate(stats.num_reused_blocks, stats.num_missed_blocks),
    )

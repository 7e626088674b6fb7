"""Statistics, events of the KV cache and debug tensors, from the engine's to the client's classes."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from inflight.core.kv.kv_events import KvEvent
from inflight.core.report import stats as core
from inflight.core.report.reports import ReportKind, Reports
from inflight.errors import Unavailable
from inflight.executor.enums import RequestStage
from inflight.executor.errors import ExecutorError
from inflight.executor.kv_cache import (
    KVCacheCreatedData,
    KVCacheEvent,
    KVCacheEventData,
    KVCacheEventDiffInt,
    KVCacheRemovedData,
    KVCacheStoredBlockData,
    KVCacheStoredData,
    KVCacheUpdatedData,
    UniqueToken,
)
from inflight.executor.stats import (
    DebugTensorsPerIteration,
    InflightBatchingStats,
    IterationStats,
    KvCacheStats,
    RequestStats,
    RequestStatsPerIteration,
    SpecDecodingStats,
    StaticBatchingStats,
)

if TYPE_CHECKING:
    from inflight.engine import debug_tensors as core_debug

ReadReports = Callable[[ReportKind, float | None], Reports]


class KVCacheEventManager:
    """What happens in the KV cache, to be fetched.

    Args:
        read: As `EngineClient.reports`.
        window_size: Attention window of the layers, in tokens.
    """

    def __init__(self, read: ReadReports, window_size: int) -> None:
        self._read = read
        self._window_size = window_size

    def get_latest_events(self, timeout_ms: timedelta | float | None = None) -> list[KVCacheEvent]:
        """Wait for events and take all there are, oldest first.

        Args:
            timeout_ms: How long to wait: a timedelta, or milliseconds; None: until there are some.

        Returns:
            The events; none if the time is up, or the executor in this process was shut down.

        Raises:
            ExecutorError: The engine is in other processes, and cannot be reached.
        """
        timeout_s = timeout_ms.total_seconds() if isinstance(timeout_ms, timedelta) else timeout_ms
        if timeout_s is not None and not isinstance(timeout_ms, timedelta):
            timeout_s /= 1000
        try:
            events = self._read(ReportKind.KV_EVENTS, timeout_s).kv_events
        except Unavailable as error:
            raise ExecutorError(str(error)) from error
        return [KVCacheEvent(each.event_id, _event_data(each), self._window_size) for each in events]


def _event_data(event: KvEvent) -> KVCacheEventData:
    if event.num_blocks is not None:
        return KVCacheCreatedData([event.num_blocks, 0])  # there is no second level
    if event.stored:
        return KVCacheStoredData(
            event.parent_hash,
            [
                KVCacheStoredBlockData(
                    block.block_hash,
                    [UniqueToken(*pair) for pair in zip(block.token_ids, block.extra_ids, strict=True)],
                    block.lora_task_id,
                    0,
                    block.priority,
                )
                for block in event.stored
            ],
        )
    if event.updated is not None:
        return KVCacheUpdatedData(event.updated, None, KVCacheEventDiffInt(*event.priorities))
    return KVCacheRemovedData(list(event.removed))


def iteration_stats(kept: core.KeptIteration, memory: core.MemoryUsage) -> IterationStats:
    """The statistics of an iteration; `memory` is what the engine's process holds now."""
    stats = kept.stats
    return IterationStats(
        timestamp=core.timestamp(kept.wall_clock_s),
        iter=stats.iteration,
        iter_latency_ms=stats.duration_ns / 1e6,
        new_active_requests_queue_latency_ms=stats.new_requests_queue_ns / 1e6,
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
            stats.max_num_blocks,
            stats.num_free_blocks,
            stats.num_used_blocks,
            stats.tokens_per_block,
            stats.num_taken_blocks,
            stats.num_taken_blocks,
            stats.num_reused_blocks,
            stats.num_missed_blocks,
            stats.cache_hit_rate,
        ),
        static_batching_stats=_static_batching_stats(stats),
        inflight_batching_stats=_inflight_batching_stats(stats),
        specdec_stats=_spec_decoding_stats(stats),
    )


def _static_batching_stats(stats: core.IterationStats) -> StaticBatchingStats | None:
    batch = stats.static_batch
    if batch is None:
        return None
    return StaticBatchingStats(
        stats.num_batched_requests,
        stats.num_context_requests,
        batch.num_context_tokens,
        batch.num_generation_tokens,
        batch.num_empty_slots,
    )


def _inflight_batching_stats(stats: core.IterationStats) -> InflightBatchingStats | None:
    if stats.static_batch is not None:
        return None
    return InflightBatchingStats(
        stats.num_scheduled_requests,
        stats.num_context_requests,
        stats.num_generation_requests,
        stats.num_paused_requests,
        stats.num_context_tokens,
        stats.micro_batch_id,
        _per(stats.num_generated_tokens, stats.num_advanced_sequences),
    )


def _spec_decoding_stats(stats: core.IterationStats) -> SpecDecodingStats | None:
    steps, accepted = stats.num_drafted_requests, stats.num_accepted_draft_tokens
    if not steps:
        return None
    return SpecDecodingStats(stats.num_draft_tokens, accepted, steps, (steps + accepted) / steps)


def request_stats(told: core.RequestStatsPerIteration) -> RequestStatsPerIteration:
    """The statistics of all requests after an iteration."""
    return RequestStatsPerIteration(told.iteration, [_of_request(each) for each in told.request_stats])


def _of_request(stats: core.RequestStats) -> RequestStats:
    return RequestStats(
        id=stats.request_id,
        stage=RequestStage[stats.stage.name],
        context_prefill_position=stats.context_prefill_position,
        num_generated_tokens=stats.num_generated_tokens,
        avg_num_decoded_tokens_per_iter=_per(stats.num_generated_tokens, stats.num_generation_iterations),
        scheduled=stats.is_scheduled,
        paused=stats.is_paused,
        alloc_total_blocks_per_request=stats.num_new_blocks,
        alloc_new_blocks_per_request=stats.num_new_blocks,
        reused_blocks_per_request=stats.num_reused_blocks,
        missed_blocks_per_request=stats.num_missed_blocks,
        kv_cache_hit_rate_per_request=core.hit_rate(stats.num_reused_blocks, stats.num_missed_blocks),
    )


def _per(count: int, of: int) -> float:
    return count / of if of else 0.0


def debug_tensors(written: core_debug.DebugTensorsPerIteration) -> DebugTensorsPerIteration:
    """The tensors that an iteration has written down."""
    import torch

    tensors = {name: torch.from_numpy(array) for name, array in written.debug_tensors.items()}
    return DebugTensorsPerIteration(written.iter, tensors)

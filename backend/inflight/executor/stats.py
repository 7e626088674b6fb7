"""Statistics of iterations and requests, and tensors kept to be looked at, as a client fetches them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, Any

from inflight.executor.enums import RequestStage

if TYPE_CHECKING:
    import torch


class _WithJson:
    """A dataclass that can be written as JSON, with TensorRT-LLM's keys: the fields' names in camelCase."""

    def to_json_str(self) -> str:
        """A JSON object; what there is none of is null."""
        return json.dumps(_plain(self), separators=(",", ":"), sort_keys=True)


@dataclass
class KvCacheStats(_WithJson):
    """Blocks of the KV cache: how many there are, and counts since the start."""

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
class StaticBatchingStats(_WithJson):
    """The static batch of an iteration, from its start until then."""

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
    """Drafts of one iteration. They need no pass of their own here, so latency and overhead are 0."""

    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_requests_with_draft_tokens: int = 0
    acceptance_length: float = 0.0
    iter_latency_ms: float = 0.0
    draft_overhead: float = 0.0


@dataclass
class IterationStats(_WithJson):
    """One iteration.

    Attributes:
        timestamp: Local time, with microseconds.
        iter: Number of the iteration.
        iter_latency_ms: Its duration.
        new_active_requests_queue_latency_ms: Sum of the times that requests waited which started in it.
        num_new_active_requests: How many those were.
        num_active_requests: Requests without a final response.
        num_queued_requests: Requests that wait.
        num_completed_requests: Requests whose final response it made.
        max_num_active_requests: Most requests that can run at a time.
        max_batch_size_static, max_batch_size_tuner_recommended, max_batch_size_runtime: Most sequences that run
            at once; there is no tuner.
        max_num_tokens_static, max_num_tokens_tuner_recommended, max_num_tokens_runtime: Most tokens of an
            iteration.
        gpu_mem_usage, cpu_mem_usage, pinned_mem_usage: Bytes that this process holds.
        kv_cache_stats, cross_kv_cache_stats: The KV cache, and that of cross attention, which there is none of.
        static_batching_stats, inflight_batching_stats: The batch; one of them is None.
        specdec_stats: Drafts; None without any.
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


@dataclass
class DisServingRequestStats(_WithJson):
    """The transfer of a request's KV blocks between servers."""

    kv_cache_transfer_ms: float = 0.0
    kv_cache_size: int = 0


@dataclass
class RequestStats(_WithJson):
    """One request after an iteration.

    Attributes:
        id: The request's id.
        stage: Where it is.
        context_prefill_position: Prompt tokens computed.
        num_generated_tokens: Tokens generated so far.
        avg_num_decoded_tokens_per_iter: Of iterations that gave it tokens.
        scheduled: Whether it was in the iteration's batch.
        paused: Whether it is paused.
        dis_serving_stats: Of disaggregated serving; None.
        alloc_total_blocks_per_request, alloc_new_blocks_per_request, reused_blocks_per_request,
            missed_blocks_per_request, kv_cache_hit_rate_per_request: KV blocks of the tokens it began with.
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
    """All requests after an iteration, whose number is `iter`."""

    iter: int = 0
    request_stats: list[RequestStats] = field(default_factory=list)


@dataclass(eq=False)
class DebugTensorsPerIteration:
    """Tensors of the iteration whose number is `iter`, by name."""

    iter: int = 0
    debug_tensors: dict[str, torch.Tensor] = field(default_factory=dict)


def _plain(value: Any) -> Any:
    if isinstance(value, _WithJson):
        return {
            each.metadata.get("json") or _camel_case(each.name): _plain(getattr(value, each.name))
            for each in fields(value)  # pyright: ignore[reportArgumentType]  # every subclass is a dataclass
        }
    if isinstance(value, Enum):
        return value.name
    return [_plain(each) for each in value] if isinstance(value, list) else value


def _camel_case(name: str) -> str:
    """iter_latency_ms → iterLatencyMS."""
    first, *others = name.split("_")
    return first + "".join("MS" if part == "ms" else part.capitalize() for part in others)

"""Statistics of one iteration: counters, and the JSON objects made from them.

Keys, their spelling and the timestamp's format are the specification's (The Batch Manager, Statistics). The
Executor API's statistics, which use the same counters, are in `inflight.executor_stats`.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from enum import Enum

from inflight.core.kv.block_pool import BlockPeaks
from inflight.core.kv.store_stats import HOST, StoreStats

_SECONDS_FORMAT = "%m-%d-%Y %H:%M:%S"


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """Memory of the engine's process, in bytes.

    Attributes:
        cpu: Host memory.
        gpu: Device memory.
        pinned: Page-locked host memory, which is part of `cpu`.
    """

    cpu: int = 0
    gpu: int = 0
    pinned: int = 0


@dataclass(frozen=True, slots=True)
class StaticBatchStats:
    """One static batch (V1), from its start until now.

    Attributes:
        num_requests: Number of sequences started in the batch.
        num_slots: Maximum number of slots in use at a time.
        num_context_tokens: Number of prompt tokens computed.
        num_generation_tokens: Number of tokens generated.
        num_empty_slots: Sum over iterations of generation of the slots that were empty because the batch's slowest
            sequence had not ended yet. With several micro-batches, each is counted with its share of the slots.
    """

    num_requests: int = 0
    num_slots: int = 0
    num_context_tokens: int = 0
    num_generation_tokens: int = 0
    num_empty_slots: int = 0


@dataclass(frozen=True, slots=True)
class AdapterStats:
    """Numbers of LoRA adapters stored and on the device, and counts of loads and evictions.

    Attributes:
        num_stored: Number of adapters that requests may use.
        num_resident: Number of adapters on the device.
        num_pages: Number of pages for adapters on the device.
        num_used_pages: Number of pages of adapters that running sequences use.
        num_loads: Number of times an adapter was loaded to the device, since the start.
        num_evictions: Number of times an adapter was evicted from the device, since the start.
    """

    num_stored: int = 0
    num_resident: int = 0
    num_pages: int = 0
    num_used_pages: int = 0
    num_loads: int = 0
    num_evictions: int = 0


@dataclass(frozen=True, slots=True)
class IterationCounts:
    """The counters after an iteration.

    Attributes:
        iteration: Number of the iteration.
        duration_ns: Duration of the iteration in nanoseconds, from fetching requests to sending responses.
        num_active_requests: Requests without a final response.
        num_completed_requests: Requests that got their final response in this iteration.
        num_new_requests: Sequences that started for the first time in this iteration.
        new_requests_queue_ns: Sum of the times that the new sequences had waited, in nanoseconds.
        max_num_requests: Maximum number of requests that can run at a time.
        max_num_tokens: Maximum number of tokens per iteration.
        max_sequence_length: Longest sequence, in tokens, that the model's positions allow.
        max_num_blocks: Number of KV cache blocks.
        num_free_blocks: Blocks that no running request holds, cached ones included.
        num_cached_blocks: The free blocks whose content can be found again.
        tokens_per_block: Tokens per block.
        num_scheduled_requests: Requests in this iteration's batch.
        num_context_requests: Requests of the batch in the context phase.
        num_generation_requests: Requests of the batch in the generation phase.
        num_context_tokens: Number of tokens in the context chunks.
        num_generated_tokens: Tokens that unfinished sequences got in this iteration, end ids included.
        num_advanced_sequences: Number of sequences that got tokens in this iteration; a beam search counts as one.
        num_draft_tokens: Draft tokens in this iteration's batch.
        num_accepted_draft_tokens: Draft tokens that were accepted.
        num_drafted_requests: Rows with draft tokens.
        micro_batch_id: Index among the micro-batches in flight.
        num_waiting_requests: Sequences that wait for their first start or are paused.
        num_paused_requests: Number of sequences paused in this iteration.
        num_taken_blocks: Free blocks taken since the start.
        num_generation_blocks: Taken blocks that sequences in generation took.
        num_reused_blocks: Blocks that admissions found in the cache, since the start.
        num_partly_reused_blocks: Reused blocks of which only the beginning was found.
        num_missed_blocks: Full blocks that admissions did not find in the cache, since the start.
        num_copied_blocks: Blocks whose content was copied to another block of the cache, since the start.
        block_peaks: The highest numbers of blocks during the iteration.
        block_store: The statistics of the store of saved KV blocks.
        static_batch: The current static batch; None without static batching.
        adapters: Numbers of LoRA adapters, stored and on the device.
    """

    iteration: int
    num_active_requests: int
    max_num_requests: int
    max_num_blocks: int
    num_free_blocks: int
    tokens_per_block: int
    num_scheduled_requests: int
    num_context_requests: int
    num_generation_requests: int
    num_context_tokens: int
    micro_batch_id: int
    num_waiting_requests: int
    num_paused_requests: int
    num_reused_blocks: int
    num_missed_blocks: int
    duration_ns: int = 0
    num_completed_requests: int = 0
    num_new_requests: int = 0
    new_requests_queue_ns: int = 0
    max_num_tokens: int = 0
    num_generated_tokens: int = 0
    num_advanced_sequences: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_drafted_requests: int = 0
    num_taken_blocks: int = 0
    max_sequence_length: int = 0
    num_cached_blocks: int = 0
    num_generation_blocks: int = 0
    num_partly_reused_blocks: int = 0
    num_copied_blocks: int = 0
    block_peaks: BlockPeaks = field(default_factory=BlockPeaks)
    block_store: StoreStats = field(default_factory=StoreStats)
    static_batch: StaticBatchStats | None = None
    adapters: AdapterStats = field(default_factory=AdapterStats)

    @property
    def num_used_blocks(self) -> int:
        """Number of blocks that running requests hold."""
        return self.max_num_blocks - self.num_free_blocks

    @property
    def used_fraction(self) -> float:
        """The fraction of all blocks that running requests hold, rounded to six decimals."""
        return round(self.num_used_blocks / self.max_num_blocks, 6) if self.max_num_blocks else 0.0

    @property
    def cache_hit_rate(self) -> float:
        """The fraction of looked-up blocks that were found, since the start."""
        return hit_rate(self.num_reused_blocks, self.num_missed_blocks)

    @property
    def num_batched_requests(self) -> int:
        """Number of requests in this iteration; with static batching, in the static batch; 0 if nothing runs."""
        if self.static_batch is None or not self.num_scheduled_requests:
            return self.num_scheduled_requests
        return self.static_batch.num_requests

    # ---------------------------------------------------------------- texts

    def to_json(self, wall_clock_s: float) -> str:
        """Return the specification's JSON object for the batching type in use.

        With static batching, tokens and empty slots are counted for the static batch so far. `wall_clock_s` is
        seconds since the epoch.
        """
        stamp = time.strftime(_SECONDS_FORMAT, time.localtime(wall_clock_s))
        return json.dumps({"Timestamp": stamp, **self._common(), **self._kv_cache(), **self._batching()})

    def log_fields(self, wall_clock_s: float, memory: MemoryUsage) -> dict[str, int | float | str]:
        """Return the fields of the server's log line: the fields of `to_json`, and later additions of the
        specification.

        Every value except the timestamp is a number.
        """
        fields: dict[str, int | float | str] = {"Timestamp": timestamp(wall_clock_s)}
        fields |= self._common() | self._kv_cache() | self._batching()
        fields["Waiting Requests"] = self.num_waiting_requests
        if self.static_batch is None:
            fields["Paused Requests"] = self.num_paused_requests
        fields["Reused KV cache blocks"] = self.num_reused_blocks
        fields["Fraction used KV cache blocks"] = self.used_fraction
        fields["Runtime CPU Memory Usage"] = memory.cpu
        fields["Runtime GPU Memory Usage"] = memory.gpu
        fields["Runtime Pinned Memory Usage"] = memory.pinned
        # Fields of disaggregated serving, which this server does not have.
        fields |= {"KV cache transfer time": 0, "Request count": 0}
        return fields

    def _common(self) -> dict[str, int]:
        return {
            "Iteration Counter": self.iteration,
            "Active Request Count": self.num_active_requests,
            "Max Request Count": self.max_num_requests,
        }

    def _kv_cache(self) -> dict[str, int]:
        return {
            "Max KV cache blocks": self.max_num_blocks,
            "Free KV cache blocks": self.num_free_blocks,
            "Used KV cache blocks": self.num_used_blocks,
            "Tokens per KV cache block": self.tokens_per_block,
        }

    def _batching(self) -> dict[str, int]:
        if (static := self.static_batch) is not None:
            return {
                "Scheduled Requests": self.num_batched_requests,
                "Context Requests": self.num_context_requests,
                "Total Generation Tokens": static.num_generation_tokens,
                "Total Context Tokens": static.num_context_tokens,
                "Empty Generation Slots": static.num_empty_slots,
            }
        return {
            "Scheduled Requests": self.num_scheduled_requests,
            "Context Requests": self.num_context_requests,
            "Generation Requests": self.num_generation_requests,
            "Total Context Tokens": self.num_context_tokens,
            "MicroBatch ID": self.micro_batch_id,
        }


@dataclass(frozen=True, slots=True)
class KvChanges:
    """By how much the counts of KV blocks grew from one kept iteration to the next.

    Attributes:
        num_taken, num_generation, num_reused, num_partly_reused, num_missed, num_copied: Blocks as in
            `IterationCounts`.
        copied_bytes: Bytes of the copied blocks.
        num_offloaded, offloaded_bytes: Blocks copied from the device's cache to the block store.
        num_onboarded, onboarded_bytes: Blocks copied from the block store to the device's cache.
        num_host_dropped, host_dropped_bytes: Blocks dropped from host memory.
    """

    num_taken: int = 0
    num_reused: int = 0
    num_missed: int = 0
    num_offloaded: int = 0
    offloaded_bytes: int = 0
    num_onboarded: int = 0
    onboarded_bytes: int = 0
    num_host_dropped: int = 0
    host_dropped_bytes: int = 0
    num_generation: int = 0
    num_partly_reused: int = 0
    num_copied: int = 0
    copied_bytes: int = 0


def kv_changes(now: IterationCounts, before: IterationCounts | None, block_bytes: int = 0) -> KvChanges:
    """Return by how much the counts of KV blocks grew from `before` to `now`; None: since the start.

    `block_bytes` is the size of a block on the device.
    """
    totals = _kv_totals(now)
    if before is not None:
        totals = tuple(new - old for new, old in zip(totals, _kv_totals(before), strict=True))
    return KvChanges(*totals, copied_bytes=totals[-1] * block_bytes)


def _kv_totals(stats: IterationCounts) -> tuple[int, ...]:
    """Return the counts since the start, in the order of `KvChanges`, without the last."""
    store = stats.block_store
    host = store.tier(HOST)
    return (
        stats.num_taken_blocks,
        stats.num_reused_blocks,
        stats.num_missed_blocks,
        store.num_saved,
        store.saved_bytes,
        store.num_loaded,
        store.loaded_bytes,
        host.num_dropped,
        host.dropped_bytes,
        stats.num_generation_blocks,
        stats.num_partly_reused_blocks,
        stats.num_copied_blocks,
    )


@dataclass(frozen=True, slots=True)
class KeptIteration:
    """The statistics of one iteration.

    Attributes:
        stats: The statistics.
        wall_clock_s: The time when they were taken, in seconds since the epoch.
        kv: Changes since the iteration that was kept before; None: unknown.
    """

    stats: IterationCounts
    wall_clock_s: float
    kv: KvChanges | None = None


class RequestStage(Enum):
    """TensorRT-LLM's `RequestStage`, with the same names and numbers.

    The stage of encoders does not occur, as no supported model has an encoder.
    """

    QUEUED = 0
    ENCODER_IN_PROGRESS = 1
    CONTEXT_IN_PROGRESS = 2
    GENERATION_IN_PROGRESS = 3
    GENERATION_COMPLETE = 4

    def __int__(self) -> int:
        return self.value

    def __index__(self) -> int:
        return self.value


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """One sequence after an iteration, as in the Executor's `RequestStats`.

    Attributes:
        request_id, sequence_index: The sequence's ids.
        stage: The sequence's phase.
        context_prefill_position: Number of computed prompt tokens.
        num_generated_tokens: Number of tokens generated so far.
        num_generation_iterations: Number of iterations in which the sequence got tokens.
        is_scheduled: Whether the sequence was in this iteration's batch.
        is_paused: Whether the sequence is paused.
        num_new_blocks, num_reused_blocks, num_missed_blocks: Numbers of KV blocks taken, found in the
            cache, and not found, for the tokens known when the sequence started or resumed.
    """

    request_id: int
    sequence_index: int
    stage: RequestStage
    context_prefill_position: int
    num_generated_tokens: int
    num_generation_iterations: int
    is_scheduled: bool
    is_paused: bool
    num_new_blocks: int
    num_reused_blocks: int
    num_missed_blocks: int


@dataclass(frozen=True, slots=True)
class RequestCountsOfIteration:
    """The counters of every sequence after an iteration: the Executor's `RequestStatsPerIteration`."""

    iteration: int
    request_stats: tuple[RequestCounts, ...]


def microseconds(wall_clock_s: float) -> int:
    """Convert seconds since the epoch to whole microseconds."""
    return round(wall_clock_s * 1e6)


def timestamp(wall_clock_s: float) -> str:
    """Return a time, given in seconds since the epoch, as local time in the specification's format, with
    microseconds."""
    whole, fraction = divmod(microseconds(wall_clock_s), 1_000_000)
    return f"{time.strftime(_SECONDS_FORMAT, time.localtime(whole))}.{fraction:06d}"


def hit_rate(num_reused: int, num_missed: int) -> float:
    """Return the fraction of looked-up blocks that were found; 0 if none was looked up."""
    return ratio(num_reused, num_reused + num_missed)


def ratio(count: int, of: int) -> float:
    """Return `count` / `of`; 0 if `of` is 0."""
    return count / of if of else 0.0

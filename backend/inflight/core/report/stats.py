"""Statistics of one iteration: plain counters, and the JSON objects that are made of them.

Keys, their spelling and the timestamp's format are the specification's (The Batch Manager, Statistics); those of
`executor_fields` are the Executor API's `IterationStats` and `RequestStatsPerIteration`.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from enum import Enum

_SECONDS_FORMAT = "%m-%d-%Y %H:%M:%S"
_NS_PER_MS = 1_000_000


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """Memory that the engine's process holds, in bytes.

    Attributes:
        cpu: Memory of the host.
        gpu: Memory of its devices.
        pinned: The part of the host's memory that is locked in place for devices.
    """

    cpu: int = 0
    gpu: int = 0
    pinned: int = 0


@dataclass(frozen=True, slots=True)
class StaticBatchStats:
    """One static batch (V1), from its start until now.

    Attributes:
        num_requests: Sequences that started in it.
        num_slots: Most slots that it had at a time.
        num_context_tokens: Prompt tokens computed.
        num_generation_tokens: Tokens generated.
        num_empty_slots: Slots times iterations in generation that waited for the batch's slowest; with several
            micro-batches, of each one's share of the slots.
    """

    num_requests: int = 0
    num_slots: int = 0
    num_context_tokens: int = 0
    num_generation_tokens: int = 0
    num_empty_slots: int = 0


@dataclass(frozen=True, slots=True)
class IterationStats:
    """Counters after an iteration.

    Attributes:
        iteration: Number of the iteration.
        duration_ns: Duration of the iteration, from getting requests to its responses.
        num_active_requests: Requests without a final response.
        num_completed_requests: Requests whose final response this iteration made.
        num_new_requests: Sequences that started for the first time in this iteration.
        new_requests_queue_ns: Sum of the times that those waited.
        max_num_requests: Most requests that can run at a time.
        max_num_tokens: Most tokens in an iteration.
        max_num_blocks: KV cache blocks.
        num_free_blocks: Blocks that no running request holds; cached ones are among them.
        tokens_per_block: Tokens per block.
        num_scheduled_requests: Requests in this iteration's batch.
        num_context_requests: Those of them in the context phase.
        num_generation_requests: Those of them in the generation phase.
        num_context_tokens: Tokens over the context chunks.
        num_generated_tokens: Tokens that came back in this iteration for sequences that had not ended, end ids
            included.
        num_advanced_sequences: Sequences that got those tokens; a beam search counts as one.
        num_draft_tokens: Draft tokens in this iteration's batch.
        num_accepted_draft_tokens: Draft tokens that were accepted.
        num_drafted_requests: Rows with draft tokens.
        micro_batch_id: Index among the micro-batches in flight.
        num_waiting_requests: Sequences that do not run: never started, or paused.
        num_paused_requests: Pauses in this iteration.
        num_taken_blocks: Blocks taken from the free ones, since the start.
        num_reused_blocks: Blocks that admissions found in the cache, since the start.
        num_missed_blocks: Full blocks that admissions did not find there, since the start.
        static_batch: The static batch so far; None without static batching.
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
    static_batch: StaticBatchStats | None = None

    @property
    def num_used_blocks(self) -> int:
        """Blocks that running requests hold."""
        return self.max_num_blocks - self.num_free_blocks

    @property
    def used_fraction(self) -> float:
        """The part of all blocks that running requests hold, with six decimals."""
        return round(self.num_used_blocks / self.max_num_blocks, 6) if self.max_num_blocks else 0.0

    @property
    def cache_hit_rate(self) -> float:
        """The part of the blocks looked for that were found, since the start."""
        return hit_rate(self.num_reused_blocks, self.num_missed_blocks)

    @property
    def num_batched_requests(self) -> int:
        """Requests of this iteration; with static batching, of the batch it belongs to. 0 when nothing runs."""
        if self.static_batch is None or not self.num_scheduled_requests:
            return self.num_scheduled_requests
        return self.static_batch.num_requests

    # ---------------------------------------------------------------- texts

    def to_json(self, wall_clock_s: float) -> str:
        """The specification's JSON object for the way requests are batched.

        With static batching, numbers of tokens and empty slots are those of the static batch so far.
        `wall_clock_s` is seconds since the epoch.
        """
        stamp = time.strftime(_SECONDS_FORMAT, time.localtime(wall_clock_s))
        return json.dumps({"Timestamp": stamp, **self._common(), **self._kv_cache(), **self._batching()})

    def log_fields(self, wall_clock_s: float, memory: MemoryUsage) -> dict[str, int | float | str]:
        """The line of the server's log: what `to_json` has and what later versions of the specification add.

        Every value but the timestamp is a number.
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
        # These are for disaggregated serving; here context and generation are computed in one place.
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

    def executor_fields(
        self, wall_clock_s: float | None, memory: MemoryUsage | None = None
    ) -> dict[str, object]:
        """The Executor's `IterationStats`, as its JSON serialization has them.

        What does not exist here is null, as its optionals are: cross attention's KV cache, the other kind of
        batching, drafts where there were none. There is no tuner; what it would recommend is 0, as without one.
        Without `wall_clock_s` the timestamp is null, without `memory` its three numbers are 0.
        """
        memory = memory or MemoryUsage()
        return {
            "timestamp": None if wall_clock_s is None else timestamp(wall_clock_s),
            "iter": self.iteration,
            "iterLatencyMS": self.duration_ns / _NS_PER_MS,
            "newActiveRequestsQueueLatencyMS": self.new_requests_queue_ns / _NS_PER_MS,
            "numNewActiveRequests": self.num_new_requests,
            "numActiveRequests": self.num_active_requests,
            "numQueuedRequests": self.num_waiting_requests,
            "numCompletedRequests": self.num_completed_requests,
            "maxNumActiveRequests": self.max_num_requests,
            "maxBatchSizeStatic": self.max_num_requests,
            "maxBatchSizeTunerRecommended": 0,
            "maxBatchSizeRuntime": self.max_num_requests,
            "maxNumTokensStatic": self.max_num_tokens,
            "maxNumTokensTunerRecommended": 0,
            "maxNumTokensRuntime": self.max_num_tokens,
            "gpuMemUsage": memory.gpu,
            "cpuMemUsage": memory.cpu,
            "pinnedMemUsage": memory.pinned,
            "kvCacheStats": self._kv_cache_stats(),
            "crossKvCacheStats": None,
            "staticBatchingStats": self._static_batching_stats(),
            "inflightBatchingStats": self._inflight_batching_stats(),
            "specDecodingStats": self._spec_decoding_stats(),
        }

    def _kv_cache_stats(self) -> dict[str, int | float]:
        return {
            "maxNumBlocks": self.max_num_blocks,
            "freeNumBlocks": self.num_free_blocks,
            "usedNumBlocks": self.num_used_blocks,
            "tokensPerBlock": self.tokens_per_block,
            "allocTotalBlocks": self.num_taken_blocks,
            "allocNewBlocks": self.num_taken_blocks,
            "reusedBlocks": self.num_reused_blocks,
            "missedBlocks": self.num_missed_blocks,
            "cacheHitRate": self.cache_hit_rate,
        }

    def _static_batching_stats(self) -> dict[str, int] | None:
        if (static := self.static_batch) is None:
            return None
        return {
            "numScheduledRequests": self.num_batched_requests,
            "numContextRequests": self.num_context_requests,
            "numCtxTokens": static.num_context_tokens,
            "numGenTokens": static.num_generation_tokens,
            "emptyGenSlots": static.num_empty_slots,
        }

    def _inflight_batching_stats(self) -> dict[str, int | float] | None:
        if self.static_batch is not None:
            return None
        return {
            "numScheduledRequests": self.num_scheduled_requests,
            "numContextRequests": self.num_context_requests,
            "numGenRequests": self.num_generation_requests,
            "numPausedRequests": self.num_paused_requests,
            "numCtxTokens": self.num_context_tokens,
            "microBatchId": self.micro_batch_id,
            "avgNumDecodedTokensPerIter": _per(self.num_generated_tokens, self.num_advanced_sequences),
        }

    def _spec_decoding_stats(self) -> dict[str, int | float] | None:
        """Statistics of drafts, if there were any. Drafts need no pass of their own, so their latency is 0."""
        if not self.num_drafted_requests:
            return None
        num_steps = self.num_drafted_requests
        return {
            "numDraftTokens": self.num_draft_tokens,
            "numAcceptedTokens": self.num_accepted_draft_tokens,
            "numRequestsWithDraftTokens": num_steps,
            "acceptanceLength": (num_steps + self.num_accepted_draft_tokens) / num_steps,
            "iterLatencyMS": 0.0,
            "draftOverhead": 0.0,
        }


@dataclass(frozen=True, slots=True)
class KeptIteration:
    """The statistics of one iteration, with the time when they were taken, in seconds since the epoch."""

    stats: IterationStats
    wall_clock_s: float

    def executor_fields(self, memory: MemoryUsage | None = None) -> dict[str, object]:
        """The Executor's `IterationStats`; `memory` is what the process holds now, 0 without it."""
        return self.stats.executor_fields(self.wall_clock_s, memory)


class RequestStage(Enum):
    """The Executor's `RequestStage`, as far as there are such stages here."""

    QUEUED = "QUEUED"
    CONTEXT_IN_PROGRESS = "CONTEXT_IN_PROGRESS"
    GENERATION_IN_PROGRESS = "GENERATION_IN_PROGRESS"
    GENERATION_COMPLETE = "GENERATION_COMPLETE"


@dataclass(frozen=True, slots=True)
class RequestStats:
    """One sequence after an iteration: the Executor's `RequestStats`.

    Attributes:
        request_id, sequence_index: The sequence.
        stage: Its phase.
        context_prefill_position: Prompt tokens computed.
        num_generated_tokens: Tokens generated so far.
        num_generation_iterations: Iterations that gave it tokens.
        is_scheduled: Whether it was in this iteration's batch.
        is_paused: Whether it is paused.
        num_new_blocks, num_reused_blocks, num_missed_blocks: KV blocks of the tokens it had at its starts.
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

    def executor_fields(self) -> dict[str, object]:
        """The Executor's `RequestStats`. Sequences of one request have its id in common."""
        return {
            "id": self.request_id,
            "stage": self.stage.value,
            "contextPrefillPosition": self.context_prefill_position,
            "numGeneratedTokens": self.num_generated_tokens,
            "avgNumDecodedTokensPerIter": _per(self.num_generated_tokens, self.num_generation_iterations),
            "scheduled": self.is_scheduled,
            "paused": self.is_paused,
            "disServingStats": None,
            "allocTotalBlocksPerRequest": self.num_new_blocks,
            "allocNewBlocksPerRequest": self.num_new_blocks,
            "reusedBlocksPerRequest": self.num_reused_blocks,
            "missedBlocksPerRequest": self.num_missed_blocks,
            "kvCacheHitRatePerRequest": hit_rate(self.num_reused_blocks, self.num_missed_blocks),
        }


@dataclass(frozen=True, slots=True)
class RequestStatsPerIteration:
    """The statistics of every sequence after an iteration: the Executor's type of the same name."""

    iteration: int
    request_stats: tuple[RequestStats, ...]

    def executor_fields(self) -> dict[str, object]:
        """As the Executor's JSON serialization has it; null for what only disaggregated serving has."""
        fields = [stats.executor_fields() for stats in self.request_stats]
        return {"iter": self.iteration, "requestStats": fields}


def microseconds(wall_clock_s: float) -> int:
    """Seconds since the epoch as whole microseconds."""
    return round(wall_clock_s * 1e6)


def timestamp(wall_clock_s: float) -> str:
    """Local time as the specification writes it, with microseconds."""
    whole, fraction = divmod(microseconds(wall_clock_s), 1_000_000)
    return f"{time.strftime(_SECONDS_FORMAT, time.localtime(whole))}.{fraction:06d}"


def hit_rate(num_reused: int, num_missed: int) -> float:
    """The part of what was looked for that was found; 0 if nothing was looked for."""
    return _per(num_reused, num_reused + num_missed)


def _per(count: int, of: int) -> float:
    return count / of if of else 0.0

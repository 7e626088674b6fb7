"""What there is to tell of the scheduler's work: counters of this iteration, and of everything since the start.

Written by the scheduler at the few places where something happens, on the loop thread. What happens to every
row of every iteration is counted in bulk. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from inflight.core.kv.kv_cache_manager import KvCacheManager
from inflight.core.report.metrics import ServiceMetrics, seconds
from inflight.core.report.stats import IterationStats, StaticBatchStats
from inflight.core.request.llm_request import LlmRequest, RequestGroup
from inflight.core.schedule.batch import ContextChunk, ScheduledBatch
from inflight.errors import InflightError


class Observations:
    """The counters.

    Args:
        max_num_requests: Slots.
        max_num_tokens: Most tokens in an iteration.
        counts_static_batches: Whether batching is static.
        num_micro_batches: That share the slots.
    """

    def __init__(
        self,
        max_num_requests: int,
        max_num_tokens: int,
        counts_static_batches: bool,
        num_micro_batches: int = 1,
    ) -> None:
        self.metrics = ServiceMetrics()
        self._max_num_requests = max_num_requests
        self._max_num_tokens = max_num_tokens
        self._num_micro_batches = num_micro_batches
        self._static_batch = StaticBatchStats() if counts_static_batches else None
        # Sequences by the time of their last token, of those that get another one in this update.
        self._gaps: dict[int, int] = {}
        self._num_new_tokens = 0
        self.begin_iteration()

    def begin_iteration(self) -> None:
        """Count from zero what is told per iteration."""
        self._num_new = 0
        self._num_paused = 0
        self._queue_ns = 0
        self._num_completed = 0
        self._num_generated = 0
        self._num_advanced = 0
        self._num_accepted = 0

    # ---------------------------------------------------------------- what happens to requests

    def refused(self, error: InflightError) -> None:
        """A request was turned away."""
        self.metrics.failed[error.code] = self.metrics.failed.get(error.code, 0) + 1

    def started(self, llm_request: LlmRequest, now_ns: int) -> None:
        """A sequence runs for the first time."""
        waited_ns = now_ns - llm_request.group.arrival_ns
        self._num_new += 1
        self._queue_ns += waited_ns
        if not any(sequence.has_started for sequence in llm_request.group.sequences):
            self.metrics.queue_time.observe(seconds(waited_ns))

    def looked_up(self, num_found: int, num_missed: int) -> None:
        """An admission looked for tokens of full blocks in the cache."""
        self.metrics.num_hit_tokens += num_found
        self.metrics.num_missed_tokens += num_missed

    def paused(self, count: int) -> None:
        """So many sequences gave up their blocks for others, in an attempt to make a batch."""
        self._num_paused += count
        self.metrics.num_preemptions += count

    def gets_tokens(self, llm_request: LlmRequest, count: int, num_drafts: int = 0) -> None:
        """A sequence is about to get so many tokens of this update, one of them chosen behind its drafts."""
        last_ns = llm_request.last_token_ns
        self._gaps[last_ns] = self._gaps.get(last_ns, 0) + 1
        self._num_new_tokens += count
        if num_drafts:
            self._num_accepted += count - 1

    def gave_first_token(self, llm_request: LlmRequest, now_ns: int) -> None:
        """A sequence has its first token."""
        if not any(sequence.first_token_ns for sequence in llm_request.group.sequences):
            self.metrics.time_to_first_token.observe(seconds(now_ns - llm_request.group.arrival_ns))

    def updated(self, now_ns: int) -> None:
        """All of an update's tokens are there."""
        for last_ns, count in self._gaps.items():
            if last_ns:
                self.metrics.inter_token_latency.observe(seconds(now_ns - last_ns), count)
        self._num_advanced += sum(self._gaps.values())
        self._gaps.clear()
        self._num_generated += self._num_new_tokens
        if (static := self._static_batch) is not None:
            total = static.num_generation_tokens + self._num_new_tokens
            self._static_batch = replace(static, num_generation_tokens=total)
        self._num_new_tokens = 0

    def sequence_ended(self, llm_request: LlmRequest) -> None:
        """A sequence has a finish reason and holds nothing any more."""
        reason = llm_request.finish_reason
        self.metrics.finished[reason] = self.metrics.finished.get(reason, 0) + 1
        self.metrics.output_tokens.observe(llm_request.num_generated)

    def request_ended(self, group: RequestGroup, now_ns: int) -> None:
        """A request has its final response, and holds nothing any more."""
        self._num_completed += 1
        if group.error is not None:
            self.refused(group.error)
            return
        self.metrics.prompt_tokens.observe(group.request.prompt_length)
        self.metrics.end_to_end.observe(seconds(now_ns - group.arrival_ns))
        if group.stop_requested_ns:
            self.metrics.cancel_to_free.observe(seconds(now_ns - group.stop_requested_ns))

    # ---------------------------------------------------------------- static batches

    def count_static(self, batch: ScheduledBatch, is_new: bool, num_slots: int) -> None:
        """One more iteration of a static batch, which has `num_slots` slots now; or the first of a new one."""
        if self._static_batch is None:
            return
        before = StaticBatchStats() if is_new else self._static_batch
        generates = bool(batch.generation_slots) or any(chunk.is_generation for chunk in batch.context)
        most_slots = max(before.num_slots, num_slots)
        share = -(-most_slots // self._num_micro_batches)
        self._static_batch = replace(
            before,
            num_requests=before.num_requests + len(batch.starts),
            num_slots=most_slots,
            num_context_tokens=before.num_context_tokens + _context_tokens(batch.context),
            num_empty_slots=before.num_empty_slots + (max(0, share - batch.num_rows) if generates else 0),
        )

    # ---------------------------------------------------------------- what is told

    def iteration_stats(
        self,
        batch: ScheduledBatch | None,
        iteration: int,
        duration_ns: int,
        num_active: int,
        num_waiting: int,
        kv_cache: KvCacheManager,
    ) -> IterationStats:
        """Counters after the iteration that ran `batch`."""
        context = [chunk for chunk in batch.context if not chunk.is_generation] if batch else []
        num_scheduled = (
            batch.num_rows - sum(len(group.slots) - 1 for group in batch.beam_groups) if batch else 0
        )
        return IterationStats(
            iteration=iteration,
            duration_ns=duration_ns,
            num_active_requests=num_active,
            num_completed_requests=self._num_completed,
            num_new_requests=self._num_new,
            new_requests_queue_ns=self._queue_ns,
            max_num_requests=self._max_num_requests,
            max_num_tokens=self._max_num_tokens,
            max_num_blocks=kv_cache.pool.num_blocks,
            num_free_blocks=kv_cache.pool.num_free,
            tokens_per_block=kv_cache.tokens_per_block,
            num_scheduled_requests=num_scheduled,
            num_context_requests=len(context),
            num_generation_requests=num_scheduled - len(context),
            num_context_tokens=_context_tokens(context),
            num_generated_tokens=self._num_generated,
            num_advanced_sequences=self._num_advanced,
            num_draft_tokens=sum(chunk.num_draft_tokens for chunk in batch.context) if batch else 0,
            num_accepted_draft_tokens=self._num_accepted,
            num_drafted_requests=sum(chunk.num_draft_tokens > 0 for chunk in batch.context) if batch else 0,
            micro_batch_id=batch.micro_batch_id if batch else 0,
            num_waiting_requests=num_waiting,
            num_paused_requests=self._num_paused,
            num_taken_blocks=kv_cache.num_taken_blocks,
            num_reused_blocks=kv_cache.num_reused_blocks,
            num_missed_blocks=kv_cache.num_missed_blocks,
            static_batch=self._static_batch,
        )


def _context_tokens(chunks: Sequence[ContextChunk]) -> int:
    return sum(len(chunk.token_ids) - chunk.num_draft_tokens for chunk in chunks if not chunk.is_generation)

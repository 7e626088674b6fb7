"""What the scheduler is doing, for people: who waits and why, who runs and how far, where the blocks are.

Reads everything and changes nothing. Called between two iterations, on the loop thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from inflight.config import CapacitySchedulerPolicy
from inflight.core.kv.kv_cache_manager import KvCacheManager
from inflight.core.recover.isolation import Isolation
from inflight.core.report.state import BlockMapState, RunningState, SchedulerState, WaitingState
from inflight.core.report.stats import RequestStage, RequestStats
from inflight.core.request.llm_request import LlmRequest, RequestGroup, RequestState
from inflight.core.schedule.admission import Admission
from inflight.core.schedule.batch import ScheduledBatch
from inflight.core.schedule.running import Running

_NS_PER_MS = 1_000_000


@dataclass(frozen=True, slots=True)
class Introspection:
    """The scheduler's parts, to look at."""

    policy: CapacitySchedulerPolicy
    iteration: int
    now_ns: int
    groups: Iterable[RequestGroup]
    admission: Admission
    running: Running
    kv_cache: KvCacheManager
    isolation: Isolation

    def state(self) -> SchedulerState:
        """Everything."""
        return SchedulerState(
            iteration=self.iteration,
            policy=self.policy.value,
            slots=self.running.slots.count,
            free_slots=self.running.slots.num_free,
            suspects=self.isolation.suspects,
            waiting=tuple(
                self._waiting(r, self._why(r, place))
                for place, r in enumerate(self.admission.waiting.in_order())
            )
            + tuple(self._waiting(r, _BEHIND_SIBLING) for r in self._siblings_to_come()),
            running=tuple(map(self._running, self.running.sequences)),
            blocks=self._blocks(),
        )

    def _why(self, llm_request: LlmRequest, place: int) -> str:
        """Of the first ones exactly, which takes digests of whole prompts: the loop waits for this."""
        if place >= _MOST_LOOKED_UP:
            return f"is behind {place} others"
        return self.admission.why_waiting(llm_request, self.isolation.retrying)

    def _siblings_to_come(self) -> Iterable[LlmRequest]:
        for group in self.groups:
            if not group.has_context:
                yield from (r for r in group.sequences if r.state is RequestState.WAITING and not r.leads)

    def _waiting(self, llm_request: LlmRequest, why: str) -> WaitingState:
        request = llm_request.request
        return WaitingState(
            request_id=llm_request.request_id,
            sequence_index=llm_request.sequence_index,
            state=llm_request.state.name,
            why=why,
            prompt_tokens=llm_request.prompt_length,
            generated_tokens=llm_request.num_generated,
            max_new_tokens=request.max_new_tokens,
            priority=request.priority,
            client_id=request.client_id,
            waited_ms=self._since_ms(llm_request.group.arrival_ns),
            deadline_ms=self._deadline_ms(llm_request),
        )

    def _running(self, llm_request: LlmRequest) -> RunningState:
        blocks, reserved = self.kv_cache.held(llm_request.key)
        ending = llm_request.state is RequestState.FINISHED
        # What is in flight is not done: the iteration that computes the last of it may be the one that hangs.
        in_context = llm_request.num_computed_tokens < llm_request.context_length
        return RunningState(
            request_id=llm_request.request_id,
            sequence_index=llm_request.sequence_index,
            slots=llm_request.slots,
            phase="ending" if ending else "context" if in_context else "generation",
            computed_tokens=llm_request.num_computed_tokens,
            scheduled_tokens=llm_request.num_scheduled_tokens,
            context_tokens=llm_request.context_length,
            generated_tokens=llm_request.num_generated,
            max_new_tokens=llm_request.request.max_new_tokens,
            blocks=blocks,
            reserved_blocks=reserved,
            running_ms=self._since_ms(llm_request.first_scheduled_ns),
            deadline_ms=self._deadline_ms(llm_request),
        )

    def _blocks(self) -> BlockMapState:
        pool = self.kv_cache.pool
        return BlockMapState(
            total=pool.num_blocks,
            held=pool.num_held,
            cached=pool.num_cached,
            empty=pool.num_empty,
            reserved=self.kv_cache.num_reserved,
            shared=pool.num_shared,
            tokens_per_block=self.kv_cache.tokens_per_block,
        )

    def _since_ms(self, time_ns: int) -> float:
        return round((self.now_ns - time_ns) / _NS_PER_MS, 3)

    def _deadline_ms(self, llm_request: LlmRequest) -> float | None:
        deadline_ns = llm_request.group.deadline_ns
        return -self._since_ms(deadline_ns) if deadline_ns else None

    def request_stats(self, batch: ScheduledBatch | None) -> tuple[RequestStats, ...]:
        """Every sequence that has not had its last response, after the iteration that ran `batch`."""
        slots = (*(c.slot for c in batch.context), *batch.generation_slots) if batch else ()
        owners = self.running.slots.owners
        scheduled = {owners[slot].key for slot in slots if slot in owners}
        return tuple(
            self._request_stats(llm_request, llm_request.key in scheduled)
            for group in self.groups
            for llm_request in group.sequences
            if llm_request.slots or llm_request.state is not RequestState.FINISHED
        )

    def _request_stats(self, llm_request: LlmRequest, is_scheduled: bool) -> RequestStats:
        blocks = self.running.block_counts(llm_request)
        return RequestStats(
            request_id=llm_request.request_id,
            sequence_index=llm_request.sequence_index,
            stage=_stage(llm_request),
            context_prefill_position=min(llm_request.num_computed_tokens, llm_request.prompt_length),
            num_generated_tokens=llm_request.num_generated,
            num_generation_iterations=llm_request.num_iterations,
            is_scheduled=is_scheduled,
            is_paused=llm_request.state is RequestState.PAUSED,
            num_new_blocks=blocks.new,
            num_reused_blocks=blocks.reused,
            num_missed_blocks=blocks.missed,
        )


_MOST_LOOKED_UP = 32
_BEHIND_SIBLING = "is behind its request's first sequence, which computes the prompt for all"


def _stage(llm_request: LlmRequest) -> RequestStage:
    if llm_request.state is RequestState.FINISHED:
        return RequestStage.GENERATION_COMPLETE
    if llm_request.state is not RequestState.RUNNING:
        return RequestStage.QUEUED
    if llm_request.num_computed_tokens < llm_request.context_length:
        return RequestStage.CONTEXT_IN_PROGRESS
    return RequestStage.GENERATION_IN_PROGRESS

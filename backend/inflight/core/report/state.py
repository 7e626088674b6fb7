"""The scheduler's current state, for answers to `state` requests, and the statistics of every request.

`Introspection` reads the scheduler's parts between two iterations, on the loop thread, and changes nothing. It
returns frozen values, which other modules convert to JSON.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from inflight.config import CapacityPolicy
from inflight.core.kv.kv_cache_manager import KvCacheManager
from inflight.core.recover.recovery import Isolation
from inflight.core.report.metrics import adapter_stats
from inflight.core.report.stats import AdapterStats, RequestCounts, RequestStage
from inflight.core.request.llm_request import LlmRequest, RequestGroup, RequestState
from inflight.core.schedule.admission import Admission
from inflight.core.schedule.batch import ScheduledBatch
from inflight.core.schedule.running import Running

_NS_PER_MS = 1_000_000


@dataclass(frozen=True, slots=True)
class WaitingState:
    """A waiting sequence, as the state view reports it.

    Attributes:
        request_id: The engine's id of the request.
        sequence_index: Index among the request's sequences.
        state: "WAITING", or "PAUSED" if it ran before.
        why: The reason why it waits, such as "needs 12 blocks, 7 free".
        prompt_tokens: Number of tokens of the prompt.
        generated_tokens: Number of tokens generated before the sequence was paused.
        max_new_tokens: Maximum number of tokens to generate.
        priority, client_id: The request's priority and client id.
        waited_ms: Milliseconds since the request's arrival.
        deadline_ms: Milliseconds until the request times out; None without a deadline.
    """

    request_id: int
    sequence_index: int
    state: str
    why: str
    prompt_tokens: int
    generated_tokens: int
    max_new_tokens: int
    priority: float
    client_id: int
    waited_ms: float
    deadline_ms: float | None


@dataclass(frozen=True, slots=True)
class RunningState:
    """A sequence that has slots.

    Attributes:
        request_id, sequence_index: The sequence's ids.
        slots: The sequence's slots; a beam search has several.
        phase: "context", "generation", or "ending" for a sequence that has ended and has rows in flight.
        computed_tokens: Number of tokens whose keys and values are in the cache.
        scheduled_tokens: Number of tokens in flight.
        context_tokens: Number of tokens to compute as context since the last start or resumption.
        generated_tokens: Number of tokens generated so far.
        max_new_tokens: Maximum number of tokens to generate.
        blocks: Number of KV blocks in the sequence's block tables.
        reserved_blocks: Number of further KV blocks that are reserved for the sequence.
        running_ms: Milliseconds since the sequence's first iteration.
        deadline_ms: Milliseconds until the request times out; None without a deadline.
    """

    request_id: int
    sequence_index: int
    slots: tuple[int, ...]
    phase: str
    computed_tokens: int
    scheduled_tokens: int
    context_tokens: int
    generated_tokens: int
    max_new_tokens: int
    blocks: int
    reserved_blocks: int
    running_ms: float
    deadline_ms: float | None


@dataclass(frozen=True, slots=True)
class BlockMapState:
    """The numbers of KV blocks by state.

    Attributes:
        total: Number of blocks.
        held: Blocks in block tables of running sequences.
        cached: Unreferenced blocks that can be found by content; they are evicted when needed.
        empty: Unreferenced blocks without usable content.
        reserved: Cached and empty blocks that running sequences have reserved.
        shared: Held blocks that are in more than one block table.
        tokens_per_block: Tokens per block.
    """

    total: int
    held: int
    cached: int
    empty: int
    reserved: int
    shared: int
    tokens_per_block: int


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """The state of the scheduler.

    Attributes:
        iteration: Number of the last iteration.
        policy: The capacity scheduler policy.
        slots: Number of slots.
        free_slots: Number of slots that are free.
        generated_tokens: Tokens generated since the start, end ids included.
        suspects: Requests that are retried separately because an iteration with them failed.
        waiting: Sequences that wait, in the order in which they will start.
        running: The sequences that have slots, oldest first.
        blocks: The numbers of KV blocks by state.
        adapters: Numbers of LoRA adapters, stored and on the device.
    """

    iteration: int
    policy: str
    slots: int
    free_slots: int
    generated_tokens: int
    suspects: tuple[int, ...]
    waiting: tuple[WaitingState, ...]
    running: tuple[RunningState, ...]
    blocks: BlockMapState
    adapters: AdapterStats = field(default_factory=AdapterStats)


@dataclass(frozen=True, slots=True)
class Introspection:
    """The scheduler's parts, and the functions that read state and statistics from them.

    `num_adapters` is the number of stored adapters, `num_generated` the number of tokens generated since the
    start.
    """

    policy: CapacityPolicy
    iteration: int
    now_ns: int
    groups: Iterable[RequestGroup]
    admission: Admission
    running: Running
    kv_cache: KvCacheManager
    isolation: Isolation
    num_adapters: int
    num_generated: int

    def state(self) -> SchedulerState:
        """Return the current state of the scheduler."""
        return SchedulerState(
            iteration=self.iteration,
            policy=self.policy.value,
            slots=self.running.slots.count,
            free_slots=self.running.slots.num_free,
            generated_tokens=self.num_generated,
            suspects=self.isolation.suspects,
            waiting=tuple(
                self._waiting(r, self._why(r, place))
                for place, r in enumerate(self.admission.waiting.in_order())
            )
            + tuple(self._waiting(r, _BEHIND_SIBLING) for r in self._siblings_to_come())
            + tuple(
                self._waiting(llm_request, _why_held(group))
                for group in self.admission.held.values()
                for llm_request in group.sequences
                if llm_request.state is RequestState.WAITING
            ),
            running=tuple(map(self._running, self.running.sequences)),
            blocks=self._blocks(),
            adapters=adapter_stats(self.num_adapters, self.running.adapter_pages),
        )

    def _why(self, llm_request: LlmRequest, place: int) -> str:
        """Return why a sequence waits.

        The reason is exact only for the first sequences in the queue, as it takes digests of whole prompts.
        """
        if place >= _MAX_LOOKED_UP:
            return f"is behind {place} others"
        return self.admission.why_waiting(llm_request, self.isolation.retrying)

    def _siblings_to_come(self) -> Iterable[LlmRequest]:
        for group in self.groups:
            if not (group.has_context or group.is_held):
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
        # Rows in flight are not counted as computed: their iteration may hang.
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

    def request_stats(self, batch: ScheduledBatch | None) -> tuple[RequestCounts, ...]:
        """Return statistics of every unfinished sequence after the iteration that ran `batch`."""
        slots = (*(c.slot for c in batch.context), *batch.generation_slots) if batch else ()
        owners = self.running.slots.owners
        scheduled = {owners[slot].key for slot in slots if slot in owners}
        return tuple(
            self._request_stats(llm_request, llm_request.key in scheduled)
            for group in self.groups
            for llm_request in group.sequences
            if llm_request.slots or llm_request.state is not RequestState.FINISHED
        )

    def _request_stats(self, llm_request: LlmRequest, is_scheduled: bool) -> RequestCounts:
        blocks = self.running.block_counts(llm_request)
        return RequestCounts(
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


_MAX_LOOKED_UP = 32
_BEHIND_SIBLING = "waits for its request's first sequence, which computes the prompt for all"


def _why_held(group: RequestGroup) -> str:
    """Return why a request is held outside of the queue."""
    missing: list[str] = []
    if group.awaits_guide:
        missing.append("its guide (guided_decoding_guide) is being compiled")
    if group.awaits_adapter and group.request.lora is not None:
        missing.append(f"its adapter {group.request.lora.label} (lora_task_id) is being fetched")
    return ", and ".join(missing)


def _stage(llm_request: LlmRequest) -> RequestStage:
    if llm_request.state is RequestState.FINISHED:
        return RequestStage.GENERATION_COMPLETE
    if llm_request.state is not RequestState.RUNNING:
        return RequestStage.QUEUED
    if llm_request.num_computed_tokens < llm_request.context_length:
        return RequestStage.CONTEXT_IN_PROGRESS
    return RequestStage.GENERATION_IN_PROGRESS

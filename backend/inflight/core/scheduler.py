"""The batcher's brain: owns every request's state and the waiting queue, and makes the batches.

One iteration is `accept` (what is new), `schedule` (what runs), then, when the device has answered, `update` (what
came of it). `schedule` may be called again before an earlier batch's `update`; rows in flight are counted in
num_scheduled_tokens, and rows that depend on what came of them wait. Blocks and slots of a request that ends
meanwhile stay until its last batch is back.

Every method that can end requests returns responses, and a request's blocks are free before its final response
is among them. Deterministic: a function of the calls alone. Called by the loop thread only.
"""

from __future__ import annotations

from collections import OrderedDict

from inflight.core.batch import (
    BeamCandidates,
    EngineLimits,
    ModelOutput,
    ScheduledBatch,
    SlotStart,
    TokenDetails,
)
from inflight.core.batch_builder import BatchBuilder
from inflight.core.capacity_scheduler import make_capacity_scheduler
from inflight.core.config import SchedulerConfig
from inflight.core.kv_cache_manager import ROOT_SCOPE, KvCacheManager, PrefixMatch, private_scope
from inflight.core.llm_request import LlmRequest, RequestGroup, RequestState
from inflight.core.micro_batch_scheduler import MicroBatchScheduler
from inflight.core.progress import advance_beams, append_tokens, confirm_chunk, keep_context
from inflight.core.request import IterationInput, Request
from inflight.core.response import Response
from inflight.core.results import make_result
from inflight.core.slots import Slots
from inflight.core.stats import IterationStats
from inflight.core.stop import FINISH_REASON_OF_STOP, FinishReason, StopSignal
from inflight.errors import AlreadyExists, InflightError, RequestError


class Scheduler:
    """In-flight batching over one engine's slots and KV blocks."""

    def __init__(self, config: SchedulerConfig, limits: EngineLimits) -> None:
        config.validate(limits)
        self.limits = config.model_limits(limits)
        self.kv_cache = KvCacheManager(limits.num_blocks, limits.tokens_per_block)
        self._config = config
        self._capacity = make_capacity_scheduler(config.policy)
        self._micro_batch = MicroBatchScheduler(
            config.max_num_tokens, limits.tokens_per_block, config.enable_chunked_context
        )
        self._groups: dict[int, RequestGroup] = {}  # by request id
        # By key: what is to start next comes first. Paused sequences and siblings of a computed prompt go to the
        # front, new requests to the end.
        self._waiting: OrderedDict[int, LlmRequest] = OrderedDict()
        self._running: list[LlmRequest] = []  # in order of admission
        self._slots = Slots(limits.max_num_sequences)
        self._next_key = 0
        self._iteration = 0
        self._now_ns = 0
        self._num_paused = 0

    @property
    def num_active(self) -> int:
        """Requests without a final response."""
        return len(self._groups)

    def is_active(self, request_id: int) -> bool:
        """Whether a request of this id has been accepted and has no final response yet."""
        return request_id in self._groups

    @property
    def room(self) -> int:
        """How many more requests can be accepted; negative means any number."""
        bound = self._config.max_num_requests
        return -1 if bound < 0 else max(0, bound - len(self._groups))

    # ---------------------------------------------------------------- what is new

    def accept(self, inputs: IterationInput) -> list[Response]:
        """Queue new requests, end stopped ones; refused requests are answered at once."""
        self._iteration, self._now_ns = inputs.iteration, inputs.now_ns
        responses = []
        for request in inputs.new_requests:
            error = self._refusal(request)
            if error is None:
                self._queue(request)
            else:
                responses.append(Response(request.request_id, error=error, is_final=True))
        for stop in inputs.stops:
            responses.extend(self._stop(stop))
        return responses

    def _refusal(self, request: Request) -> RequestError | None:
        if request.request_id in self._groups:
            return AlreadyExists(
                f"requestId {request.request_id} is already in progress, request is ignored."
            )
        try:
            request.validate(self.limits)
        except RequestError as error:
            return error
        return None

    def _queue(self, request: Request) -> None:
        """The first sequence waits for room; its siblings wait for the prompt that it computes for all."""
        group = RequestGroup(request, self._next_key, self._scope(request))
        self._next_key += len(group.sequences)
        self._groups[request.request_id] = group
        first = group.sequences[0]
        self._waiting[first.key] = first

    def _scope(self, request: Request) -> bytes | None:
        if self._config.enable_kv_cache_reuse:
            return ROOT_SCOPE
        return private_scope(self._next_key) if request.sampling.num_sequences > 1 else None

    def _stop(self, stop: StopSignal) -> list[Response]:
        group = self._groups.get(stop.request_id)
        responses: list[Response] = []
        for llm_request in group.sequences if group else ():
            meant = stop.sequence_index in (None, llm_request.sequence_index)
            if meant and llm_request.state is not RequestState.FINISHED:
                responses += self._finish(llm_request, FINISH_REASON_OF_STOP[stop.reason])
        return responses

    # ---------------------------------------------------------------- what runs

    def schedule(self) -> ScheduledBatch | None:
        """The next batch, or None when nothing can run before an update or a new request."""
        growth = self._capacity.plan_growth(self._running, self.kv_cache)
        self._num_paused = len(growth.paused)
        for llm_request in growth.paused:
            self._pause(llm_request)
        batch = BatchBuilder()
        self._admit(growth.num_blocks, batch)
        selected = self._micro_batch.select(self._running)
        for llm_request, num_tokens in selected.context:
            end = llm_request.next_position + num_tokens
            batch.append_blocks(llm_request.slots[0], self.kv_cache.extend(llm_request.key, end))
            batch.add_chunk(llm_request, num_tokens)
            llm_request.num_scheduled_tokens += num_tokens
        self._grow_generation(selected.generation, selected.num_free_rows, batch)
        if batch.is_empty:
            assert not batch.starts, "a request was admitted that cannot run"
            return None
        return batch.build(self._iteration, self._slots.collect_released())

    def _admit(self, claimed_blocks: int, batch: BatchBuilder) -> None:
        """Start waiting sequences, in order, while slots and blocks beyond `claimed_blocks` last."""
        while self._waiting:
            llm_request = next(iter(self._waiting.values()))
            if llm_request.num_slots > self._slots.num_free:
                return
            num_blocks = self._capacity.blocks_to_reserve(llm_request, self.kv_cache.tokens_per_block)
            match = self._match_prefix(llm_request)
            needed = self.kv_cache.blocks_to_admit(match, num_blocks)
            if needed > self.kv_cache.num_unreserved - claimed_blocks:
                return
            del self._waiting[llm_request.key]
            self.kv_cache.admit(llm_request.key, match, num_blocks, llm_request.scope)
            self._start(llm_request, len(match.block_ids) * self.kv_cache.tokens_per_block, batch)

    def _match_prefix(self, llm_request: LlmRequest) -> PrefixMatch:
        computes_all = llm_request.sequence_index == 0 and llm_request.group.lacks_context
        scope = None if computes_all else llm_request.scope
        return self.kv_cache.match_prefix(llm_request.key, llm_request.tokens, scope)

    def _start(self, llm_request: LlmRequest, num_reused_tokens: int, batch: BatchBuilder) -> None:
        slots = self._slots.take(llm_request, llm_request.num_slots)
        llm_request.start(slots, num_reused_tokens)
        llm_request.next_block_end = num_reused_tokens + self.kv_cache.tokens_per_block
        llm_request.first_scheduled_ns = llm_request.first_scheduled_ns or self._now_ns
        self._running.append(llm_request)
        request = llm_request.request
        token_ids = tuple(llm_request.tokens) if request.looks_back else ()
        batch.starts.append(SlotStart(slots[0], request, llm_request.sequence_index, token_ids))
        batch.append_blocks(slots[0], self.kv_cache.block_table(llm_request.key))

    def _grow_generation(self, selected: list[LlmRequest], num_free_rows: int, batch: BatchBuilder) -> None:
        """Rows of the sequences that generate; one that lacks a block is left out of this iteration."""
        kv_cache, size = self.kv_cache, self.kv_cache.tokens_per_block
        for llm_request in selected:
            position = llm_request.num_computed_tokens + llm_request.num_scheduled_tokens
            if llm_request.beams is not None:
                growth = kv_cache.grow_beams(llm_request.key, position + 1)
                batch.add_beams(llm_request.slots, llm_request.beams, growth)
                llm_request.num_scheduled_tokens += 1
                continue
            if position % size == 0:
                if kv_cache.missing_blocks(llm_request.key, position + 1) > kv_cache.num_unreserved:
                    continue
                batch.append_blocks(llm_request.slots[0], kv_cache.extend(llm_request.key, position + 1))
            if llm_request.lookup is not None and (draft := self._look_up(llm_request, num_free_rows)):
                num_free_rows -= len(draft)
                end = position + 1 + len(draft)
                batch.append_blocks(llm_request.slots[0], kv_cache.extend(llm_request.key, end))
                batch.add_draft(llm_request, draft)
                llm_request.num_scheduled_tokens += 1 + len(draft)
                continue
            llm_request.num_scheduled_tokens += 1
            batch.generation_slots.append(llm_request.slots[0])

    def _look_up(self, llm_request: LlmRequest, num_free_rows: int) -> tuple[int, ...]:
        """Draft tokens as far as there are rows, room in its own blocks and tokens to go."""
        request = llm_request.request
        room = self.kv_cache.num_certain_tokens(llm_request.key) - len(llm_request.tokens)
        left = request.max_new_tokens - llm_request.num_generated - 1
        most = min(request.prompt_lookup_num_tokens, num_free_rows, room, left)
        return llm_request.lookup.propose(most) if llm_request.lookup and most > 0 else ()

    def _pause(self, llm_request: LlmRequest) -> None:
        self._leave_slots(llm_request)
        self._running.remove(llm_request)
        llm_request.pause()
        self._wait_in_front(llm_request)

    def _wait_in_front(self, llm_request: LlmRequest) -> None:
        self._waiting[llm_request.key] = llm_request
        self._waiting.move_to_end(llm_request.key, last=False)

    # ---------------------------------------------------------------- what came of it

    def update(self, batch: ScheduledBatch, output: ModelOutput, now_ns: int = 0) -> list[Response]:
        """Take a batch's tokens: append, stop or go on, publish filled blocks, respond.

        Args:
            batch: What ran.
            output: What the device made of it.
            now_ns: When that was known; the clock of `IterationInput.now_ns`.
        """
        self._now_ns = now_ns or self._now_ns
        responses: list[Response] = []
        new_tokens = iter(output.token_ids)
        details = output.details
        for chunk in batch.context:
            llm_request = self._slots.owners[chunk.slot]
            tokens = next(new_tokens) if chunk.is_last else ()
            confirm_chunk(llm_request, chunk, len(tokens))
            if chunk.wants_context:
                keep_context(llm_request, chunk, output.context[chunk.slot])
            if chunk.is_last and not chunk.is_generation:
                self._start_siblings(llm_request)
            self._advance(llm_request, tokens, details.get(chunk.slot), responses)
        for slot in batch.generation_slots:
            llm_request = self._slots.owners[slot]
            tokens = next(new_tokens)
            if llm_request.beams is None:
                llm_request.num_scheduled_tokens -= 1
                llm_request.num_computed_tokens += 1
                self._advance(llm_request, tokens, details.get(slot) if details else None, responses)
        for group, candidates in zip(batch.beam_groups, output.beams, strict=True):
            # A search that had ended before its context came back has left its slots by now.
            if (search := self._slots.owners.get(group.slots[0])) is not None:
                self._advance_beams(search, len(group.slots), candidates, responses)
        return responses

    def _advance(
        self,
        llm_request: LlmRequest,
        new_tokens: tuple[int, ...],
        details: TokenDetails | None,
        responses: list[Response],
    ) -> None:
        if llm_request.state is RequestState.FINISHED:  # its batch was in flight when it ended
            responses += self._drain(llm_request)
            return
        reason = append_tokens(llm_request, new_tokens, details, self._now_ns)
        if llm_request.num_computed_tokens >= llm_request.next_block_end:
            self._publish(llm_request)
        if reason is not FinishReason.NOT_FINISHED:
            responses += self._finish(llm_request, reason)
        elif new_tokens and llm_request.request.streaming:
            responses.append(self._respond(llm_request))

    def _publish(self, llm_request: LlmRequest) -> None:
        """Let others find the blocks that have become full."""
        num_tokens = min(llm_request.num_computed_tokens, len(llm_request.tokens))
        if llm_request.scope is not None:
            self.kv_cache.publish(llm_request.key, llm_request.tokens, num_tokens)
        size = self.kv_cache.tokens_per_block
        llm_request.next_block_end = (num_tokens // size + 1) * size

    def _advance_beams(
        self, llm_request: LlmRequest, num_rows: int, candidates: BeamCandidates, responses: list[Response]
    ) -> None:
        if num_rows > 1:  # else it was its context, which is confirmed
            llm_request.num_scheduled_tokens -= 1
            llm_request.num_computed_tokens += 1
        if llm_request.state is RequestState.FINISHED:
            responses += self._drain(llm_request)
            return
        reason = advance_beams(llm_request, candidates, self._now_ns)
        if reason is not FinishReason.NOT_FINISHED:
            responses += self._finish(llm_request, reason)
            return
        if llm_request.beams is not None:
            self.kv_cache.reorder_beams(llm_request.key, llm_request.beams.parents)
        if llm_request.request.streaming:
            responses.append(self._respond(llm_request))

    def _start_siblings(self, llm_request: LlmRequest) -> None:
        """The prompt is computed: the request's other sequences find its full blocks and go on from there."""
        if llm_request.sequence_index == 0 and llm_request.state is RequestState.RUNNING:
            for sibling in reversed(llm_request.group.sequences[1:]):
                if sibling.state is RequestState.WAITING:
                    self._wait_in_front(sibling)

    def fail(self, batch: ScheduledBatch, error: InflightError) -> list[Response]:
        """End every request of a batch whose forward pass or decoding raised; the others go on."""
        for chunk in batch.context:
            self._slots.owners[chunk.slot].num_scheduled_tokens -= len(chunk.token_ids)
        failed = {chunk.slot: self._slots.owners[chunk.slot] for chunk in batch.context}
        for slot in batch.generation_slots:
            llm_request = failed[slot] = self._slots.owners[slot]
            if slot == llm_request.slots[0]:
                llm_request.num_scheduled_tokens -= 1
        responses: list[Response] = []
        for llm_request in dict.fromkeys(failed.values()):
            responses += self._fail_group(llm_request.group, error)
        self._start_again(batch)
        return responses

    def _start_again(self, batch: ScheduledBatch) -> None:
        """Sequences that a failed batch started and gave no row: nobody knows whether the device knows them."""
        for start in batch.starts:
            llm_request = self._slots.owners.get(start.slot)
            if llm_request is not None and llm_request.num_scheduled_tokens == 0:
                self._pause(llm_request)

    def fail_all(self, error: InflightError) -> list[Response]:
        """End every request there is, in flight or not: the engine is gone."""
        responses: list[Response] = []
        for group in list(self._groups.values()):
            for llm_request in group.sequences:
                llm_request.num_scheduled_tokens = 0
            responses += self._fail_group(group, error)
        return responses

    # ---------------------------------------------------------------- how requests end

    def _fail_group(self, group: RequestGroup, error: InflightError) -> list[Response]:
        """One request's end; if it had ended already and waits for its batches only, it keeps its reason."""
        responses: list[Response] = []
        for llm_request in group.sequences:
            if llm_request.state is not RequestState.FINISHED:
                group.error = group.error or error
                responses += self._finish(llm_request, FinishReason.NOT_FINISHED)
            elif llm_request.slots:
                responses += self._drain(llm_request)
        return responses

    def _finish(self, llm_request: LlmRequest, reason: FinishReason) -> list[Response]:
        self._waiting.pop(llm_request.key, None)
        llm_request.finish(reason)
        return self._drain(llm_request)

    def _drain(self, llm_request: LlmRequest) -> list[Response]:
        """Free an ended sequence once nothing of it is in flight, and give its last response."""
        if llm_request.num_scheduled_tokens > 0:
            return []
        if llm_request.slots:
            self._running.remove(llm_request)
        self._leave_slots(llm_request)
        llm_request.slots = ()
        group = llm_request.group
        group.num_unfinished -= 1
        is_final = group.num_unfinished == 0
        if is_final:
            del self._groups[llm_request.request_id]
        if group.error is not None:
            return [Response(llm_request.request_id, error=group.error, is_final=True)] if is_final else []
        return [self._respond(llm_request, is_final)]

    def _leave_slots(self, llm_request: LlmRequest) -> None:
        if llm_request.slots:
            taken, reused = self.kv_cache.block_counts(llm_request.key)
            llm_request.num_new_blocks += taken
            llm_request.num_reused_blocks += reused
        self.kv_cache.release(llm_request.key)
        self._slots.release(llm_request.slots)

    def _respond(self, llm_request: LlmRequest, is_final: bool = False) -> Response:
        return Response(llm_request.request_id, make_result(llm_request, self._block_counts), None, is_final)

    def _block_counts(self, llm_request: LlmRequest) -> tuple[int, int]:
        """KV blocks taken and found in the cache, in all runs of a sequence."""
        taken, found = self.kv_cache.block_counts(llm_request.key) if llm_request.slots else (0, 0)
        return llm_request.num_new_blocks + taken, llm_request.num_reused_blocks + found

    # ---------------------------------------------------------------- what there is to tell

    def stats(self, batch: ScheduledBatch | None) -> IterationStats:
        """Counters after the iteration that ran `batch`."""
        context = [chunk for chunk in batch.context if not chunk.is_generation] if batch else []
        num_context_tokens = sum(len(chunk.token_ids) - chunk.num_draft_tokens for chunk in context)
        num_scheduled = (
            batch.num_rows - sum(len(group.slots) - 1 for group in batch.beam_groups) if batch else 0
        )
        return IterationStats(
            iteration=self._iteration,
            num_active_requests=len(self._groups),
            max_num_requests=self._slots.count,
            max_num_blocks=self.kv_cache.pool.num_blocks,
            num_free_blocks=self.kv_cache.pool.num_free,
            tokens_per_block=self.kv_cache.tokens_per_block,
            num_scheduled_requests=num_scheduled,
            num_context_requests=len(context),
            num_generation_requests=num_scheduled - len(context),
            num_context_tokens=num_context_tokens,
            micro_batch_id=batch.micro_batch_id if batch else 0,
            num_waiting_requests=len(self._waiting),
            num_paused_requests=self._num_paused,
            num_reused_blocks=self.kv_cache.num_reused_blocks,
            num_missed_blocks=self.kv_cache.num_missed_blocks,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError unless slots, queues and blocks agree with the requests' states."""
        self.kv_cache.check_integrity()
        sequences = [sequence for group in self._groups.values() for sequence in group.sequences]
        assert all(sequence.state is not RequestState.WAITING or not sequence.slots for sequence in sequences)
        running = {sequence.key for sequence in sequences if sequence.slots}
        assert running == {sequence.key for sequence in self._running}
        self._slots.check_integrity()
        assert {slot for r in self._running for slot in r.slots} == set(self._slots.owners)

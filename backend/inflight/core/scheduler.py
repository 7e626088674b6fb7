"""The batcher's brain: owns every request's state, the waiting queue and the slots, and makes the batches.

One iteration is `accept` (what is new), `schedule` (what runs), then, when the device has answered, `update` (what
came of it). `schedule` may be called again before an earlier batch's `update`; rows in flight are counted in
num_scheduled_tokens. Blocks and slots of a request that ends meanwhile stay until its last batch is back.

Every method that can end requests returns responses, and a request's blocks are free before its final response
is among them. Deterministic: a function of the calls alone. Called by the loop thread only.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict

from inflight.core.batch import ContextChunk, EngineLimits, ModelOutput, ScheduledBatch, SlotStart
from inflight.core.capacity_scheduler import make_capacity_scheduler
from inflight.core.config import SchedulerConfig
from inflight.core.kv_cache_manager import KvCacheManager
from inflight.core.llm_request import LlmRequest, RequestState
from inflight.core.micro_batch_scheduler import MicroBatchScheduler
from inflight.core.request import IterationInput, Request
from inflight.core.response import Response, Result
from inflight.core.stats import IterationStats
from inflight.core.stop import CUT_SHORT, FINISH_REASON_OF_STOP, FinishReason, StopSignal
from inflight.errors import AlreadyExists, InflightError, RequestError


class Scheduler:
    """In-flight batching over one engine's slots and KV blocks."""

    def __init__(self, config: SchedulerConfig, limits: EngineLimits) -> None:
        config.validate(limits)
        self.limits = config.model_limits(limits)
        self.kv_cache = KvCacheManager(
            limits.num_blocks, limits.tokens_per_block, config.enable_kv_cache_reuse
        )
        self._config = config
        self._max_num_sequences = limits.max_num_sequences
        self._capacity = make_capacity_scheduler(config.policy)
        self._micro_batch = MicroBatchScheduler(
            config.max_num_tokens, limits.tokens_per_block, config.enable_chunked_context
        )
        self._requests: dict[int, LlmRequest] = {}
        # By id: paused requests first, then those that never ran, each part in order of arrival.
        self._waiting: OrderedDict[int, LlmRequest] = OrderedDict()
        self._running: list[LlmRequest] = []  # in order of admission
        self._by_slot: dict[int, LlmRequest] = {}
        self._free_slots = list(range(limits.max_num_sequences))
        self._released_slots: list[int] = []
        self._iteration = 0
        self._num_paused = 0

    @property
    def num_active(self) -> int:
        """Requests without a final response."""
        return len(self._requests)

    def is_active(self, request_id: int) -> bool:
        """Whether a request of this id has been accepted and has no final response yet."""
        return request_id in self._requests

    @property
    def room(self) -> int:
        """How many more requests can be accepted; negative means any number."""
        bound = self._config.max_num_requests
        return -1 if bound < 0 else max(0, bound - len(self._requests))

    # ---------------------------------------------------------------- what is new

    def accept(self, inputs: IterationInput) -> list[Response]:
        """Queue new requests, end stopped ones; refused requests are answered at once."""
        self._iteration = inputs.iteration
        responses = []
        for request in inputs.new_requests:
            error = self._refusal(request)
            if error is None:
                self._requests[request.request_id] = llm_request = LlmRequest(request)
                self._waiting[request.request_id] = llm_request
            else:
                responses.append(Response(request.request_id, error=error, is_final=True))
        for stop in inputs.stops:
            responses.extend(self._stop(stop))
        return responses

    def _refusal(self, request: Request) -> RequestError | None:
        if request.request_id in self._requests:
            return AlreadyExists(
                f"requestId {request.request_id} is already in progress, request is ignored."
            )
        try:
            request.validate(self.limits)
        except RequestError as error:
            return error
        return None

    def _stop(self, stop: StopSignal) -> list[Response]:
        llm_request = self._requests.get(stop.request_id)
        if llm_request is None or llm_request.state is RequestState.FINISHED:
            return []
        if llm_request.state is not RequestState.RUNNING:
            del self._waiting[stop.request_id]
        return self._finish(llm_request, FINISH_REASON_OF_STOP[stop.reason])

    # ---------------------------------------------------------------- what runs

    def schedule(self) -> ScheduledBatch | None:
        """The next batch, or None when nothing can run before an update or a new request."""
        growth = self._capacity.plan_growth(self._running, self.kv_cache)
        self._num_paused = len(growth.paused)
        for llm_request in growth.paused:
            self._pause(llm_request)
        starts = self._admit(growth.num_blocks)
        new_blocks: list[tuple[int, tuple[int, ...]]] = [
            (start.slot, shared)
            for start in starts
            if (shared := self.kv_cache.block_table(start.request_id))
        ]
        selected = self._micro_batch.select(self._running)
        generation = self._grow_generation(selected.generation, new_blocks)
        context = [self._take_chunk(*pair, new_blocks) for pair in selected.context]
        if not context and not generation:
            assert not starts, "a request was admitted that cannot run"
            return None
        batch = ScheduledBatch(
            iteration=self._iteration,
            released_slots=tuple(self._released_slots),
            starts=tuple(starts),
            new_blocks=tuple(new_blocks),
            context=tuple(context),
            generation_slots=tuple(generation),
        )
        self._released_slots.clear()
        return batch

    def _admit(self, claimed_blocks: int) -> list[SlotStart]:
        """Start waiting requests, in order, while slots and blocks beyond `claimed_blocks` last."""
        starts = []
        while self._waiting and self._free_slots:
            llm_request = next(iter(self._waiting.values()))
            request_id, num_tokens = llm_request.request_id, self._capacity.tokens_to_reserve(llm_request)
            match = self.kv_cache.match_prefix(request_id, llm_request.tokens)
            needed = self.kv_cache.blocks_to_admit(match, num_tokens)
            if needed > self.kv_cache.num_unreserved - claimed_blocks:
                break
            del self._waiting[request_id]
            self.kv_cache.admit(request_id, match, num_tokens)
            slot = heapq.heappop(self._free_slots)
            llm_request.start(slot, len(match.block_ids) * self.kv_cache.tokens_per_block)
            self._by_slot[slot] = llm_request
            self._running.append(llm_request)
            request = llm_request.request
            starts.append(SlotStart(slot, request_id, 0, request.prompt_length, request.sampling))
        return starts

    def _grow_generation(
        self, selected: list[LlmRequest], new_blocks: list[tuple[int, tuple[int, ...]]]
    ) -> list[int]:
        """Slots of the requests that get a token; one that lacks a block is left out of this iteration."""
        slots = []
        for llm_request in selected:
            position = llm_request.num_computed_tokens + llm_request.num_scheduled_tokens
            if position % self.kv_cache.tokens_per_block == 0:
                missing = self.kv_cache.missing_blocks(llm_request.request_id, position + 1)
                if missing > self.kv_cache.num_unreserved:
                    continue
                if taken := self.kv_cache.extend(llm_request.request_id, position + 1):
                    new_blocks.append((llm_request.slot, taken))
            llm_request.num_scheduled_tokens += 1
            slots.append(llm_request.slot)
        return slots

    def _take_chunk(
        self, llm_request: LlmRequest, num_tokens: int, new_blocks: list[tuple[int, tuple[int, ...]]]
    ) -> ContextChunk:
        start = llm_request.next_position
        end = start + num_tokens
        if taken := self.kv_cache.extend(llm_request.request_id, end):
            new_blocks.append((llm_request.slot, taken))
        llm_request.num_scheduled_tokens += num_tokens
        token_ids = tuple(llm_request.tokens[start:end])
        return ContextChunk(llm_request.slot, start, token_ids, is_last=end == llm_request.context_length)

    def _pause(self, llm_request: LlmRequest) -> None:
        self._leave_slot(llm_request)
        self._running.remove(llm_request)
        llm_request.pause()
        self._waiting[llm_request.request_id] = llm_request
        self._waiting.move_to_end(llm_request.request_id, last=False)

    # ---------------------------------------------------------------- what came of it

    def update(self, batch: ScheduledBatch, output: ModelOutput) -> list[Response]:
        """Take a batch's tokens: append, stop or go on, publish filled blocks, respond."""
        responses: list[Response] = []
        new_tokens = iter(output.token_ids)
        for chunk in batch.context:
            llm_request = self._by_slot[chunk.slot]
            self._confirm(llm_request, len(chunk.token_ids))
            self._advance(llm_request, next(new_tokens) if chunk.is_last else (), responses)
        for slot in batch.generation_slots:
            llm_request = self._by_slot[slot]
            self._confirm(llm_request, 1)
            self._advance(llm_request, next(new_tokens), responses)
        return responses

    def _confirm(self, llm_request: LlmRequest, num_tokens: int) -> None:
        llm_request.num_scheduled_tokens -= num_tokens
        llm_request.num_computed_tokens += num_tokens
        position = llm_request.num_computed_tokens
        if position % self.kv_cache.tokens_per_block < num_tokens and position <= len(llm_request.tokens):
            self.kv_cache.publish(llm_request.request_id, llm_request.tokens, position)

    def _advance(
        self, llm_request: LlmRequest, new_tokens: tuple[int, ...], responses: list[Response]
    ) -> None:
        if llm_request.state is RequestState.FINISHED:  # its batch was in flight when it ended
            responses.extend(self._drain(llm_request))
            return
        reason = FinishReason.NOT_FINISHED
        request = llm_request.request
        for token in new_tokens:
            if token in request.end_ids:
                reason = FinishReason.END_ID
                break
            llm_request.tokens.append(token)
            if len(llm_request.tokens) == request.max_sequence_length:
                reason = FinishReason.LENGTH
                break
        if reason is not FinishReason.NOT_FINISHED:
            responses.extend(self._finish(llm_request, reason))
        elif new_tokens and request.streaming:
            responses.append(Response(request.request_id, self._result(llm_request)))

    def fail(self, batch: ScheduledBatch, error: InflightError) -> list[Response]:
        """End every request of a batch whose forward pass or decoding raised; the others go on."""
        responses: list[Response] = []
        rows = [(chunk.slot, len(chunk.token_ids)) for chunk in batch.context]
        rows += [(slot, 1) for slot in batch.generation_slots]
        for slot, num_tokens in rows:
            llm_request = self._by_slot[slot]
            llm_request.num_scheduled_tokens -= num_tokens
            llm_request.fail(error)
            responses.extend(self._drain(llm_request))
        return responses

    def fail_all(self, error: InflightError) -> list[Response]:
        """End every request there is, in flight or not: the engine is gone."""
        responses = []
        self._waiting.clear()
        for llm_request in list(self._requests.values()):
            llm_request.num_scheduled_tokens = 0
            llm_request.fail(error)
            responses.extend(self._drain(llm_request))
        return responses

    # ---------------------------------------------------------------- how requests end

    def _finish(self, llm_request: LlmRequest, reason: FinishReason) -> list[Response]:
        llm_request.finish(reason)
        return self._drain(llm_request)

    def _drain(self, llm_request: LlmRequest) -> list[Response]:
        """Free an ended request once nothing of it is in flight, and give its final response."""
        if llm_request.num_scheduled_tokens > 0:
            return []
        if llm_request.slot >= 0:
            self._running.remove(llm_request)
        self._leave_slot(llm_request)
        del self._requests[llm_request.request_id]
        result = self._result(llm_request) if llm_request.error is None else None
        return [Response(llm_request.request_id, result, llm_request.error, is_final=True)]

    def _leave_slot(self, llm_request: LlmRequest) -> None:
        self.kv_cache.release(llm_request.request_id)
        if llm_request.slot >= 0:
            del self._by_slot[llm_request.slot]
            heapq.heappush(self._free_slots, llm_request.slot)
            self._released_slots.append(llm_request.slot)

    def _result(self, llm_request: LlmRequest) -> Result:
        """What a response of this request says now. A request cut short returns no further tokens."""
        request, reason = llm_request.request, llm_request.finish_reason
        if reason in CUT_SHORT:
            return Result((), request.prompt_length, 0, reason)
        tokens = llm_request.tokens[request.prompt_length + llm_request.num_streamed_tokens :]
        llm_request.num_streamed_tokens += len(tokens)
        echoed = not (request.streaming or request.output.exclude_input_from_output)
        prompt = request.input_token_ids if echoed else ()
        return Result((*prompt, *tokens), request.prompt_length, len(tokens), reason)

    # ---------------------------------------------------------------- what there is to tell

    def stats(self, batch: ScheduledBatch | None) -> IterationStats:
        """Counters after the iteration that ran `batch`."""
        return IterationStats(
            iteration=self._iteration,
            num_active_requests=len(self._requests),
            max_num_requests=self._max_num_sequences,
            max_num_blocks=self.kv_cache.pool.num_blocks,
            num_free_blocks=self.kv_cache.pool.num_free,
            tokens_per_block=self.kv_cache.tokens_per_block,
            num_scheduled_requests=batch.num_rows if batch else 0,
            num_context_requests=len(batch.context) if batch else 0,
            num_generation_requests=len(batch.generation_slots) if batch else 0,
            num_context_tokens=batch.num_context_tokens if batch else 0,
            micro_batch_id=batch.micro_batch_id if batch else 0,
            num_waiting_requests=len(self._waiting),
            num_paused_requests=self._num_paused,
            num_reused_blocks=self.kv_cache.num_reused_blocks,
            num_missed_blocks=self.kv_cache.num_missed_blocks,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError unless slots, queues and blocks agree with the requests' states."""
        self.kv_cache.check_integrity()
        assert len(self._running) + len(self._waiting) == len(self._requests)
        assert len(self._by_slot) + len(self._free_slots) == self._max_num_sequences
        assert {r.slot for r in self._running} == set(self._by_slot)

"""The batcher's brain: owns every request's state and the waiting queue, and makes the batches.

One iteration is `accept` (what is new), `schedule` (what runs), then, when the device has answered, `update`
(what came of it) or `fail` (nothing did). `schedule` may be called again before an earlier batch's `update`;
rows in flight are counted in num_scheduled_tokens, and rows that depend on what came of them wait: those that need
the host, and with several micro-batches all that generate. Blocks and slots of a request that ends meanwhile stay
until its last batch is back.

Every method that can end requests returns responses, and a request's blocks are free before its final response
is among them. Deterministic: a function of the calls alone. Called by the loop thread only.
"""

from __future__ import annotations

from collections.abc import Iterable

from inflight.core.admission import Admission
from inflight.core.batch import (
    BeamCandidates,
    EngineLimits,
    ModelOutput,
    ScheduledBatch,
    SlotStart,
    TokenDetails,
)
from inflight.core.batch_builder import BatchBuilder
from inflight.core.block_keys import ROOT_SCOPE, CacheRules, private_scope
from inflight.core.capacity_scheduler import make_capacity_scheduler
from inflight.core.config import SchedulerConfig
from inflight.core.deadlines import Deadlines
from inflight.core.introspection import Introspection
from inflight.core.kv_cache_manager import KvCacheManager
from inflight.core.llm_request import LlmRequest, RequestGroup, RequestState
from inflight.core.metrics import MetricsSnapshot
from inflight.core.micro_batch_scheduler import MicroBatch, MicroBatchScheduler
from inflight.core.observations import Observations
from inflight.core.progress import advance_beams, append_tokens, confirm_chunk, keep_context
from inflight.core.recovery import Recovery
from inflight.core.request import IterationInput, Request
from inflight.core.response import Response
from inflight.core.results import make_result
from inflight.core.rows import add_rows
from inflight.core.running import Running
from inflight.core.state import SchedulerState
from inflight.core.stats import IterationStats, RequestStats
from inflight.core.stop import FINISH_REASON_OF_STOP, FinishReason, StopSignal
from inflight.errors import AlreadyExists, InflightError, RequestError, StepFailed


class Scheduler:
    """In-flight batching over one engine's slots and KV blocks."""

    def __init__(self, config: SchedulerConfig, limits: EngineLimits) -> None:
        config.validate(limits.max_num_sequences, limits.tokens_per_block)
        self.limits = config.model_limits(limits)
        self.kv_cache = KvCacheManager(limits.num_blocks, limits.tokens_per_block)
        self._config = config
        self._capacity = make_capacity_scheduler(config.policy)
        self._running = Running(limits.max_num_sequences, self.kv_cache)
        self._admission = Admission(self._capacity, self.kv_cache, self._running, config.max_queue_size)
        self._waiting = self._admission.waiting
        self._recovery = Recovery(self._running, self._waiting)
        self._micro_batch = MicroBatchScheduler(
            config.max_num_tokens,
            limits.tokens_per_block,
            config.enable_chunked_context,
            config.context_chunking_policy,
            limits.num_micro_batches,
        )
        self._groups: dict[int, RequestGroup] = {}  # by request id
        self._deadlines = Deadlines()
        self._observed = Observations(
            limits.max_num_sequences,
            config.max_num_tokens,
            self._capacity.fills_batches_once,
            limits.num_micro_batches,
        )
        self._num_micro_batches = limits.num_micro_batches
        self._runs_ahead = limits.runs_ahead
        self._next_micro_batch = 0
        self._next_key = 0
        self._iteration = 0
        self._now_ns = 0
        self._num_in_flight = 0  # batches

    @property
    def num_active(self) -> int:
        """Requests without a final response."""
        return len(self._groups)

    def is_active(self, request_id: int) -> bool:
        """Whether a request of this id has been accepted and has no final response yet."""
        return request_id in self._groups

    @property
    def running_sequences(self) -> tuple[LlmRequest, ...]:
        """Sequences that have slots, oldest first; not to be changed."""
        return tuple(self._running.sequences)

    @property
    def room(self) -> int:
        """How many more requests can be accepted; negative means any number."""
        bound = self._config.max_num_requests
        return -1 if bound < 0 else max(0, bound - len(self._groups))

    # ---------------------------------------------------------------- what is new

    def accept(self, inputs: IterationInput) -> list[Response]:
        """Queue new requests, end stopped ones and those out of time; refused requests are answered at once."""
        self._iteration, self._now_ns = inputs.iteration, inputs.now_ns
        self._observed.begin_iteration()
        responses = []
        for request in inputs.new_requests:
            try:
                self._refuse_or_queue(request)
            except Exception as error:  # one request at fault must not end the others'
                refusal = _as_request_error(error)
                self._observed.refused(refusal)
                responses.append(Response(request.request_id, error=refusal, is_final=True))
        for stop in inputs.stops:
            responses.extend(self._stop(stop))
        for group in self._deadlines.pop_expired(self._now_ns):
            responses += self._end_early(group.sequences, FinishReason.TIMED_OUT)
        return responses

    def _refuse_or_queue(self, request: Request) -> None:
        """The first sequence waits for room; its siblings wait for the prompt that it computes for all."""
        if request.request_id in self._groups:
            raise AlreadyExists(f"requestId {request.request_id} is already in progress, request is ignored.")
        request.validate(self.limits)
        self._admission.check_queue(request)
        group = RequestGroup(request, self._next_key, self._rules(request), self._now_ns)
        self._next_key += len(group.sequences)
        self._groups[request.request_id] = group
        self._waiting.add(group.sequences[0])
        self._deadlines.add(group)

    def _rules(self, request: Request) -> CacheRules:
        if self._config.enable_kv_cache_reuse:
            scope: bytes | None = request.identity.scope(ROOT_SCOPE)
        else:
            scope = private_scope(self._next_key) if request.sampling.num_sequences > 1 else None
        return CacheRules(scope, request.identity.extra_ids, request.retention, request.prompt_length)

    def _stop(self, stop: StopSignal) -> list[Response]:
        group = self._groups.get(stop.request_id)
        if group is None:
            return []
        if stop.sequence_index is None:
            group.stop_requested_ns = group.stop_requested_ns or stop.requested_ns
        meant = (s for s in group.sequences if stop.sequence_index in (None, s.sequence_index))
        return self._end_early(meant, FINISH_REASON_OF_STOP[stop.reason])

    def _end_early(self, sequences: Iterable[LlmRequest], reason: FinishReason) -> list[Response]:
        responses: list[Response] = []
        for llm_request in sequences:
            if llm_request.state is not RequestState.FINISHED:
                responses += self._finish(llm_request, reason)
        return responses

    # ---------------------------------------------------------------- what runs

    def schedule(self) -> ScheduledBatch | None:
        """The next batch, or None when nothing can run before an update or a new request."""
        self.kv_cache.expire(self._now_ns)
        isolation = self._recovery.isolation
        while not (self._num_in_flight and (isolation.is_active or self._recovery.has_void)):
            batch = self._make_batch()
            if batch is not None:
                self._num_in_flight += 1
                return batch
            if not isolation.is_active:
                break
            isolation.acquit()  # they cannot run apart: what they need is not free before others end
        return None

    def _make_batch(self) -> ScheduledBatch | None:
        growth = self._capacity.plan_growth(self._running.sequences, self.kv_cache)
        if growth.is_short and self._runs_ahead and self._num_in_flight:
            return None  # whoever is to be paused has a token in flight
        self._observed.paused(len(growth.paused))
        for llm_request in growth.paused:
            self._running.leave(llm_request)
            llm_request.pause()
            self._waiting.add_in_front(llm_request)
        batch = BatchBuilder()
        is_new_batch = not self._running.sequences
        for llm_request, num_reused in self._admission.admit(
            growth.num_blocks, self._recovery.isolation.on_trial
        ):
            self._start(llm_request, num_reused, batch)
        on_trial = self._recovery.on_trial(self._running.sequences)
        selected = self._micro_batch.select(on_trial, self._num_in_flight)
        add_rows(selected, self.kv_cache, batch)
        if batch.is_empty:
            assert not batch.starts, "a request was admitted that cannot run"
            return None
        slots = self._running.slots
        built = batch.build(
            self._iteration, self._next_micro_batch, slots.collect_released(), self._feeds_itself(selected)
        )
        self._next_micro_batch = (self._next_micro_batch + 1) % self._num_micro_batches
        self._observed.count_static(built, is_new_batch, slots.count - slots.num_free)
        return built

    def _feeds_itself(self, selected: MicroBatch) -> bool:
        """Whether nobody who gets a token of this batch needs the host for the next one."""
        if not self._runs_ahead:
            return False
        finishing = (llm_request for llm_request, _ in selected.context if not llm_request.in_context)
        return not any(llm_request.needs_host for llm_request in (*selected.generation, *finishing))

    def _start(self, llm_request: LlmRequest, num_reused_tokens: int, batch: BatchBuilder) -> None:
        if not llm_request.has_started:
            self._observed.started(llm_request, self._now_ns)
            llm_request.first_scheduled_ns = self._now_ns
        self._running.start(llm_request, num_reused_tokens)
        num_missed_blocks = self.kv_cache.block_counts(llm_request.key).missed
        self._observed.looked_up(num_reused_tokens, num_missed_blocks * self.kv_cache.tokens_per_block)
        request, slot = llm_request.request, llm_request.slots[0]
        token_ids = tuple(llm_request.tokens) if request.looks_back else ()
        batch.starts.append(SlotStart(slot, request, llm_request.sequence_index, token_ids))
        batch.append_blocks(slot, self.kv_cache.block_table(llm_request.key))

    # ---------------------------------------------------------------- what came of it

    def update(self, batch: ScheduledBatch, output: ModelOutput, now_ns: int = 0) -> list[Response]:
        """Take a batch's tokens: append, stop or go on, publish filled blocks, respond.

        A row whose tokens cannot be taken ends its request with an error, and no other.

        Args:
            batch: What ran.
            output: What the device made of it.
            now_ns: When that was known; the clock of `IterationInput.now_ns`.
        """
        self._now_ns = now_ns or self._now_ns
        self._num_in_flight -= 1
        responses: list[Response] = []
        owners = self._running.slots.owners
        new_tokens = iter(output.token_ids)
        details = output.details
        for chunk in batch.context:
            llm_request = owners[chunk.slot]
            tokens = next(new_tokens) if chunk.is_last else ()
            if llm_request.is_void:
                self._recovery.take_back(llm_request, len(chunk.token_ids))
                continue
            try:
                confirm_chunk(llm_request, chunk, len(tokens))
                if chunk.wants_context:
                    keep_context(llm_request, chunk, output.context[chunk.slot])
                if chunk.is_last and not chunk.is_generation and llm_request.leads:
                    self._start_siblings(llm_request.group)
                self._advance(llm_request, tokens, details.get(chunk.slot), responses)
            except Exception as error:
                responses += self._fail_group(llm_request.group, _as_request_error(error))
        for slot in batch.generation_slots:
            llm_request = owners[slot]
            tokens = next(new_tokens)
            if llm_request.beams is not None:
                continue
            if llm_request.is_void:
                self._recovery.take_back(llm_request, 1)
                continue
            llm_request.num_scheduled_tokens -= 1
            llm_request.num_computed_tokens += 1
            try:
                self._advance(llm_request, tokens, details.get(slot) if details else None, responses)
            except Exception as error:
                responses += self._fail_group(llm_request.group, _as_request_error(error))
        self._update_beams(batch, output, responses)
        self._observed.updated(batch, output, self._now_ns)
        self._recovery.restart()
        if self._recovery.isolation.is_active:
            self._recovery.review(self._groups)
        return responses

    def _update_beams(self, batch: ScheduledBatch, output: ModelOutput, responses: list[Response]) -> None:
        for group, candidates in zip(batch.beam_groups, output.beams, strict=True):
            # A search that had ended before its context came back has left its slots by now.
            search = self._running.slots.owners.get(group.slots[0])
            if search is None:
                continue
            if search.is_void:
                if len(group.slots) > 1:  # else it was its context, which is taken back already
                    self._recovery.take_back(search, 1)
                continue
            try:
                self._advance_beams(search, len(group.slots), candidates, responses)
            except Exception as error:
                responses += self._fail_group(search.group, _as_request_error(error))

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
        if new_tokens:
            self._observe_tokens(llm_request)
        reason = append_tokens(llm_request, new_tokens, details, self._now_ns)
        if llm_request.num_computed_tokens >= llm_request.next_block_end:
            self._publish(llm_request)
        if reason is not FinishReason.NOT_FINISHED:
            responses += self._finish(llm_request, reason)
        elif new_tokens and llm_request.request.streaming:
            responses.append(self._respond(llm_request))

    def _observe_tokens(self, llm_request: LlmRequest) -> None:
        self._observed.gets_tokens(llm_request)
        if not llm_request.first_token_ns:
            self._observed.gave_first_token(llm_request, self._now_ns)

    def _publish(self, llm_request: LlmRequest) -> None:
        """Let others find the blocks that have become full."""
        num_tokens = min(llm_request.num_computed_tokens, len(llm_request.tokens))
        if llm_request.rules.scope is not None:
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
        self._observe_tokens(llm_request)
        reason = advance_beams(llm_request, candidates, self._now_ns)
        if reason is not FinishReason.NOT_FINISHED:
            responses += self._finish(llm_request, reason)
            return
        if llm_request.beams is not None:
            self.kv_cache.reorder_beams(llm_request.key, llm_request.beams.parents)
        # A search that began again after a failed iteration has said this much before.
        if llm_request.request.streaming and llm_request.num_generated > llm_request.num_streamed_tokens:
            responses.append(self._respond(llm_request))

    def _start_siblings(self, group: RequestGroup) -> None:
        """The prompt is computed: the request's other sequences find its full blocks and go on from there.

        If the one that was to compute it ended before, another does, and the others wait for its blocks.
        """
        if group.has_context:
            return
        group.has_context = True
        for sibling in reversed(group.sequences[1:]):
            if sibling.state is RequestState.WAITING:
                self._waiting.add_in_front(sibling)

    # ---------------------------------------------------------------- when nothing came of it

    def fail(self, batch: ScheduledBatch, error: InflightError) -> list[Response]:
        """An iteration raised: end the guilty request with `error`; the others go on, their tokens unchanged.

        Who is guilty takes some iterations to find out (`recovery.py`), unless a request was alone. With
        `Unavailable` all requests of the batch end.
        """
        self._num_in_flight -= 1
        verdict = self._recovery.judge(batch, error)
        responses: list[Response] = []
        for request_id in verdict.guilty:
            group = self._groups[request_id]
            self.kv_cache.distrust(*(llm_request.key for llm_request in group.sequences))
            responses += self._fail_group(group, error)
        for llm_request in verdict.rows:
            if llm_request.state is RequestState.FINISHED and llm_request.slots:
                responses += self._drain(llm_request)
        self._recovery.retry(batch, verdict.rows)
        return responses

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
        self._waiting.remove(llm_request)
        llm_request.finish(reason)
        if llm_request.leads:
            heir = llm_request.group.pass_context_on()
            if heir is not None:
                self._waiting.add_in_front(heir)
            else:
                self._start_siblings(llm_request.group)
        return self._drain(llm_request)

    def _drain(self, llm_request: LlmRequest) -> list[Response]:
        """Free an ended sequence once nothing of it is in flight, and give its last response."""
        if llm_request.num_scheduled_tokens > 0:
            return []
        self._running.leave(llm_request)
        self._waiting.leave(llm_request)
        llm_request.slots = ()
        group = llm_request.group
        group.num_unfinished -= 1
        is_final = group.num_unfinished == 0
        responses = self._respond_last(llm_request, is_final)
        if group.error is None:
            self._observed.sequence_ended(llm_request)
        if is_final:
            del self._groups[llm_request.request_id]
            self._observed.request_ended(group, self._now_ns)
        return responses

    def _respond_last(self, llm_request: LlmRequest, is_final: bool) -> list[Response]:
        group = llm_request.group
        if group.error is None:
            try:
                return [self._respond(llm_request, is_final)]
            except Exception as error:  # it must not end the other requests, nor this one without a word
                group.error = _as_request_error(error)
        return [Response(llm_request.request_id, error=group.error, is_final=True)] if is_final else []

    def _respond(self, llm_request: LlmRequest, is_final: bool = False) -> Response:
        result = make_result(llm_request, self._running.block_counts)
        return Response(llm_request.request_id, result, None, is_final)

    # ---------------------------------------------------------------- what there is to tell

    def stats(self, batch: ScheduledBatch | None, duration_ns: int = 0) -> IterationStats:
        """Counters after the iteration that ran `batch` and took `duration_ns`."""
        return self._observed.iteration_stats(
            batch, self._iteration, duration_ns, len(self._groups), len(self._waiting), self.kv_cache
        )

    def metrics(self) -> MetricsSnapshot:
        """What was observed since the start."""
        return self._observed.metrics.snapshot()

    def request_stats(self, batch: ScheduledBatch | None) -> tuple[RequestStats, ...]:
        """Every sequence after the iteration that ran `batch`, those that ended in it left out."""
        return self._introspection().request_stats(batch)

    def state(self) -> SchedulerState:
        """Everything, for people."""
        return self._introspection().state()

    def _introspection(self) -> Introspection:
        return Introspection(
            policy=self._config.policy,
            iteration=self._iteration,
            now_ns=self._now_ns,
            groups=self._groups.values(),
            admission=self._admission,
            running=self._running,
            kv_cache=self.kv_cache,
            isolation=self._recovery.isolation,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError unless slots, queues and blocks agree with the requests' states."""
        self.kv_cache.check_integrity()
        self._waiting.check_integrity()
        sequences = [sequence for group in self._groups.values() for sequence in group.sequences]
        assert all(sequence.state is not RequestState.WAITING or not sequence.slots for sequence in sequences)
        running = {sequence.key for sequence in sequences if sequence.slots}
        assert running == {sequence.key for sequence in self._running.sequences}
        self._running.check_integrity()


def _as_request_error(error: Exception) -> InflightError:
    if isinstance(error, RequestError):
        return error
    return StepFailed(f"the request could not be processed: {type(error).__name__}: {error}")

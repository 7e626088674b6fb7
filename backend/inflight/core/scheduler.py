"""The scheduler: owns every request's state and the waiting queue, and makes the batches.

An iteration calls `accept` with new input, then `schedule` for a batch, and with the device's output `update`, or
`fail` if the batch failed. `schedule` may be called again before an earlier batch's `update`: tokens in flight are
counted in num_scheduled_tokens. Rows that depend on the outcome of a batch in flight wait for it: rows that need
the host, and with several micro-batches every row in generation. When a request ends, its blocks and slots stay
until its last batch in flight is back.

Every method that can end requests returns responses, and a request's blocks are free before its final response is
returned. Decisions depend on the calls alone. Used on the loop thread.
"""

from __future__ import annotations

from inflight.config import SchedulingConfig
from inflight.core.endings import Deadlines, Endings, PendingEndings, as_request_error
from inflight.core.kv.block_keys import ROOT_SCOPE, CacheRules, private_scope
from inflight.core.kv.block_store import SavedBlocks, StoreCommands
from inflight.core.kv.kv_cache_manager import KvCacheManager
from inflight.core.kv.kv_events import KvEvent, KvEventLog
from inflight.core.kv.state_snapshots import StateSnapshots
from inflight.core.outcomes import Outcomes
from inflight.core.recover.recovery import Recovery, rebuild
from inflight.core.report.metrics import MetricsSnapshot, Observations, adapter_stats
from inflight.core.report.state import Introspection, SchedulerState
from inflight.core.report.stats import IterationCounts, RequestCounts
from inflight.core.request.adapter import AdapterEvent, AdapterUpdate, StoredAdapter
from inflight.core.request.drafters import Drafters
from inflight.core.request.guide import GuideEvent
from inflight.core.request.llm_request import LlmRequest, RequestGroup, RequestState
from inflight.core.request.request import IterationInput, Request
from inflight.core.request.response import Response
from inflight.core.request.stop import FINISH_REASON_OF_STOP, FinishReason, StopSignal
from inflight.core.schedule.admission import Admission
from inflight.core.schedule.batch import EngineLimits, ModelOutput, ScheduledBatch
from inflight.core.schedule.batch_builder import BatchBuilder
from inflight.core.schedule.capacity_scheduler import make_capacity_scheduler
from inflight.core.schedule.micro_batch_scheduler import MicroBatch, MicroBatchScheduler
from inflight.core.schedule.running import Running
from inflight.errors import AlreadyExists, InflightError, error_from_kind


class Scheduler:
    """In-flight batching over one engine's slots and KV blocks."""

    def __init__(self, config: SchedulingConfig, limits: EngineLimits) -> None:
        config.validate(limits.max_num_sequences, limits.tokens_per_block)
        self.limits, self._engine_limits = limits.model_limits(config), limits
        saved = None
        if config.has_block_store:
            saved = SavedBlocks(config.kv_cache_onboard_blocks, config.secondary_offload_min_priority)
        num_events = config.kv_event_buffer_size
        events = KvEventLog(num_events, () if saved is None else saved) if num_events else None
        states = StateSnapshots(limits.num_state_snapshots) if limits.has_state else None
        self.kv_cache = KvCacheManager(limits.num_blocks, limits.tokens_per_block, events, states, saved)
        self._config = config
        self._capacity = make_capacity_scheduler(config.policy)
        self._running = Running(limits, self.kv_cache)
        self._admission = Admission(config, self._capacity, self.kv_cache, self._running)
        self._waiting = self._admission.waiting
        self._recovery = Recovery(self._running, self._waiting)
        self._micro_batch = MicroBatchScheduler(config, limits)
        self._groups: dict[int, RequestGroup] = {}  # by request id
        self._adapters: dict[int, StoredAdapter] = {}  # by handle
        self._drafters = Drafters(config.speculative_decoding_mode, limits.has_useful_head)
        self._deadlines = Deadlines()
        self._to_end = PendingEndings()
        self._observed = Observations(config, limits)
        self._endings = Endings(self._groups, self._admission, self._running, self._observed)
        self._outcomes = Outcomes(
            self.kv_cache, self._running, self._admission, self._recovery, self._endings, self._observed
        )
        self._num_micro_batches = limits.num_micro_batches
        self._overlaps_iterations = limits.overlaps_iterations
        self._shares_blocks = limits.shares_blocks
        self._next_micro_batch = 0
        self._next_key = 0
        self._iteration = 0
        self._now_ns = 0
        self._num_in_flight = 0  # batches
        self._num_disowned = 0  # batches in flight made before `schedule` raised: their output is ignored
        self._ran_before: tuple[LlmRequest, ...] = ()  # running sequences when `schedule` was last called

    @property
    def num_active(self) -> int:
        """Number of requests without a final response."""
        return len(self._groups)

    def is_active(self, request_id: int) -> bool:
        """Whether a request with this id has been accepted and has no final response yet."""
        return request_id in self._groups

    @property
    def can_only_wait(self) -> bool:
        """Whether nothing can happen before an event if no batch can be made now and none is in flight: every
        request waits for its guide or adapter, or blocks are being loaded."""
        if self.is_loading_blocks:
            return not self._to_end
        return 0 < len(self._groups) == len(self._admission.held) and not self._to_end

    @property
    def is_loading_blocks(self) -> bool:
        """Whether saved KV blocks are being loaded."""
        return self.kv_cache.saved is not None and bool(self.kv_cache.saved.loads)

    @property
    def next_deadline_ns(self) -> int | None:
        """The time when the next request may time out, by the clock of `IterationInput.now_ns`; None: never."""
        return self._deadlines.next_ns

    @property
    def running_sequences(self) -> tuple[LlmRequest, ...]:
        """Sequences that have slots, oldest first."""
        return tuple(self._running.sequences)

    @property
    def room(self) -> int:
        """Number of further requests that can be accepted; negative means any number."""
        bound = self._config.max_num_requests
        return -1 if bound < 0 else max(0, bound - len(self._groups))

    # ---------------------------------------------------------------- new input

    def accept(self, inputs: IterationInput) -> list[Response]:
        """Queue new requests, end stopped and expired ones, and answer invalid ones at once.

        A request with a guide or an adapter is queued when an event in `inputs` says that its guide or adapter is
        ready. One iteration ends a bounded number of sequences (`PendingEndings`).
        """
        self._iteration, self._now_ns = inputs.iteration, inputs.now_ns
        # Before blocks are released: other ranks and replays have not seen the times of rank 0's idle iterations.
        self.kv_cache.pool.expire(self._now_ns)
        self._observed.begin_iteration()
        self.kv_cache.pool.begin_peaks()
        responses: list[Response] = []
        for request in inputs.new_requests:
            try:
                self._validate_and_queue(request)
            except Exception as error:  # a faulty request must not affect others
                refusal = as_request_error(error)
                self._observed.refused(refusal)
                responses.append(Response(request.request_id, error=refusal, is_final=True))
        for event in inputs.guides:
            self._apply_guide_event(event)
        self._apply_adapter_update(inputs.adapters)
        if self.kv_cache.loader is not None:
            self.kv_cache.loader.update(inputs.blocks)
        for stop in inputs.stops:
            self._stop(stop)
        for group in self._deadlines.pop_expired(self._now_ns):
            self._to_end.add(group, FinishReason.TIMED_OUT)
        most = self._config.sequences_per_iteration
        return responses + self._to_end.end_some(self._endings, most, self._now_ns)

    def _validate_and_queue(self, request: Request) -> None:
        """Queue a request's first sequence; its other sequences wait until the first one has computed the
        prompt."""
        if request.request_id in self._groups:
            raise AlreadyExists(f"requestId {request.request_id} is already in progress, request is ignored.")
        request.validate(self.limits)
        self._admission.check_queue(request)
        request = self._drafters.with_default(request)
        rules = self._rules(request, self._next_key, None)
        group = RequestGroup(request, self._next_key, rules, self._now_ns)
        for llm_request in group.sequences:
            llm_request.drafter = self._drafters.make(request, llm_request.tokens)
        self._next_key += len(group.sequences)
        self._groups[request.request_id] = group
        if group.is_held:
            self._admission.hold(group)
        else:
            self._waiting.add(group.sequences[0])
        self._deadlines.add(group)

    def _apply_guide_event(self, event: GuideEvent) -> None:
        """Queue a request whose guide is ready, or end it with the guide's error; ended requests are ignored."""
        group = self._admission.held.get(event.request_id)
        if group is None:
            return
        self._observed.guide_known(group, not event.error_kind, self._now_ns)
        if event.error_kind:
            self._to_end.add(group, error_from_kind(event.error_kind, event.error))
            return
        group.awaits_guide = False
        self._admission.release_if_ready(group)

    def _apply_adapter_update(self, update: AdapterUpdate) -> None:
        """Record stored adapters, queue requests whose adapters are ready, and end requests whose adapters
        failed."""
        self._adapters.update((adapter.handle, adapter) for adapter in update.stored)
        for event in update.events:
            group = self._admission.held.get(event.request_id)
            if group is None or not group.awaits_adapter:  # the request has ended
                continue
            try:
                self._set_adapter(group, event)
            except Exception as error:  # a faulty request must not affect others
                self._to_end.add(group, as_request_error(error))
        for handle in update.dropped:
            self._adapters.pop(handle, None)
        self._running.adapter_pages.forget(update.dropped)

    def _set_adapter(self, group: RequestGroup, event: AdapterEvent) -> None:
        """Set a request's adapter and queue the request, or raise the event's error."""
        if event.error_kind:
            raise error_from_kind(event.error_kind, event.error)
        adapter = self._adapters[event.handle]
        self._running.adapter_pages.check_fits(adapter)
        rules = self._rules(group.request, group.sequences[0].key, adapter)
        for llm_request in group.sequences:
            llm_request.rules = rules
        group.adapter, group.awaits_adapter = adapter, False
        self._admission.release_if_ready(group)

    def _rules(self, request: Request, first_key: int, adapter: StoredAdapter | None) -> CacheRules:
        identity = request.identity
        tables = b"".join(each.key for each in (request.prompt_table, request.rotary_table) if each)
        if self._config.enable_kv_cache_reuse:
            adapter_digest = adapter.digest if adapter else b""
            scope: bytes | None = identity.scope(ROOT_SCOPE, adapter_digest, tables)
        else:
            is_shared = request.sampling.num_sequences > 1 and self._shares_blocks
            scope = private_scope(first_key) if is_shared else None
        task_id = adapter.task_id if adapter else None
        return CacheRules(
            scope,
            identity.extra_ids,
            request.retention,
            request.prompt_length,
            task_id,
            request.spans(self.limits),
            request.lora.label if request.lora else "",
            identity.namespace(tables),
        )

    def _stop(self, stop: StopSignal) -> None:
        group = self._groups.get(stop.request_id)
        if group is None:
            return
        if stop.sequence_index is None:
            group.stop_requested_ns = group.stop_requested_ns or stop.requested_ns
        self._to_end.add(group, FINISH_REASON_OF_STOP[stop.reason], stop.sequence_index)

    # ---------------------------------------------------------------- scheduling

    def schedule(self) -> ScheduledBatch | None:
        """Return the next batch, or None if nothing can run before an update or a new request.

        If this raises, `recover` must be called next.
        """
        if self._num_disowned:
            return None
        self._ran_before = tuple(self._running.sequences)
        self._admission.considered.clear()
        self.kv_cache.pool.expire(self._now_ns)
        isolation = self._recovery.isolation
        while not (self._num_in_flight and (isolation.is_active or self._recovery.has_void)):
            batch = self._make_batch()
            if batch is not None:
                self._num_in_flight += 1
                return batch
            if not isolation.is_active:
                break
            isolation.clear()  # the retried requests need blocks that other requests hold
        return None

    def _make_batch(self) -> ScheduledBatch | None:
        growth = self._capacity.decide_growth(self._running.sequences, self.kv_cache)
        if growth.is_short and self._overlaps_iterations and self._num_in_flight:
            return None  # a sequence to be paused has a token in flight
        self._observed.paused(len(growth.paused))
        for llm_request in growth.paused:
            self._running.leave(llm_request)
            llm_request.pause()
            self._waiting.add_in_front(llm_request)
        batch = BatchBuilder(self.kv_cache, self._running.adapter_pages, self._engine_limits)
        is_new_batch = not self._running.sequences
        for llm_request, num_reused in self._admission.admit(
            growth.num_blocks, self._recovery.isolation.retrying
        ):
            self._start(llm_request, num_reused, batch)
        retrying = self._recovery.retrying(self._running.sequences)
        selected = self._micro_batch.select(retrying, self._num_in_flight)
        batch.add_rows(selected)
        if batch.is_empty:
            assert not batch.has_starts, "a request was admitted that cannot run"
            return None
        slots = self._running.slots
        built = batch.build(
            self._iteration,
            self._next_micro_batch,
            slots.collect_released(),
            self._samples_on_device(selected),
        )
        self._next_micro_batch = (self._next_micro_batch + 1) % self._num_micro_batches
        self._observed.count_static(built, is_new_batch, slots.count - slots.num_free)
        return built

    def _samples_on_device(self, selected: MicroBatch) -> bool:
        """Whether the next batch can be made before the current one is back.

        It can if some sampled row does not need the host, or if no row is sampled, as in the middle of a context.
        """
        if not self._overlaps_iterations:
            return False
        finishing = (llm_request for llm_request, _ in selected.context if not llm_request.in_context)
        sampled = (*selected.generation, *finishing)
        return not sampled or any(not llm_request.needs_host for llm_request in sampled)

    def _start(self, llm_request: LlmRequest, num_reused_tokens: int, batch: BatchBuilder) -> None:
        if not llm_request.has_started:
            self._observed.started(llm_request, self._now_ns)
            llm_request.first_scheduled_ns = self._now_ns
        self._running.start(llm_request, num_reused_tokens)
        num_missed_blocks = self.kv_cache.block_counts(llm_request.key).missed
        self._observed.looked_up(num_reused_tokens, num_missed_blocks * self.kv_cache.tokens_per_block)
        batch.add_start(llm_request)

    # ---------------------------------------------------------------- after a batch

    def update(self, batch: ScheduledBatch, output: ModelOutput, now_ns: int = 0) -> list[Response]:
        """Apply the device's output for a batch: append tokens, publish filled blocks, end sequences, make
        responses.

        A row whose processing raises ends only its own request, with an error.

        Args:
            batch: The batch that ran.
            output: The device's output for the batch.
            now_ns: When the output arrived, by the clock of `IterationInput.now_ns`; 0: the time of the last
                iteration.
        """
        self._now_ns = now_ns or self._now_ns
        self._num_in_flight -= 1
        if self._is_disowned():
            return []
        responses = self._outcomes.apply(batch, output, self._now_ns)
        self._observed.updated(self._now_ns)
        self._recovery.restart()
        if self._recovery.isolation.is_active:
            self._recovery.review(self._groups)
        return responses

    # ---------------------------------------------------------------- failures

    def fail(self, batch: ScheduledBatch, error: InflightError) -> list[Response]:
        """After a failed iteration, end the faulty request with `error`; the others continue, with unchanged
        tokens.

        Finding the faulty request takes several iterations (`recovery.py`) unless the batch had only one request.
        If `error` is `Unavailable`, all requests of the batch end.
        """
        self._num_in_flight -= 1
        if self._is_disowned():
            return []
        verdict = self._recovery.judge(batch, error)
        responses: list[Response] = []
        for request_id in verdict.faulty:
            group = self._groups[request_id]
            self.kv_cache.unpublish(*(llm_request.key for llm_request in group.sequences))
            responses += self._endings.fail(group, error, self._now_ns)
        for llm_request in verdict.rows:
            if llm_request.state is RequestState.FINISHED and llm_request.slots:
                responses += self._endings.drain(llm_request, self._now_ns)
        self._recovery.retry(batch, verdict.rows)
        return responses

    def recover(self, error: InflightError, num_in_flight: int) -> list[Response]:
        """After `schedule` raised, end the faulty request with `error`; the others continue, with unchanged
        tokens.

        Every running sequence starts again (`rebuild`), and the faulty request is found as after a failed
        iteration. No batch is made until the batches in flight are back; their output is ignored.

        Args:
            error: The error for the faulty request.
            num_in_flight: Number of batches that are not back.
        """
        touched = tuple(dict.fromkeys((*self._ran_before, *self._admission.considered)))
        suspects = self._recovery.find_suspects(touched, self._groups)
        ended = rebuild(self._groups.values(), self._running, self._waiting, suspects)
        self._num_in_flight = self._num_disowned = num_in_flight
        responses: list[Response] = []
        for llm_request in ended:
            responses += self._endings.drain(llm_request, self._now_ns)
        faulty = self._recovery.find_faulty(suspects, touched)
        if faulty is not None:
            responses += self._endings.fail(self._groups[faulty], error, self._now_ns)
        return responses

    def _is_disowned(self) -> bool:
        """Count a returned batch; return whether it was made before `schedule` raised, so that its output is
        ignored."""
        if not self._num_disowned:
            return False
        self._num_disowned -= 1
        return True

    def fail_all(self, error: InflightError) -> list[Response]:
        """End every request, in flight or not, because the engine is gone."""
        responses: list[Response] = []
        for group in list(self._groups.values()):
            for llm_request in group.sequences:
                llm_request.num_scheduled_tokens = 0
            responses += self._endings.fail(group, error, self._now_ns)
        return responses

    def forget_device(self, keeps_cache: bool = False) -> None:
        """Forget what the device holds: adapters, and unless `keeps_cache`, cached KV blocks and states.

        No request may be active.
        """
        assert not self._groups and not self._num_in_flight, "requests are active"
        if keeps_cache:
            self._running.adapter_pages.clear()
        else:
            self._running.clear()

    # ---------------------------------------------------------------- reports

    def stats(self, batch: ScheduledBatch | None, duration_ns: int = 0) -> IterationCounts:
        """Return the counters after the iteration that ran `batch` and took `duration_ns`."""
        return self._observed.iteration_stats(
            batch,
            self._iteration,
            duration_ns,
            len(self._groups),
            len(self._waiting) + len(self._admission.held),
            self.kv_cache,
            adapter_stats(len(self._adapters), self._running.adapter_pages),
        )

    def take_store_commands(self) -> StoreCommands:
        """Return what a block store has to do before the next forward pass; nothing without a block store."""
        return StoreCommands() if self.kv_cache.saved is None else self.kv_cache.saved.take_commands()

    def take_kv_events(self) -> list[KvEvent]:
        """Return the KV cache events since the last call; empty if none are recorded."""
        return [] if self.kv_cache.events is None else self.kv_cache.events.take()

    def metrics(self) -> MetricsSnapshot:
        """Return counters and histograms since the start."""
        groups = self._groups.values() if self._adapters else ()
        self._observed.adapters_now(adapter_stats(len(self._adapters), self._running.adapter_pages), groups)
        self._observed.saved_blocks_now(self.kv_cache.saved)
        return self._observed.metrics.snapshot()

    def request_stats(self, batch: ScheduledBatch | None) -> tuple[RequestCounts, ...]:
        """Return statistics of every unfinished sequence after the iteration that ran `batch`."""
        return self._introspection().request_stats(batch)

    def state(self) -> SchedulerState:
        """Return the scheduler's whole state, for people to read."""
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
            num_adapters=len(self._adapters),
            num_generated=self._observed.metrics.num_generated_tokens,
        )

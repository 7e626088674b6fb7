"""A whole server without model or threads: the real scheduler and a fake device, driven by one random seed.

`run` runs a scenario to the end. Oracles check the order of starts (`queue_oracle`), the choice of rows
(`rows_oracle`, `stages_oracle`), reuse in the cache (`cache_oracle`), endings after failed iterations
(`blame`) and reports (`accounts`). At the end every request must have the result that it gets alone (`endings`).
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import random
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager

from inflight.core.request.llm_request import LlmRequest
from inflight.core.request.request import IterationInput
from inflight.core.request.response import Response
from inflight.core.scheduler import Scheduler
from inflight.errors import InflightError, StepFailed
from inflight.testing.simulation.integrity import check_integrity

from .accounts import Accounts
from .blame import BatchInFlight, Blame
from .cache_oracle import CacheOracle
from .device import Breakdown, SimulatedDevice
from .endings import check_endings
from .endings_oracle import EndingsOracle
from .host_cache import HostCache, with_adapters
from .outcome import RunOutcome
from .queue_oracle import QueueOracle
from .rows_oracle import RowsOracle
from .scenario import Scenario, time_of_answer
from .stages_oracle import StagesOracle
from .state_oracle import StateOracle

_MAX_ITERATIONS = 3000


def run(scenario: Scenario) -> RunOutcome:
    """Run a scenario to its end. Raises AssertionError if an oracle finds a fault."""
    server = SimulatedServer(scenario)
    while not server.is_done:
        server.step()
    server.check_end()
    return server.outcome


class SimulatedServer:
    """One scheduler and one device with all oracles."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.outcome = RunOutcome()
        self.scheduler = Scheduler(scenario.config, scenario.limits)
        self.adapters = HostCache(scenario.seed)
        self.outcome.adapters, self.outcome.without_adapter = self.adapters.given, self.adapters.failed
        self.cache = CacheOracle(self.scheduler, scenario.config, self.adapters.given)
        if scenario.limits.has_state:
            num_snapshots = scenario.limits.num_state_snapshots
            self.cache = StateOracle(self.scheduler, scenario.config, self.adapters.given, num_snapshots)
        self.queue = QueueOracle(self.scheduler, scenario.config, self.cache)
        self.rows = RowsOracle(self.scheduler, scenario.config, scenario.limits)
        self.stages = StagesOracle(self.scheduler, scenario.limits)
        self.accounts = Accounts(scenario, self.scheduler, self.queue, self.cache)
        self.blame = Blame(scenario)
        self.turns = EndingsOracle(self.scheduler, scenario.config)
        self._device = SimulatedDevice(scenario.limits, scenario.seed)
        self._in_flight: deque[BatchInFlight] = deque()
        self._iteration = 0
        self._rng = random.Random(scenario.seed)

    @property
    def is_done(self) -> bool:
        """Whether the run has ended."""
        return self._iteration > self.scenario.last_event and not self.scheduler.num_active

    def step(self) -> None:
        """Run one iteration, as `GptManager.step` does."""
        assert self._iteration < _MAX_ITERATIONS, "the scheduler makes no progress"
        was_active = self.scheduler.num_active > 0
        inputs = self.scenario.inputs(self._iteration)
        inputs = with_adapters(self.adapters, inputs, self.scheduler.is_active)
        self._accept(inputs)
        flight = self._schedule()
        is_full = len(self._in_flight) == self.scenario.depth > 1
        self.outcome.num_full_pipelines += is_full and self.scenario.is_pipelined
        self.outcome.num_ahead += is_full and self.scenario.limits.overlaps_iterations
        for _ in range(self.scenario.limits.num_due(len(self._in_flight), flight and flight.batch)):
            self._come_back(self._in_flight.popleft())
        if was_active or inputs.new_requests:
            self._check_iteration(flight)
        else:
            assert flight is None, "there is nobody to run"
        self._iteration += 1

    def _check_iteration(self, flight: BatchInFlight | None) -> None:
        if self._rng.random() < 0.3:  # a broken invariant stays broken
            check_integrity(self.scheduler)
        batch, rows = (flight.batch, flight.rows) if flight else (None, ())
        self.accounts.check_iteration(batch, rows)
        if self._rng.random() < 0.1:
            self.accounts.check_state()
            self.accounts.check_request_stats(batch, rows)

    def check_end(self) -> None:
        """Check the results after the run."""
        assert self.scheduler.kv_cache.pool.num_held == 0, "blocks leaked"
        outcome = self.outcome
        outcome.num_iterations = self._iteration
        outcome.reused, outcome.missed = self.cache.num_reused, self.cache.num_missed
        outcome.copied = self.cache.num_copied
        outcome.num_exact_reuses = self.cache.num_exact
        if isinstance(self.cache, StateOracle):
            outcome.num_from_snapshots = self.cache.num_from_snapshots
        outcome.num_divided_contexts = self.rows.num_divided
        outcome.num_shared_generations = self.rows.num_shared
        outcome.num_failed_iterations = self.blame.num_failed
        outcome.num_pauses = self.accounts.num_pauses
        adapters = self.scheduler.stats(None).adapters
        assert not adapters.num_used_pages, "pages leaked"
        outcome.num_adapter_loads, outcome.num_adapter_evictions = adapters.num_loads, adapters.num_evictions
        outcome.num_adapter_waits = self.queue.num_adapter_waits
        outcome.num_divided_endings = self.turns.num_divided
        outcome.convicted = self.blame.convicted
        outcome.started = [(r.request_id, r.sequence_index) for r in self.queue.starts]
        self.cache.check()
        self.blame.check()
        self.accounts.check_end()
        check_endings(self.scenario, outcome)

    # ---------------------------------------------------------------- the steps of an iteration

    def _accept(self, inputs: IterationInput) -> None:
        valid = [r for r in inputs.new_requests if r.request_id not in self.scenario.invalid]
        refused = self.queue.too_many(valid)
        self.outcome.refused |= refused
        self.accounts.accepts(inputs, refused | self.scenario.invalid)
        with self.turns.watched():
            responses = self.scheduler.accept(inputs)
        self.queue.accepted([r for r in valid if r.request_id not in refused], inputs.adapters.events)
        self._answered(responses)

    def _schedule(self) -> BatchInFlight | None:
        before = [(r, r.num_scheduled_tokens) for r in self.scheduler.running_sequences]
        batch = self.scheduler.schedule()
        running = self.scheduler.running_sequences
        owners = {slot: r for r in running for slot in r.slots}
        started = tuple(owners[start.slot] for start in batch.starts) if batch else ()
        self._check_pauses(before, {r.key for r in running} - {r.key for r in started})
        if batch is None:
            return None
        self.cache.scheduled(batch, started)
        slots = (*(chunk.slot for chunk in batch.context), *batch.generation_slots)
        rows = tuple({owners[slot].key: owners[slot] for slot in slots}.values())
        flight = BatchInFlight(batch, rows, started)
        self.blame.take_off(flight, ahead=self._in_flight)
        self._run(flight)
        self._in_flight.append(flight)
        self._check_batch(flight)
        return flight

    def _check_pauses(self, before: list[tuple[LlmRequest, int]], stayed: set[int]) -> None:
        """Check that the scheduler paused the right sequences: those in `before` whose key is not in `stayed`."""
        paused = [place for place, (r, _) in enumerate(before) if r.key not in stayed]
        self.accounts.scheduled(len(paused))
        assert not (paused and self._in_flight and self.scenario.limits.overlaps_iterations), (
            "a sequence was paused while a batch was in flight, which may change whose turn it is"
        )
        for place in paused:
            victim, in_flight = before[place]
            assert not in_flight and not victim.request.sampling.uses_beams, (
                "a sequence was paused that has rows in flight or uses beams"
            )
            for other_place, (other, in_flight) in enumerate(before):
                if other_place in paused or in_flight or other.request.sampling.uses_beams:
                    continue
                ranks = [(one.request.priority, -at) for one, at in ((victim, place), (other, other_place))]
                assert ranks[0] < ranks[1], (
                    "a sequence of lower priority, or one that started later, was not paused"
                )

    def _run(self, flight: BatchInFlight) -> None:
        may_be_late = self.scenario.is_pipelined or flight.batch.samples_on_device
        is_early = flight.planned_error and not (may_be_late and self._device.breaks_down_late())
        with _failures_kept(flight):
            if is_early:
                self._device.break_down(flight.batch)
            flight.logits = self._device.begin(flight.batch, flight.is_behind_failure)

    def _decode(self, flight: BatchInFlight) -> None:
        if flight.outcome is not None:
            return
        assert flight.logits is not None
        with _failures_kept(flight):
            if flight.planned_error is not None:
                self._device.break_down_late(flight.batch, flight.logits)
            flight.outcome = self._device.decode(flight.batch, flight.logits)

    def _come_back(self, flight: BatchInFlight) -> None:
        self._decode(flight)
        if isinstance(flight.outcome, InflightError):
            self._fail(flight, flight.outcome)
            return
        assert flight.outcome is not None
        self.outcome.count_drafts(flight.batch, flight.outcome)
        live = self.blame.fail_rows(flight)
        self.accounts.updates(flight, live)
        responses = self.scheduler.update(
            flight.batch, flight.outcome, now_ns=time_of_answer(self._iteration)
        )
        self.cache.is_complete &= (
            not flight.outcome.failures
        )  # blocks computed by such a row are not published
        self.cache.updated(live)
        self._answered(responses)

    def _fail(self, flight: BatchInFlight, error: InflightError) -> None:
        convicted = self.blame.failed(flight, behind=self._in_flight)
        # The contents of a faulty request's blocks may be the cause: no request may reuse them.
        self.cache.is_complete &= not convicted
        kv_cache = self.scheduler.kv_cache
        suspicious = [
            block_id
            for llm_request in self.scheduler.running_sequences
            if llm_request.request_id in convicted
            for block_id in kv_cache.block_table(llm_request.key)
            if kv_cache.pool.is_held_once(block_id)
        ]
        responses = self.scheduler.fail(flight.batch, error)
        assert not kv_cache.pool._contents.keys() & set(suspicious), "a faulty request's blocks can be found"
        self._answered(responses)

    def _answered(self, responses: list[Response]) -> None:
        self.queue.settle()
        self.accounts.answered(responses)
        self.outcome.record(self._iteration, responses)

    # ---------------------------------------------------------------- checks of batches

    def _check_batch(self, flight: BatchInFlight) -> None:
        batch, outcome = flight.batch, self.outcome
        assert 0 < batch.num_tokens <= self.scenario.config.max_num_tokens
        for chunk in batch.context:
            end = chunk.start + len(chunk.token_ids)
            is_boundary = end % self.scenario.limits.tokens_per_block == 0
            assert chunk.is_last or is_boundary or self.scenario.limits.has_spans, (
                "a chunk ends inside a block"
            )
        outcome.count(batch)
        self.stages.check(flight, ahead=list(self._in_flight)[:-1])


@contextmanager
def _failures_kept(flight: BatchInFlight) -> Generator[None, None, None]:
    """Store a planned or allowed failure as the batch's outcome, instead of raising it."""
    try:
        yield
    except Breakdown:
        flight.outcome = flight.planned_error
    except (AssertionError, KeyError, IndexError) as error:
        if not (flight.is_spoiled or flight.planned_error):
            raise
        flight.outcome = flight.planned_error or StepFailed(f"after a failed iteration: {error!r}")

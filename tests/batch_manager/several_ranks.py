"""A scenario of the simulation run by several GptManagers in step, each with a scheduler and a device.

Followers lag behind their leader by varying amounts. The leader's device publishes the outcome of each batch,
as the sampling rank does; a follower's device must compute the same.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from inflight.batch_manager import GptManager
from inflight.batch_manager.instruments import Instruments
from inflight.batch_manager.statistics_rings import StatisticsRings
from inflight.core.ports import Ranks
from inflight.core.report.stats import IterationCounts, RequestCountsOfIteration
from inflight.core.request.request import IterationInput, Request
from inflight.core.request.response import Response
from inflight.core.request.stop import StopSignal
from inflight.core.schedule.batch import EngineLimits, ModelOutput, ScheduledBatch
from inflight.core.scheduler import Scheduler
from inflight.errors import InflightError, StepFailed, Unavailable
from inflight.testing.fake_engine import FakeEngine, FakeLogits
from inflight.testing.simulation.host_cache import HostCache
from inflight.testing.simulation.scenario import Scenario
from tests.batch_manager.ranks_in_memory import make_ranks

ROUNDS, GAP = 2, 150
"""Rounds of the scenario's requests, with enough time in between for all ranks to fall asleep."""

Outcomes = dict[int, ModelOutput | InflightError]
"""Outcomes of the leader's batches, by iteration."""


class LeadersDevice(FakeEngine):
    """A device that fails as planned by the scenario, and publishes each batch's outcome."""

    def __init__(self, scenario: Scenario, told: Outcomes) -> None:
        super().__init__(scenario.limits)
        self._scenario = scenario
        self._told = told
        self._rng = random.Random(scenario.seed)
        self._requests: dict[int, int] = {}  # by slot
        self._fails_late: dict[int, InflightError] = {}  # by iteration

    def forward(self, batch: ScheduledBatch) -> FakeLogits:
        self._requests |= {start.slot: start.request.request_id for start in batch.starts}
        self._requests |= {move.slot: self._requests[move.parent_slot] for move in batch.moves}
        error = self._planned(batch)
        try:
            logits = super().forward(batch)
        except (AssertionError, LookupError) as raised:
            self._told[batch.iteration] = StepFailed(f"behind a failure: {raised!r}")
            raise self._told[batch.iteration] from raised
        if error and self._rng.random() < 0.5:
            self._told[batch.iteration] = error
            raise error
        if error:
            self._fails_late[batch.iteration] = error
        return logits

    def _planned(self, batch: ScheduledBatch) -> InflightError | None:
        breakdowns, at = self._scenario.breakdowns, batch.iteration % GAP
        slots = {*(chunk.slot for chunk in batch.context), *batch.generation_slots}
        if at in breakdowns.unusable:
            return Unavailable("the device is lost")
        is_faulty = any(self._requests.get(slot, 0) % 100 in breakdowns.faulty for slot in slots)
        return StepFailed("planned") if is_faulty or at in breakdowns.transient else None

    def decode(self, batch: ScheduledBatch, logits: FakeLogits) -> ModelOutput:
        try:
            if error := self._fails_late.pop(batch.iteration, None):
                raise error
            output = super().decode(batch, logits)
        except InflightError as raised:
            self._told[batch.iteration] = raised
            raise
        except LookupError as raised:
            self._told[batch.iteration] = StepFailed(f"behind a failure: {raised!r}")
            raise self._told[batch.iteration] from raised
        self._told[batch.iteration] = output
        return output


class FollowersDevice(FakeEngine):
    """A device that checks its outcome of a batch against the leader's before it raises."""

    def __init__(self, limits: EngineLimits, told: Outcomes) -> None:
        super().__init__(limits)
        self._told = told

    def forward(self, batch: ScheduledBatch) -> FakeLogits | None:
        try:
            return super().forward(batch)
        except (AssertionError, LookupError):
            return None

    def decode(self, batch: ScheduledBatch, logits: FakeLogits | None) -> ModelOutput:
        outcome = self._told[batch.iteration]
        if isinstance(outcome, InflightError):
            raise outcome
        assert logits is not None, "only here it failed"
        assert super().decode(batch, logits) == outcome
        return outcome


class WatchedScheduler(Scheduler):
    """A scheduler that records its decisions.

    Attributes:
        batches, responses: In order.
    """

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario.config, scenario.limits)
        self.batches: list[ScheduledBatch] = []
        self.responses: list[Response] = []

    def accept(self, inputs: IterationInput) -> list[Response]:
        return self._kept(super().accept(inputs))

    def schedule(self) -> ScheduledBatch | None:
        batch = super().schedule()
        if batch is not None:
            self.batches.append(batch)
        return batch

    def update(self, batch: ScheduledBatch, output: ModelOutput, now_ns: int = 0) -> list[Response]:
        return self._kept(super().update(batch, output, now_ns))

    def fail(self, batch: ScheduledBatch, error: InflightError) -> list[Response]:
        return self._kept(super().fail(batch, error))

    def _kept(self, responses: list[Response]) -> list[Response]:
        self.responses += responses
        return responses


@dataclass
class Rank:
    """One rank.

    Attributes:
        told: Statistics as JSON, in order.
        sent: Responses sent to clients.
    """

    scheduler: WatchedScheduler
    rings: StatisticsRings
    manager: GptManager
    told: list[str] = field(default_factory=list)
    sent: list[Response] = field(default_factory=list)

    def statistics(self) -> tuple[list[IterationCounts], list[RequestCountsOfIteration]]:
        """Return the statistics of every iteration, without durations."""
        kept = [each.stats for each in self.rings.latest()]
        assert all(stats.duration_ns >= 0 for stats in kept)
        iterations = [replace(stats, duration_ns=0) for stats in kept]
        return iterations, self.rings.latest_requests()


class _Clients:
    """The leader's clients, whose requests and stops arrive in the scenario's steps."""

    def __init__(self, scenario: Scenario) -> None:
        self.step = -1
        self.now_ns = 10**9
        self._scenario = scenario

    def get(self, max_num_requests: int) -> list[Request]:
        self.step += 1
        return [self._made(request) for request in self._arrivals()]

    def _arrivals(self) -> tuple[Request, ...]:
        return self._scenario.arrivals.get(self.step % GAP, ()) if self.step < ROUNDS * GAP else ()

    def _made(self, request: Request) -> Request:
        return replace(
            request,
            request_id=request.request_id + self.step // GAP * 100,
            arrival_time_ns=self.now_ns,
            allotted_time_ms=request.allotted_time_ms,
        )

    def poll(self) -> list[StopSignal]:
        signals = self._scenario.stops.get(self.step % GAP, ())
        offset = self.step // GAP * 100
        return [replace(signal, request_id=signal.request_id + offset) for signal in signals]

    def clock_ns(self) -> int:
        self.now_ns += 2_000_003
        return self.now_ns


def run_in_step(scenario: Scenario, num_ranks: int) -> list[Rank]:
    """Run the scenario on `num_ranks` ranks, or on a single one, until it is idle."""
    told: Outcomes = {}
    in_memory = make_ranks(num_ranks)
    clients = _Clients(scenario)
    leader = _leader(scenario, told, clients, in_memory[0] if num_ranks > 1 else None)
    followers = [_follower(scenario, told, ranks) for ranks in in_memory[1:]]
    rng = random.Random(scenario.seed)
    for step in itertools.count():
        leader.manager.step()
        is_over = step >= ROUNDS * GAP and not leader.scheduler.num_active
        for ranks, follower in zip(in_memory[1:], followers):
            lag = 0 if is_over else rng.choice([0, 0, 2])
            while ranks.num_unheard > lag:
                follower.manager.step()
        if is_over:
            return [leader, *followers]
        assert step < 5000, "it does not come to an end"
    raise AssertionError


def _leader(scenario: Scenario, told: Outcomes, clients: _Clients, ranks: Ranks | None) -> Rank:
    scheduler, rings = WatchedScheduler(scenario), StatisticsRings(10_000, 10_000)
    stats: list[str] = []
    sent: list[Response] = []
    manager = GptManager(
        LeadersDevice(scenario, told),
        scheduler,
        clients.get,
        sent.append,
        clients.poll,
        stats.append,
        instruments=Instruments(rings=rings),
        clock_ns=clients.clock_ns,
        ranks=ranks,
        adapters=HostCache(scenario.seed),
        start=False,
    )
    return Rank(scheduler, rings, manager, stats, sent)


def _follower(scenario: Scenario, told: Outcomes, ranks: Ranks) -> Rank:
    """Make a follower, which has no clients and ignores its clock."""
    scheduler, rings = WatchedScheduler(scenario), StatisticsRings(10_000, 10_000)
    stats: list[str] = []
    sent: list[Response] = []
    manager = GptManager(
        FollowersDevice(scenario.limits, told),
        scheduler,
        _never,
        sent.append,
        _never,
        stats.append,
        instruments=Instruments(rings=rings),
        clock_ns=_never,
        ranks=ranks,
        start=False,
    )
    return Rank(scheduler, rings, manager, stats, sent)


def _never(*_: object) -> Iterator[None]:
    raise AssertionError("a follower asks nobody but its leader")

"""Random runs in which `schedule` itself raises, at any line of the core or for a chosen request.

Every other request must have the same result as alone, and the scheduler's records must agree afterwards.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import inflight.core
from inflight.core.kv.kv_cache_manager import KvCacheManager
from inflight.core.request.llm_request import LlmRequest
from inflight.core.schedule.admission import Admission
from inflight.core.schedule.batch_builder import BatchBuilder
from inflight.core.schedule.micro_batch_scheduler import MicroBatchScheduler
from inflight.core.schedule.running import Running
from inflight.core.scheduler import Scheduler
from inflight.errors import StepFailed, Unavailable
from inflight.testing.fake_engine import FakeEngine
from inflight.testing.simulation.endings import check_endings
from inflight.testing.simulation.host_cache import HostCache, with_adapters
from inflight.testing.simulation.integrity import check_integrity
from inflight.testing.simulation.outcome import RunOutcome
from inflight.testing.simulation.scenario import Breakdowns, Scenario, draw, time_of_answer
from tests.tiers import examples, with_all

CORE = str(Path(inflight.core.__file__).parent)
MAX_ITERATIONS = 3000
PLANTED = StepFailed("planted")


class Planted(Exception):
    """A planted exception of the scheduler."""


class RandomLines:
    """A tracer that sometimes makes `schedule` raise before any line of the core.

    Args:
        rng: Chooses the lines.
        most: Maximum number of exceptions.
    """

    def __init__(self, rng: random.Random, most: int) -> None:
        self._rng = rng
        self._left = most
        self._countdown = rng.randint(1, 3000)
        self.places: list[tuple[str, int]] = []

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Trace during one call."""
        before = sys.gettrace()
        if self._left:
            sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(before)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        if not frame.f_code.co_filename.startswith(CORE):
            return None
        if event == "line" and self._left:
            self._countdown -= 1
            if self._countdown == 0:
                self._left -= 1
                self._countdown = self._rng.randint(1, 3000)
                self.places.append((Path(frame.f_code.co_filename).name, frame.f_lineno))
                raise Planted
        return self._trace


class Run:
    """A run of a scenario on a scheduler that may raise.

    Attributes:
        outcome: Its outcome; `convicted` has the requests that ended with the scheduler's error.
        num_faults: Number of exceptions of `schedule`.
        num_crowded: Number of those with several running requests.
    """

    def __init__(self, scenario: Scenario, lines: RandomLines | None = None) -> None:
        self.scenario = scenario
        self.scheduler = Scheduler(scenario.config, scenario.limits)
        self._adapters = HostCache(scenario.seed)
        self.outcome = RunOutcome(adapters=self._adapters.given, without_adapter=self._adapters.failed)
        self.num_faults = self.num_crowded = 0
        self._lines = lines
        self._engine = FakeEngine(scenario.limits)
        self._in_flight: deque[tuple[Any, Any]] = deque()
        self._lone: set[int] = set()

    def to_the_end(self) -> RunOutcome:
        """Run to the end, with checks in every iteration and at the end."""
        iteration = 0
        while iteration <= self.scenario.last_event or self.scheduler.num_active or self._in_flight:
            assert iteration < MAX_ITERATIONS, "the scheduler makes no progress"
            self._step(iteration)
            iteration += 1
        assert self.scheduler.kv_cache.pool.num_held == self.scheduler.kv_cache.num_reserved == 0
        check_endings(self.scenario, self.outcome)
        return self.outcome

    def _step(self, iteration: int) -> None:
        """Run one iteration, as `GptManager.step` does."""
        scheduler = self.scheduler
        inputs = with_adapters(self._adapters, self.scenario.inputs(iteration), scheduler.is_active)
        responses = scheduler.accept(inputs)
        self.outcome.refused |= {
            r.request_id
            for r in responses
            if isinstance(r.error, Unavailable) and r.request_id not in self.scenario.invalid
        }
        running = {sequence.request_id for sequence in scheduler.running_sequences}
        try:
            with self._lines.armed() if self._lines else _unarmed():
                batch = scheduler.schedule()
        except Planted:
            self.num_faults += 1
            self.num_crowded += len(running) > 1
            recovered = scheduler.recover(PLANTED, len(self._in_flight))
            responses += recovered
            self._note_convicted(recovered, running)
            batch = None
        check_integrity(scheduler)
        if batch is not None:
            self._in_flight.append((batch, self._engine.forward(batch)))
        for _ in range(self.scenario.limits.num_due(len(self._in_flight), batch)):
            batch, logits = self._in_flight.popleft()
            output = self._engine.decode(batch, logits)
            responses += scheduler.update(batch, output, now_ns=time_of_answer(iteration))
        check_integrity(scheduler)
        self.outcome.record(iteration, responses)

    def _note_convicted(self, responses: list[Any], running: set[int]) -> None:
        convicted = {r.request_id for r in responses if r.error is PLANTED}
        self.outcome.convicted |= convicted
        assert not convicted or running <= convicted, "somebody else may have been at fault"


@contextmanager
def _unarmed() -> Iterator[None]:
    yield


def scenario_of(seed: int) -> Scenario:
    """Draw a scenario without device failures, with one of the possible kinds of batches in flight."""
    kind = (
        Scenario.in_turn,
        Scenario.ahead,
        lambda s: s.ahead().without_host_waits(),
        lambda s: s.pipelined(2),
    )
    scenario = replace(kind[seed % 4](draw(seed)), breakdowns=Breakdowns())
    # Earlier cache hits of a restarted request are not counted.
    arrivals = {
        at: tuple(replace(r, output=replace(r.output, return_perf_metrics=False)) for r in requests)
        for at, requests in scenario.arrivals.items()
    }
    return replace(scenario, arrivals=arrivals)


@pytest.mark.parametrize("seeds", with_all([range(75), range(75, 400)], [range(75)]), ids=str)
def test_a_fault_at_any_line_of_the_core_changes_no_result(seeds):
    num_faults, num_crowded, places = 0, 0, set()
    for seed in seeds:
        rng = random.Random(seed)
        lines = RandomLines(rng, most=rng.randint(1, 4))
        run = Run(scenario_of(seed), lines)
        run.to_the_end()
        num_faults += run.num_faults
        num_crowded += run.num_crowded
        places.update(lines.places)
    assert num_crowded > len(seeds) // 4
    assert len(places) > 100 and len({name for name, _ in places}) > 10, "the faults are all in one place"


# ---------------------------------------------------------------- one request for which it always raises


SITES: dict[str, tuple[type, str, Callable[..., list[Any]]]] = {
    "admission": (Admission, "blocks_needed", lambda self, one: [one]),
    "start": (Running, "start", lambda self, one, num_reused: [one]),
    "selection": (MicroBatchScheduler, "select", lambda self, running, num_in_flight=0: list(running)),
    "context": (BatchBuilder, "_add_chunk", lambda self, one, num_rows: [one]),
    "blocks": (KvCacheManager, "extend", lambda self, key, num_tokens, in_generation=False: [key]),
}
"""Methods of the core that raise, with the sequences, or their keys, in their arguments."""


class Defect:
    """A method of the core that raises for one request from a position on.

    Args:
        site: The method.
        is_late: Whether it raises after its work instead of before.
        run: The run.
        faulty: The request.
        position: First position of the request's next token at which it raises.
    """

    def __init__(self, site: str, is_late: bool, run: Run, faulty: int, position: int) -> None:
        self._owner, self._name, self._about = SITES[site]
        self._original = getattr(self._owner, self._name)
        self._is_late, self._run, self._faulty, self._position = is_late, run, faulty, position

    def plant(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace the method."""

        def planted(core: Any, *arguments: Any) -> Any:
            fails = any(self._is_at_fault(one) for one in self._about(core, *arguments))
            if fails and not self._is_late:
                raise Planted
            result = self._original(core, *arguments)
            if fails:
                raise Planted
            return result

        monkeypatch.setattr(self._owner, self._name, planted)

    def _is_at_fault(self, one: LlmRequest | int) -> bool:
        if isinstance(one, int):
            groups = self._run.scheduler._groups.values()
            one = next(s for group in groups for s in group.sequences if s.key == one)
        return one.request_id == self._faulty and one.next_position >= self._position


@pytest.mark.parametrize("is_late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("site", with_all(SITES, ["admission", "blocks"]))
def test_only_the_request_that_makes_schedule_raise_ends(site, is_late):
    num_seeds = examples(fast=40, all=100)
    num_convicted = num_crowded = 0
    for seed in range(num_seeds):
        scenario = scenario_of(seed)
        rng = random.Random(seed)
        faulty = rng.choice([i for i in scenario.requests if i not in scenario.invalid] or [0])
        run = Run(scenario)
        defect = Defect(site, is_late, run, faulty, position=rng.choice([0, rng.randrange(20)]))
        with pytest.MonkeyPatch.context() as monkeypatch:
            defect.plant(monkeypatch)
            outcome = run.to_the_end()
        assert outcome.convicted <= {faulty}
        num_convicted += len(outcome.convicted)
        num_crowded += run.num_crowded
    assert num_convicted > num_seeds // 10 and num_crowded > num_seeds // 40, (num_convicted, num_crowded)

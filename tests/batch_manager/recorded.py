"""Recorded runs of the simulation: the loop's calls of a scheduler and a fake engine, without its thread."""

from __future__ import annotations

import io
from collections import deque
from dataclasses import replace
from pathlib import Path

from inflight.batch_manager.recording import Begin, End, Header, JsonRecorder, Record, Trace, decode, encode
from inflight.batch_manager.replay import run
from inflight.config import SchedulingConfig
from inflight.core.request.request import IterationInput, Request
from inflight.core.request.response import Response
from inflight.core.schedule.batch import EngineLimits, ModelOutput, ScheduledBatch
from inflight.core.scheduler import Scheduler
from inflight.errors import StepFailed, Unavailable
from inflight.testing.fake_engine import FakeEngine, FakeLogits
from inflight.testing.fake_model import expected_tokens
from inflight.testing.simulation.host_cache import HostCache, with_adapters
from inflight.testing.simulation.scenario import Scenario

ERRORS = StepFailed("it does not work"), Unavailable("the device is gone")
ROUNDS = 3  # of the scenario's requests, with idle time in between
GAP = 400
LIMITS = EngineLimits(
    vocab_size=50, max_sequence_length=100, max_num_sequences=4, num_blocks=64, tokens_per_block=4
)


def record_run(scenario: Scenario, path: Path, keep_logits: bool = False) -> list[Response]:
    """Run `scenario` `ROUNDS` times on one server, record it, and return every response."""
    recorder = JsonRecorder(str(path), scenario.config, scenario.limits, keep_logits)
    scheduler, engine = Scheduler(scenario.config, scenario.limits), FakeEngine(scenario.limits)
    adapters = HostCache(scenario.seed)
    in_flight: deque[tuple[ScheduledBatch, FakeLogits]] = deque()
    all_responses: list[Response] = []
    iteration = 0
    while iteration < GAP * ROUNDS or scheduler.num_active:
        was_active = scheduler.num_active > 0
        inputs = _inputs(scenario, iteration)
        if was_active or inputs.new_requests:
            inputs = with_adapters(adapters, inputs, scheduler.is_active)
        responses = scheduler.accept(inputs)
        batch = scheduler.schedule()
        if was_active or inputs.new_requests:  # the loop's rule
            recorder.begin(inputs, batch)
        if batch is not None:
            in_flight.append((batch, engine.forward(batch)))
        for _ in range(scenario.limits.num_due(len(in_flight), batch)):
            oldest, logits = in_flight.popleft()
            output = engine.decode(oldest, logits)
            responses += _come_back(scenario, scheduler, recorder, oldest, output)
        all_responses += responses
        iteration += 1
        assert iteration < 10_000, "the scheduler makes no progress"
    recorder.close()
    return all_responses


def _inputs(scenario: Scenario, iteration: int) -> IterationInput:
    round_, at = divmod(iteration, GAP)
    now_ns = 3_000_003 * iteration + 1
    if round_ >= ROUNDS:
        return IterationInput(iteration, now_ns)
    requests = tuple(_with_arrival(request, now_ns, round_) for request in scenario.arrivals.get(at, ()))
    return IterationInput(iteration, now_ns, requests, tuple(scenario.stops.get(at, ())))


def _with_arrival(request: Request, now_ns: int, round_: int) -> Request:
    """Copy a request with a new arrival; in the later rounds every third one has a short deadline."""
    hurried = round_ > 0 and request.request_id % 3 == 0
    return replace(request, arrival_time_ns=now_ns, allotted_time_ms=20 if hurried else 0)


def _come_back(
    scenario: Scenario,
    scheduler: Scheduler,
    recorder: JsonRecorder,
    batch: ScheduledBatch,
    output: ModelOutput,
) -> list[Response]:
    now_ns = 3_000_003 * batch.iteration + 2
    if batch.iteration in scenario.breakdowns.transient:
        error = ERRORS[batch.iteration % 2]
        recorder.end(error, now_ns)
        return scheduler.fail(batch, error)
    recorder.end(output, now_ns)
    return scheduler.update(batch, output, now_ns)


END_ID = min(set(range(50)).difference(*(expected_tokens((number,) * 6, 5, 50) for number in (1, 2, 3))))


def simple_trace(path, unanswered: bool = False) -> None:
    """A trace of three requests of 6 prompt and 5 new tokens, with an end id that is never generated."""
    requests = tuple(Request(number, (number,) * 6, 5, end_ids=(END_ID,)) for number in (1, 2, 3))
    config = SchedulingConfig(max_num_tokens=18)
    scheduler, engine = Scheduler(config, LIMITS), FakeEngine(LIMITS)
    recorder = JsonRecorder(str(path), config, LIMITS)
    for iteration in range(5):
        inputs = IterationInput(iteration, iteration + 1, requests if iteration == 0 else ())
        scheduler.accept(inputs)
        batch = scheduler.schedule()
        recorder.begin(inputs, batch)
        if unanswered and iteration == 3:
            break
        output = engine.decode(batch, engine.forward(batch))
        recorder.end(output, iteration + 2)
        scheduler.update(batch, output, iteration + 2)
    recorder.close()


def read(path: Path) -> tuple[Header, list[Begin | End]]:
    """A trace's records."""
    with path.open("rb") as file:
        trace = Trace(file)
        return trace.header, list(trace)


def raw_records(path: Path) -> list[Record]:
    """Return a trace's records as JSON values, header first, with logits as they were written."""
    return [decode(line) for line in path.read_bytes().splitlines()]


def write(path: Path, records: list[Record]) -> None:
    """Write a trace of `records`, in the form of `raw_records`."""
    path.write_bytes(b"".join(map(encode, records)))


def outcome(path, until: int | None = None, verbose: bool = False) -> tuple[int, str]:
    """Run the program and return its exit code and report."""
    report = io.StringIO()
    with path.open("rb") as file:
        return run(Trace(file), io.StringIO(), report, until, is_verbose=verbose), report.getvalue()

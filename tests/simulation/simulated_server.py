"""A whole server without model, threads or clock: scheduler and fake engine, driven by one random seed.

`draw(seed)` makes a configuration and a set of requests. `run` runs them to the end and checks, after every step,
that blocks and slots are conserved, chunks end on block boundaries and nobody is overtaken; at the end, that every
stop was answered in its iteration, every request had exactly one final response and the tokens it would have had
alone.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from inflight.core.batch import EngineLimits, ModelOutput, ScheduledBatch
from inflight.core.config import CapacitySchedulerPolicy, SchedulerConfig
from inflight.core.output_config import OutputConfig
from inflight.core.request import IterationInput, Request
from inflight.core.response import Response
from inflight.core.sampling_config import SamplingConfig
from inflight.core.scheduler import Scheduler
from inflight.core.stop import FinishReason, StopSignal
from inflight.errors import StepFailed
from inflight.testing.fake_engine import FakeEngine, expected_tokens

VOCABULARY = 23
PLANNED_FAILURE = StepFailed("planned")


@dataclass(frozen=True)
class Scenario:
    """What one seed draws."""

    seed: int
    limits: EngineLimits
    config: SchedulerConfig
    depth: int  # batches in flight: 1 is the plain loop, 2 schedules ahead of the device
    arrivals: dict[int, list[Request]]
    stops: dict[int, list[StopSignal]]
    requests: dict[int, Request]
    failures: frozenset[int]  # iterations whose batch comes back as an error


@dataclass
class Outcome:
    """What a run did, over and above the tokens, which `run` has checked."""

    responses: dict[int, list[Response]] = field(default_factory=dict)
    final_iterations: dict[int, int] = field(default_factory=dict)
    started: list[int] = field(default_factory=list)  # request ids, in order of their first start
    num_iterations: int = 0
    num_pauses: int = 0
    num_reused_blocks: int = 0
    num_chunks: int = 0
    max_rows: int = 0


def draw(seed: int) -> Scenario:
    """A scenario in which every request can run, but rarely all at once."""
    rng = random.Random(seed)
    tokens_per_block = rng.choice([1, 2, 3, 4, 8])
    requests = _draw_requests(rng)
    longest = max(request.max_kv_tokens for request in requests)
    num_sequences = rng.randint(1, 6)
    num_blocks = -(-longest // tokens_per_block) + rng.choice([0, 1, 3, 10, 40])
    chunked = rng.random() < 0.5
    needed = num_sequences - 1 + tokens_per_block
    if not chunked:
        needed = max(num_sequences, tokens_per_block, *(request.prompt_length for request in requests))
    limits = EngineLimits(VOCABULARY, 200, num_sequences, num_blocks, tokens_per_block)
    config = SchedulerConfig(
        policy=rng.choice(list(CapacitySchedulerPolicy)),
        max_num_tokens=needed + rng.choice([0, 1, 5, 100]),
        enable_chunked_context=chunked,
        enable_kv_cache_reuse=rng.random() < 0.7,
    )
    window = rng.choice([0, 3, 30])
    arrivals: dict[int, list[Request]] = {}
    stops: dict[int, list[StopSignal]] = {}
    for request in requests:
        arrival = rng.randint(0, window)
        arrivals.setdefault(arrival, []).append(request)
        if rng.random() < 0.2:
            stops.setdefault(arrival + rng.randint(0, 20), []).append(StopSignal(request.request_id))
    by_id = {request.request_id: request for request in requests}
    failures = frozenset(rng.sample(range(40), 3)) if rng.random() < 0.2 else frozenset()
    return Scenario(seed, limits, config, rng.choice([1, 1, 2]), arrivals, stops, by_id, failures)


def _draw_requests(rng: random.Random) -> list[Request]:
    prefixes = [[rng.randrange(VOCABULARY) for _ in range(rng.randint(0, 24))] for _ in range(2)]
    requests = []
    for request_id in range(1, rng.randint(2, 9)):
        prompt = rng.choice(prefixes) + [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 6))]
        sampled = rng.random() < 0.3
        requests.append(
            Request(
                request_id,
                tuple(prompt),
                rng.randint(1, 20),
                streaming=rng.random() < 0.6,
                end_ids=(rng.randrange(VOCABULARY),) if rng.random() < 0.5 else (),
                sampling=SamplingConfig(top_k=3, random_seed=rng.randrange(5))
                if sampled
                else SamplingConfig(),
                output=OutputConfig(exclude_input_from_output=rng.random() < 0.5),
            )
        )
    return requests


def run(scenario: Scenario) -> Outcome:
    """Run to the end; AssertionError on any broken promise."""
    outcome = Outcome()
    scheduler = Scheduler(scenario.config, scenario.limits)
    engine = FakeEngine(scenario.limits)
    in_flight: deque[tuple[ScheduledBatch, ModelOutput]] = deque()
    last_arrival = max((*scenario.arrivals, *scenario.stops))
    iteration = 0
    while iteration <= last_arrival or scheduler.num_active:
        assert iteration < 5000, "the scheduler makes no progress"
        _record(outcome, iteration, scheduler.accept(_inputs(scenario, iteration)))
        batch = scheduler.schedule()
        if batch is not None:
            in_flight.append((batch, engine.decode(batch, engine.forward(batch))))
            _observe(outcome, scenario, scheduler, batch)
        if in_flight and (batch is None or len(in_flight) == scenario.depth):
            _record(outcome, iteration, _come_back(scenario, scheduler, *in_flight.popleft()))
        scheduler.check_integrity()
        iteration += 1
    assert scheduler.kv_cache.pool.num_held == 0, "blocks leaked"
    outcome.num_iterations = iteration
    outcome.num_reused_blocks = scheduler.kv_cache.num_reused_blocks
    _check(scenario, outcome)
    return outcome


def _come_back(
    scenario: Scenario, scheduler: Scheduler, batch: ScheduledBatch, output: ModelOutput
) -> list[Response]:
    if batch.iteration in scenario.failures:
        return scheduler.fail(batch, PLANNED_FAILURE)
    return scheduler.update(batch, output)


def _inputs(scenario: Scenario, iteration: int) -> IterationInput:
    requests = tuple(scenario.arrivals.get(iteration, ()))
    return IterationInput(iteration, iteration, requests, tuple(scenario.stops.get(iteration, ())))


def _observe(outcome: Outcome, scenario: Scenario, scheduler: Scheduler, batch: ScheduledBatch) -> None:
    assert 0 < batch.num_tokens <= scenario.config.max_num_tokens
    outcome.num_pauses += scheduler.stats(batch).num_paused_requests
    outcome.num_chunks += sum(not chunk.is_last for chunk in batch.context)
    outcome.max_rows = max(outcome.max_rows, batch.num_rows)
    outcome.started += [start.request_id for start in batch.starts if start.request_id not in outcome.started]
    for chunk in batch.context:
        end = chunk.start + len(chunk.token_ids)
        assert chunk.is_last or end % scenario.limits.tokens_per_block == 0, "a chunk ends inside a block"


def _record(outcome: Outcome, iteration: int, responses: list[Response]) -> None:
    for response in responses:
        earlier = outcome.responses.setdefault(response.request_id, [])
        assert not (earlier and earlier[-1].is_final), "a response after the final one"
        earlier.append(response)
        if response.is_final:
            outcome.final_iterations[response.request_id] = iteration


def _check(scenario: Scenario, outcome: Outcome) -> None:
    arrived = [
        request.request_id for _, requests in sorted(scenario.arrivals.items()) for request in requests
    ]
    assert outcome.started == sorted(outcome.started, key=arrived.index), "a request was overtaken"
    for iteration, signals in scenario.stops.items():
        for signal in signals:
            assert outcome.final_iterations[signal.request_id] <= iteration, "a stop was not heeded at once"
    for request in scenario.requests.values():
        responses = outcome.responses[request.request_id]
        assert responses[-1].is_final and sum(response.is_final for response in responses) == 1
        assert all(response.error is None for response in responses[:-1])
        assert request.streaming or len(responses) == 1
        results = [response.result for response in responses if response.result]
        received = [token for result in results for token in result.output_token_ids]
        alone, reason = run_alone(request)
        final = responses[-1].result
        if final is None or final.finish_reason is FinishReason.CANCELLED:
            assert scenario.failures if final is None else final.output_token_ids == ()
            assert received == alone[: len(received)]
            continue
        assert final.finish_reason is reason
        echoed = not (request.streaming or request.output.exclude_input_from_output)
        assert received == (list(request.input_token_ids) if echoed else []) + alone


def run_alone(request: Request) -> tuple[list[int], FinishReason]:
    """The tokens of a request that has the server to itself, by the fake engine's own definition."""
    tokens = expected_tokens(request.input_token_ids, request.max_new_tokens, VOCABULARY, request.sampling)
    for position, token in enumerate(tokens):
        if token in request.end_ids:
            return tokens[:position], FinishReason.END_ID
    return tokens, FinishReason.LENGTH


def scenarios(seeds: range) -> Iterator[Scenario]:
    """One scenario a seed."""
    return map(draw, seeds)

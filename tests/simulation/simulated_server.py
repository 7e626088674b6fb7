"""A whole server without model, threads or clock: scheduler and fake engine, driven by one random seed.

`run` runs a scenario to the end and checks, after every step, that blocks and slots are conserved, chunks end on
block boundaries and nobody is overtaken; at the end, that every stop was answered in its iteration, every request
had exactly one final response, every sequence one last result, and all of them what they would have had alone.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from inflight.core.batch import ModelOutput, ScheduledBatch
from inflight.core.request import IterationInput, Request
from inflight.core.response import Response, Result, merge_responses
from inflight.core.scheduler import Scheduler
from inflight.core.stop import FinishReason
from inflight.errors import StepFailed
from inflight.testing.fake_engine import FakeEngine

from .alone import compare_context, compare_outputs, search_alone, sequence_alone
from .scenario import Scenario

PLANNED_FAILURE = StepFailed("planned")


@dataclass
class Outcome:
    """What a run did, over and above the outputs, which `run` has checked."""

    responses: dict[int, list[Response]] = field(default_factory=dict)
    final_iterations: dict[int, int] = field(default_factory=dict)
    started: list[int] = field(default_factory=list)  # request ids, in order of their first start
    num_iterations: int = 0
    num_pauses: int = 0
    num_reused_blocks: int = 0
    num_chunks: int = 0
    num_copies: int = 0
    num_lookups: int = 0
    num_accepted: int = 0
    num_rejected: int = 0
    num_mixed_batches: int = 0  # with beams of several widths, or beams beside other rows in generation
    max_rows: int = 0


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
            output = engine.decode(batch, engine.forward(batch))
            in_flight.append((batch, output))
            _observe(outcome, scenario, scheduler, batch, output)
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
    return scheduler.update(batch, output, now_ns=2 * batch.iteration + 2)


def _inputs(scenario: Scenario, iteration: int) -> IterationInput:
    requests = tuple(scenario.arrivals.get(iteration, ()))
    return IterationInput(iteration, 2 * iteration + 1, requests, tuple(scenario.stops.get(iteration, ())))


def _observe(
    outcome: Outcome, scenario: Scenario, scheduler: Scheduler, batch: ScheduledBatch, output: ModelOutput
) -> None:
    assert 0 < batch.num_tokens <= scenario.config.max_num_tokens
    outcome.num_pauses += scheduler.stats(batch).num_paused_requests
    outcome.num_chunks += sum(not chunk.is_last for chunk in batch.context)
    outcome.num_copies += len(batch.block_copies)
    outcome.max_rows = max(outcome.max_rows, batch.num_rows)
    for start in batch.starts:
        if start.request.request_id not in outcome.started:
            outcome.started.append(start.request.request_id)
    for chunk in batch.context:
        end = chunk.start + len(chunk.token_ids)
        assert chunk.is_last or end % scenario.limits.tokens_per_block == 0, "a chunk ends inside a block"
    widths = {len(group.slots) for group in batch.beam_groups if len(group.slots) > 1}
    others = set(batch.generation_slots).difference(*(group.slots for group in batch.beam_groups))
    outcome.num_mixed_batches += len(widths) > 1 or bool(widths and others)
    for slot, tokens in zip(batch.sampled_slots(), output.token_ids, strict=True):
        chunk = next((chunk for chunk in batch.context if chunk.slot == slot), None)
        if chunk is not None and chunk.num_draft_tokens:
            outcome.num_lookups += chunk.is_generation
            outcome.num_accepted += len(tokens) - 1
            outcome.num_rejected += chunk.num_draft_tokens - len(tokens) + 1


def _record(outcome: Outcome, iteration: int, responses: list[Response]) -> None:
    for response in responses:
        earlier = outcome.responses.setdefault(response.request_id, [])
        assert not (earlier and earlier[-1].is_final), "a response after the final one"
        earlier.append(response)
        if response.is_final:
            outcome.final_iterations[response.request_id] = iteration


# ---------------------------------------------------------------------- at the end


def _check(scenario: Scenario, outcome: Outcome) -> None:
    arrived = [
        request.request_id for _, requests in sorted(scenario.arrivals.items()) for request in requests
    ]
    assert outcome.started == sorted(outcome.started, key=arrived.index), "a request was overtaken"
    for iteration, signals in scenario.stops.items():
        for signal in signals:
            assert outcome.final_iterations[signal.request_id] <= iteration, "a stop was not heeded at once"
    for request in scenario.requests.values():
        _check_request(scenario, request, outcome.responses[request.request_id])


def _check_request(scenario: Scenario, request: Request, responses: list[Response]) -> None:
    assert [response.is_final for response in responses] == [False] * (len(responses) - 1) + [True]
    assert all(response.error is None for response in responses[:-1])
    failed = responses[-1].error is not None
    assert not failed or scenario.failures, responses[-1].error
    for index in range(request.sampling.num_sequences):
        mine = [response for response in responses if response.result and response.sequence_index == index]
        results = [response.result for response in mine if response.result]
        ends = [result.is_sequence_final for result in results]
        assert ends == [False] * (len(ends) - 1) + [True] or (failed and not any(ends))
        assert request.streaming or len(results) <= 1
        if not results:
            assert failed
        elif request.sampling.uses_beams:
            _check_search(scenario, request, results)
        else:
            _check_sequence(scenario, request, index, results, merge_responses(mine).result)


def _check_sequence(
    scenario: Scenario, request: Request, index: int, results: list[Result], whole: Result | None
) -> None:
    vocab_size = scenario.limits.vocab_size
    alone = sequence_alone(request, index, vocab_size)
    final = results[-1]
    _check_metrics(request, final)
    if not final.is_sequence_final or final.was_cut_short:
        received = [token for result in results for token in result.output_token_ids[0]]
        assert tuple(received) == alone.tokens[: len(received)]
        assert not final.was_cut_short or final.output_token_ids == ((),)
        return
    assert whole is not None and final.finish_reasons == (alone.reason,)
    compare_outputs(request, whole, [alone], vocab_size)
    compare_context(request, whole, vocab_size)
    for result in results[:-1]:
        assert result.finish_reasons == (FinishReason.NOT_FINISHED,)


def _check_search(scenario: Scenario, request: Request, results: list[Result]) -> None:
    """A streamed search says after every step what it would answer; its last response is its last step."""
    vocab_size = scenario.limits.vocab_size
    steps = search_alone(request, vocab_size)
    final = results[-1]
    _check_metrics(request, final)
    whole = [result for result in results if not result.was_cut_short]
    if final.is_sequence_final and not final.was_cut_short:
        assert final.finish_reasons == tuple(beam.reason for beam in steps[-1])
        assert len(whole) == (len(steps) if request.streaming else 1)
    for result, beams in zip(whole, steps if request.streaming else steps[-1:]):
        compare_outputs(request, result, beams, vocab_size)
    if whole:
        compare_context(request, whole[0], vocab_size)


def _check_metrics(request: Request, final: Result) -> None:
    metrics = final.perf_metrics
    assert (metrics is not None) == request.output.return_perf_metrics
    if metrics is None or not final.is_sequence_final or final.was_cut_short:
        return
    assert 0 < metrics.first_scheduled_time_ns < metrics.first_token_time_ns <= metrics.last_token_time_ns
    assert 0 <= metrics.num_accepted_draft_tokens <= metrics.num_draft_tokens
    assert metrics.num_new_blocks >= 0 and metrics.num_reused_blocks >= 0

"""Figures that `scripts/bench stream` computes from a trace and the times of responses."""

from __future__ import annotations

import pytest

from benchmarks.analyzer import Answer
from benchmarks.measuring.workload import BenchRequest
from benchmarks.stream import Lag, TokenTimes, draw, lag_of, summarize
from inflight.batch_manager.recording import Begin, End, Start
from inflight.core.request.request import IterationInput, Request
from inflight.core.schedule.batch import ContextChunk, ModelOutput, ScheduledBatch

MS = 1_000_000
FIRST, SECOND = (1, 2, 3), (4, 5)


def arriving(iteration: int, *requests: Request) -> IterationInput:
    return IterationInput(iteration, now_ns=0, new_requests=requests)


def prompt(slot: int, *token_ids: int) -> ContextChunk:
    return ContextChunk(slot, 0, token_ids, is_last=True)


def test_every_token_has_the_time_of_the_iteration_that_sampled_it() -> None:
    times = TokenTimes()
    context = ScheduledBatch(0, context=(prompt(7, *FIRST), prompt(3, *SECOND)))
    requests = Request(10, FIRST, 4, True), Request(11, SECOND, 4, True)
    times.read(
        [
            Begin(arriving(0, *requests), context, (Start(7, 10), Start(3, 11))),
            End(0, 100, ModelOutput(0, [(50,), (60,)])),
            Begin(arriving(1), ScheduledBatch(1, generation_slots=(3, 7))),
            End(1, 200, ModelOutput(1, [(61, 62), (51,)])),
        ]
    )
    assert times.of_prompt == {FIRST: [100, 200], SECOND: [100, 200, 200]}


def test_a_slot_belongs_to_the_request_that_started_in_it_last() -> None:
    times = TokenTimes()
    for iteration, (request_id, token_ids) in enumerate([(10, FIRST), (11, SECOND)]):
        batch = ScheduledBatch(iteration, context=(prompt(0, *token_ids),))
        inputs = arriving(iteration, Request(request_id, token_ids, 1, True))
        times.read([Begin(inputs, batch, (Start(0, request_id),))])
        times.read([End(iteration, 100 + iteration, ModelOutput(iteration, [(9,)]))])
    assert times.of_prompt == {FIRST: [100], SECOND: [101]}


def test_a_responses_wait_begins_with_its_oldest_token() -> None:
    chosen = [MS * time for time in (10, 20, 30, 40)]
    lag = lag_of([MS * time for time in (12, 35, 41)], [1, 2, 1], chosen)
    assert lag == Lag(waits_ms=(2.0, 15.0, 1.0), tokens=(1, 2, 1))


def test_sampled_tokens_missing_in_a_response_count_as_behind() -> None:
    assert lag_of([MS * 50], [1], [MS * time for time in (10, 20, 30)]).tokens == (3,)


def test_a_response_without_tokens_has_no_lag() -> None:
    assert lag_of([5, MS], [0, 1], [0]) == Lag((1.0,), (1,))


@pytest.mark.smoke
def test_rates_and_the_slowest_streams_lag_are_summarized() -> None:
    answers = [
        Answer(BenchRequest(FIRST, 3), 0, (0, 500 * MS), (1, 2)),
        Answer(BenchRequest(SECOND, 3), 0, (100 * MS, 1000 * MS), (1, 2)),
    ]
    figures = summarize(answers, [Lag((1.0, 3.0), (1, 2)), Lag((4.0, 8.0), (1, 5))])
    assert figures["responses_per_s"] == pytest.approx(4)
    assert figures["tokens_per_response"] == pytest.approx(1.5)
    assert (figures["lag_ms_median_of_quickest_stream"], figures["lag_ms_median_of_slowest_stream"]) == (2, 6)
    assert (figures["lag_ms_max"], figures["tokens_behind_max"]) == (8, 5)


def test_prompts_are_all_different() -> None:
    prompts = [request.prompt for first in (1, 2) for request in draw(64, 5, first)]
    assert len(set(prompts)) == 128

"""Stops of the first of several sequences before it has computed their common prompt."""

from __future__ import annotations

import pytest

from inflight.core.request.request import OutputOptions
from inflight.core.request.response import Response
from inflight.core.request.sampling_config import SamplingConfig
from inflight.core.request.stop import FinishReason, StopReason, StopSignal
from inflight.core.schedule.batch import ContextDetails, ModelOutput, ScheduledBatch
from inflight.core.scheduler import Scheduler
from inflight.testing.simulation.integrity import check_integrity

from .factories import Driver, make_request, make_scheduler

STOP_FIRST = StopSignal(1, StopReason.STOP_WORDS, sequence_index=0)


def make_sequences(count: int, **fields):
    return make_request(sampling=SamplingConfig(top_k=5, num_return_sequences=count), **fields)


def update(scheduler: Scheduler, batch: ScheduledBatch, *tokens: tuple[int, ...], **output) -> list[Response]:
    responses = scheduler.update(batch, ModelOutput(batch.iteration, list(tokens), **output))
    check_integrity(scheduler)
    return responses


@pytest.mark.parametrize("reuse", [True, False])
def test_a_stop_of_the_first_sequence_while_it_waits_lets_its_siblings_compute_the_prompt(reuse):
    """One sibling computes the prompt, the other reuses it. Otherwise both would wait for the first sequence
    forever."""
    driver = Driver(make_scheduler(reuse=reuse))
    driver.accept(make_sequences(3, prompt=10, new=2))
    (stopped,) = driver.accept(stop=(STOP_FIRST,))
    assert stopped.result.finish_reasons == (FinishReason.STOP_WORDS,) and not stopped.is_final
    batch, _ = driver.step()
    assert [(start.sequence_index, chunk.start) for start, chunk in zip(batch.starts, batch.context)] == [
        (1, 0)
    ]
    batch, _ = driver.step()
    assert [(start.sequence_index, chunk.start) for start, chunk in zip(batch.starts, batch.context)] == [
        (2, 8)
    ]
    _, (final,) = driver.step()
    assert (final.result.sequence_index, final.is_final) == (2, True)
    assert driver.scheduler.num_active == driver.scheduler.kv_cache.pool.num_held == 0


def test_a_stop_of_the_first_sequence_keeps_its_computed_blocks():
    driver = Driver(make_scheduler(max_num_tokens=8, chunked=True))
    driver.accept(make_sequences(2, prompt=21, new=2))
    driver.step()
    driver.accept(stop=(STOP_FIRST,))
    batch, _ = driver.step()
    assert [(start.sequence_index, chunk.start) for start, chunk in zip(batch.starts, batch.context)] == [
        (1, 8)
    ]


def test_a_first_sequence_stopped_in_its_context_ends_when_its_batch_is_back():
    scheduler = make_scheduler()
    driver = Driver(scheduler)
    driver.accept(make_sequences(2, prompt=10, new=2))
    batch = scheduler.schedule()
    assert driver.accept(stop=(STOP_FIRST,)) == []
    (stopped,) = update(scheduler, batch, (7,))
    assert (stopped.result.sequence_index, stopped.is_final) == (0, False)
    driver.step()
    _, (final,) = driver.step()
    assert (final.result.sequence_index, final.result.num_output_tokens, final.is_final) == (1, (2,), True)


@pytest.mark.parametrize("stopped", [(0,), (0, 1)])
def test_context_outputs_come_from_another_sequence_if_the_first_was_stopped(stopped):
    """All of the prompt's rows are returned, although the first sequences ended before they returned any."""
    scheduler = make_scheduler(max_num_sequences=2)
    driver = Driver(scheduler)
    output = OutputOptions(return_prompt_log_probs=True)
    driver.accept(make_sequences(3, prompt=10, new=1, output=output))
    for index in stopped:
        driver.accept(stop=(StopSignal(1, StopReason.STOP_WORDS, sequence_index=index),))
    log_probs = tuple(-0.5 * number for number in range(1, 10))
    batch = scheduler.schedule()
    (chunk,) = (chunk for chunk in batch.context if chunk.wants_context)
    assert (chunk.start, len(chunk.token_ids)) == (0, 10)
    rows = [(7,)] * batch.num_rows
    responses = update(scheduler, batch, *rows, context={chunk.slot: ContextDetails(log_probs)})
    while (batch := scheduler.schedule()) is not None:
        assert not any(chunk.wants_context for chunk in batch.context)
        responses += update(scheduler, batch, *[(7,)] * batch.num_rows)
    assert [response.result.sequence_index for response in responses] == [
        i for i in range(3) if i not in stopped
    ]
    assert {response.result.prompt_log_probs for response in responses} == {(0.0, *log_probs)}


def test_no_sequence_responds_before_the_context_outputs_are_computed():
    """The prompt is cached: the third sequence computes only its end, the second all rows."""
    scheduler = make_scheduler(max_num_tokens=9, chunked=True, reuse=True)
    driver = Driver(scheduler)
    driver.accept(make_request(9, prompt=10, new=1))
    driver.step()
    driver.step()
    driver.accept(make_sequences(3, prompt=10, new=1, output=OutputOptions(return_prompt_log_probs=True)))
    driver.accept(stop=(STOP_FIRST,))
    batch = scheduler.schedule()
    assert [start.sequence_index for start in batch.starts] == [1]
    assert update(scheduler, batch, context={batch.context[0].slot: ContextDetails((-1.0,) * 8)}) == []
    batch = scheduler.schedule()
    assert [start.sequence_index for start in batch.starts] == []
    update(scheduler, batch, (7,), context={batch.context[0].slot: ContextDetails((-2.0,))})
    batch = scheduler.schedule()
    assert [start.sequence_index for start in batch.starts] == [2]
    (final,) = update(scheduler, batch, (7,))
    assert final.result.prompt_log_probs == (0.0, *[-1.0] * 8, -2.0)

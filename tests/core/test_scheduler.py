"""Queue order, exact batches, and how requests end."""

from __future__ import annotations

import pytest

from inflight.config import CapacityPolicy
from inflight.core.request.request import OutputOptions
from inflight.core.request.stop import FinishReason
from inflight.core.schedule.batch import ContextChunk, ModelOutput, SlotStart
from inflight.errors import AlreadyExists, ConfigError, InvalidArgument, StepFailed
from inflight.testing.simulation.integrity import check_integrity

from .factories import Driver, make_request, make_scheduler

MAX_UTILIZATION = CapacityPolicy.MAX_UTILIZATION


def test_a_request_gets_a_context_batch_a_generation_batch_and_a_final_response():
    driver = Driver(make_scheduler())
    request = make_request(prompt=5, new=2, output=OutputOptions(exclude_input_from_output=True))
    driver.accept(request)
    batch, responses = driver.step()
    assert batch.starts == (SlotStart(0, request),)
    assert batch.new_blocks == ((0, (0, 1)),)
    assert batch.context == (ContextChunk(0, 0, (10, 11, 12, 13, 14), is_last=True),)
    assert responses == []
    batch, (final,) = driver.step()
    assert (batch.context, batch.generation_slots, batch.new_blocks) == ((), (0,), ())
    assert final.is_final and final.result.finish_reasons[0] is FinishReason.LENGTH
    assert (final.result.num_input_tokens, final.result.num_output_tokens) == (5, (2,))
    assert len(final.result.output_token_ids[0]) == 2
    assert driver.step() == (None, [])


def test_requests_join_and_leave_at_every_iteration():
    driver = Driver(make_scheduler())
    driver.accept(make_request(1, new=3))
    driver.step()
    driver.accept(make_request(2, new=1))
    batch, responses = driver.step()
    assert (len(batch.context), batch.generation_slots) == (1, (0,))
    assert [response.request_id for response in responses] == [2]
    batch, responses = driver.step()
    assert batch.released_slots == (1,)
    assert [response.request_id for response in responses] == [1]


def test_non_streaming_output_begins_with_the_prompt_unless_excluded():
    driver = Driver(make_scheduler())
    driver.accept(make_request(1, prompt=(7, 8), new=1))
    _, (final,) = driver.step(token=9)
    assert final.result.output_token_ids == ((7, 8, 9),)
    assert final.result.num_output_tokens == (1,)


def test_streaming_sends_deltas_and_the_end_id_is_not_returned():
    driver = Driver(make_scheduler())
    driver.accept(make_request(1, new=9, streaming=True, end_ids=(3, 4)))
    _, (first,) = driver.step(token=9)
    assert (first.result.output_token_ids, first.is_final) == (((9,),), False)
    assert first.result.finish_reasons[0] is FinishReason.NOT_FINISHED
    _, (final,) = driver.step(token=4)
    assert (final.result.output_token_ids, final.is_final) == (((),), True)
    assert final.result.finish_reasons[0] is FinishReason.END_ID


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_stop_frees_all_resources_and_loses_no_token(steps, streaming):
    scheduler = make_scheduler()
    driver = Driver(scheduler)
    output = OutputOptions(exclude_input_from_output=True)
    driver.accept(make_request(1, new=9, streaming=streaming, output=output))
    responses = [response for _ in range(steps) for response in driver.step()[1]]
    (final,) = driver.accept(stop=(1,))
    assert final.is_final and final.result.finish_reasons[0] is FinishReason.CANCELLED
    came = [token for each in (*responses, final) for token in each.result.output_token_ids[0]]
    assert len(came) == steps and len(responses) == (steps if streaming else 0)
    assert scheduler.kv_cache.pool.num_held == 0 and scheduler.num_active == 0
    assert driver.accept(stop=(1, 99)) == []


def test_waiting_requests_are_admitted_first_come_first_served():
    driver = Driver(make_scheduler(num_blocks=4))
    driver.accept(
        make_request(1, prompt=4, new=5), make_request(2, prompt=12, new=5), make_request(3, prompt=1, new=1)
    )
    batch, _ = driver.step()
    assert [start.request.request_id for start in batch.starts] == [1]


def test_guaranteed_no_evict_reserves_blocks_for_max_new_tokens():
    driver = Driver(make_scheduler(num_blocks=4))
    driver.accept(make_request(1, prompt=4, new=9), make_request(2, prompt=4, new=9))
    batch, _ = driver.step()
    assert [start.request.request_id for start in batch.starts] == [1]


def test_max_utilization_pauses_the_last_started_and_resumes_it():
    driver = Driver(make_scheduler(MAX_UTILIZATION, num_blocks=4))
    driver.accept(
        make_request(1, prompt=4, new=9, streaming=True), make_request(2, prompt=4, new=9, streaming=True)
    )
    batch, _ = driver.step()
    assert [start.request.request_id for start in batch.starts] == [1, 2]
    received = {1: [], 2: []}
    paused = 0
    while driver.scheduler.num_active:
        driver.accept()
        batch, responses = driver.step()
        paused += driver.scheduler.stats(batch).num_paused_requests
        for response in responses:
            received[response.request_id] += response.result.output_token_ids[0]
    assert paused == 1
    assert [len(tokens) for tokens in received.values()] == [8, 8]  # the first came with the first step


def test_a_resumed_request_computes_prompt_and_generated_tokens_as_context():
    driver = Driver(make_scheduler(MAX_UTILIZATION, num_blocks=3))
    driver.accept(make_request(1, prompt=4, new=5), make_request(2, prompt=3, new=6))
    contexts = []
    while (stepped := driver.step())[0] is not None:
        contexts += [chunk.token_ids for chunk in stepped[0].context]
    assert [len(context) for context in contexts[:2]] == [4, 3]
    assert len(contexts) == 3 and len(contexts[2]) > 3


def test_an_unchunked_context_waits_until_all_of_it_fits_into_an_iteration():
    driver = Driver(make_scheduler(max_num_tokens=6))
    driver.accept(make_request(1, prompt=5, new=2), make_request(2, prompt=5, new=2))
    batch, _ = driver.step()
    assert [len(chunk.token_ids) for chunk in batch.context] == [5]
    batch, _ = driver.step()
    assert [len(chunk.token_ids) for chunk in batch.context] == [5]
    assert batch.generation_slots == (0,)


def test_chunks_end_on_block_boundaries_and_generation_goes_first():
    driver = Driver(make_scheduler(max_num_tokens=7, chunked=True))
    driver.accept(make_request(1, prompt=2, new=9))
    driver.step()
    driver.accept(make_request(2, prompt=15, new=2))
    shapes = []
    for _ in range(4):
        batch, _ = driver.step()
        shapes.append((len(batch.generation_slots), [len(chunk.token_ids) for chunk in batch.context]))
    assert shapes == [(1, [4]), (1, [4]), (1, [4]), (1, [3])]


def test_a_reused_prefix_is_in_the_block_table_and_not_computed():
    driver = Driver(make_scheduler(reuse=True))
    driver.accept(make_request(1, prompt=10, new=1))
    driver.step()
    driver.accept(make_request(2, prompt=10, new=1))
    batch, _ = driver.step()
    assert batch.context == (ContextChunk(0, 8, (18, 19), is_last=True),)
    assert batch.new_blocks[0] == (0, (0, 1))


def test_a_duplicate_id_is_refused_and_the_first_goes_on():
    driver = Driver(make_scheduler())
    (refused,) = driver.accept(make_request(1), make_request(1))
    assert isinstance(refused.error, AlreadyExists) and refused.is_final
    assert driver.scheduler.num_active == 1


def test_an_impossible_request_is_refused_at_once():
    driver = Driver(make_scheduler(num_blocks=2))
    (refused,) = driver.accept(make_request(1, prompt=4, new=9), make_request(2, prompt=4, new=5))[:1]
    assert isinstance(refused.error, InvalidArgument) and refused.request_id == 1
    assert driver.scheduler.num_active == 1


def test_a_failed_batch_ends_its_requests_and_no_others():
    scheduler = make_scheduler(max_num_sequences=1)
    driver = Driver(scheduler)
    driver.accept(make_request(1), make_request(2, new=1))
    failed = scheduler.fail(scheduler.schedule(), StepFailed("boom"))
    assert [(response.request_id, str(response.error), response.is_final) for response in failed] == [
        (1, "boom", True)
    ]
    _, (final,) = driver.step()
    assert final.request_id == 2 and final.error is None


def test_a_slot_start_of_a_failed_batch_is_repeated():
    scheduler = make_scheduler(max_num_tokens=6)
    driver = Driver(scheduler)
    driver.accept(make_request(1, prompt=5), make_request(2, prompt=5, new=1))
    batch = scheduler.schedule()
    assert [start.request.request_id for start in batch.starts] == [1, 2] and len(batch.context) == 1
    (failed,) = scheduler.fail(batch, StepFailed("boom"))
    assert failed.request_id == 1
    check_integrity(scheduler)
    batch, (final,) = driver.step()
    assert [start.request.request_id for start in batch.starts] == [2]
    assert final.request_id == 2 and final.error is None


@pytest.mark.parametrize("policy", CapacityPolicy)
@pytest.mark.parametrize("ended_by", ["stop", "end id"])
def test_an_ended_request_is_not_scheduled_again_while_its_last_batch_is_in_flight(policy, ended_by):
    scheduler = make_scheduler(policy)
    driver = Driver(scheduler)
    driver.accept(make_request(1, prompt=3, new=50, end_ids=(7,)))
    first, second = scheduler.schedule(), scheduler.schedule()
    if ended_by == "stop":
        assert driver.accept(stop=(1,)) == []
    assert scheduler.update(first, ModelOutput(0, [(7,)])) == []
    assert scheduler.schedule() is None
    (final,) = scheduler.update(second, ModelOutput(1, [(8,)]))
    assert final.is_final and scheduler.num_active == scheduler.kv_cache.pool.num_held == 0


def test_fail_all_answers_every_request_once():
    scheduler = make_scheduler(max_num_sequences=1)
    driver = Driver(scheduler)
    driver.accept(make_request(1), make_request(2))
    scheduler.schedule()
    assert sorted(response.request_id for response in scheduler.fail_all(StepFailed("gone"))) == [1, 2]
    assert scheduler.num_active == 0
    check_integrity(scheduler)


def test_room_is_max_num_requests_minus_active_requests():
    assert make_scheduler().room == -1
    driver = Driver(make_scheduler(max_num_requests=3))
    driver.accept(make_request(1), make_request(2))
    assert driver.scheduler.room == 1


@pytest.mark.parametrize("max_num_tokens", [3, 2])
def test_a_budget_too_small_for_the_batch_or_a_block_fails_the_load(max_num_tokens):
    with pytest.raises(ConfigError, match="max_num_tokens"):
        make_scheduler(max_num_tokens=max_num_tokens, max_num_sequences=max_num_tokens)
    with pytest.raises(ConfigError, match="max_batch_size"):
        make_scheduler(max_num_tokens=8, max_num_sequences=9)


def test_too_few_tokens_per_iteration_for_generation_and_a_block_fail_the_load():
    make_scheduler(max_num_tokens=6)
    make_scheduler(max_num_tokens=7, chunked=True)
    with pytest.raises(ConfigError, match="must be at least 7"):
        make_scheduler(max_num_tokens=6, chunked=True)

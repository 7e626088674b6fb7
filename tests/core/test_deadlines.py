"""Requests that time out in any state: they return their tokens so far and free all resources."""

from __future__ import annotations

import pytest

from inflight.config import CapacityPolicy
from inflight.core.endings import Deadlines
from inflight.core.kv.block_keys import CacheRules
from inflight.core.request.llm_request import RequestGroup
from inflight.core.request.response import Response
from inflight.core.request.sampling_config import SamplingConfig
from inflight.core.request.stop import FinishReason
from inflight.core.schedule.batch import ModelOutput
from inflight.testing.simulation.integrity import check_integrity

from .factories import Driver, make_request, make_scheduler

MS = 1_000_000
MAX_UTILIZATION = CapacityPolicy.MAX_UTILIZATION


def make_group(key: int, allotted_ms: int, now_ms: int = 0, **fields) -> RequestGroup:
    request = make_request(key, allotted_time_ms=allotted_ms, **fields)
    return RequestGroup(request, key, CacheRules(None), now_ms * MS)


def end(group: RequestGroup) -> None:
    group.num_unfinished = 0


# ---------------------------------------------------------------- the heap


def test_expired_requests_are_returned_once_earliest_deadline_first():
    deadlines = Deadlines()
    groups = {ms: make_group(ms, ms) for ms in (30, 10, 20, 40)}
    for group in groups.values():
        deadlines.add(group)
    assert deadlines.pop_expired(10 * MS - 1) == []
    assert deadlines.pop_expired(30 * MS) == [groups[10], groups[20], groups[30]]
    assert deadlines.pop_expired(30 * MS) == []


def test_ended_requests_and_those_without_a_deadline_do_not_time_out():
    deadlines = Deadlines()
    ended, endless, late = make_group(1, 5), make_group(2, 0), make_group(3, 5)
    for group in (ended, endless, late):
        deadlines.add(group)
    end(ended)
    assert deadlines.pop_expired(1 << 62) == [late]


def test_time_counts_from_the_arrival_at_the_front_end():
    assert make_group(1, 5, now_ms=9, arrival_time_ns=3 * MS).deadline_ns == 8 * MS
    assert make_group(1, 5, now_ms=9).deadline_ns == 14 * MS
    assert make_group(1, 0, now_ms=9).deadline_ns == 0


def test_ended_requests_do_not_accumulate_in_the_heap():
    """With long deadlines and short answers nothing expires, and the heap has only active requests."""
    deadlines = Deadlines()
    lasting = [make_group(key, 1000) for key in range(10)]
    for group in lasting:
        deadlines.add(group)
    sizes = []
    for key in range(10, 5000):
        group = make_group(key, 1000 + key)
        deadlines.add(group)
        end(group)
        sizes.append(len(deadlines._heap))
    assert max(sizes) <= 2 * (len(lasting) + 1) + 64
    assert deadlines.pop_expired(1 << 62) == lasting


# ---------------------------------------------------------------- in a scheduler


def assert_timed_out(response: Response, *tokens: int, is_final: bool = True) -> None:
    """Expect TIMED_OUT as the last response, with these generated tokens."""
    result = response.result
    assert response.error is None and response.is_final is is_final
    assert result.finish_reasons == (FinishReason.TIMED_OUT,)
    (ids,), (count,) = result.output_token_ids, result.num_output_tokens
    assert (ids[len(ids) - count :], count) == (tokens, len(tokens))


def assert_nothing_is_held(driver: Driver) -> None:
    scheduler = driver.scheduler
    assert scheduler.num_active == scheduler.kv_cache.pool.num_held == scheduler.kv_cache.num_reserved == 0
    check_integrity(scheduler)
    assert driver.step() == (None, [])


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_a_running_request_times_out_in_context_and_in_generation(steps, streaming):
    """A prompt of 12 tokens is computed in three chunks; the last one gives the first token."""
    driver = Driver(make_scheduler(max_num_tokens=7, chunked=True))
    driver.accept(make_request(1, prompt=12, new=9, streaming=streaming, allotted_time_ms=5))
    for _ in range(steps):
        driver.step()
    assert driver.accept(now_ns=5 * MS - 1) == []
    (final,) = driver.accept(now_ns=5 * MS)
    assert_timed_out(final, *((503, 504) if steps == 4 and not streaming else ()))
    assert_nothing_is_held(driver)


def test_a_waiting_request_times_out():
    driver = Driver(make_scheduler(max_num_sequences=1))
    driver.accept(make_request(1, new=2), make_request(2, allotted_time_ms=5))
    driver.step()
    (final,) = driver.accept(now_ns=5 * MS)
    assert final.request_id == 2
    assert_timed_out(final)
    _, (other,) = driver.step()
    assert other.request_id == 1 and other.result.finish_reasons == (FinishReason.LENGTH,)
    assert_nothing_is_held(driver)


def test_a_paused_request_times_out():
    driver = Driver(make_scheduler(MAX_UTILIZATION, num_blocks=4))
    driver.accept(make_request(1, prompt=4, new=8), make_request(2, prompt=4, new=8, allotted_time_ms=5))
    for _ in range(6):
        driver.step()
    assert [(one.request_id, one.state) for one in driver.scheduler.state().waiting] == [(2, "PAUSED")]
    (final,) = driver.accept(now_ns=5 * MS)
    assert final.request_id == 2
    assert_timed_out(final, 501, 502, 503, 504, 505)
    while driver.scheduler.num_active:
        driver.step()
    assert_nothing_is_held(driver)


def test_tokens_of_a_batch_in_flight_are_dropped_after_a_timeout():
    scheduler = make_scheduler()
    driver = Driver(scheduler)
    driver.accept(make_request(1, streaming=True, allotted_time_ms=5))
    batch = scheduler.schedule()
    assert driver.accept(now_ns=5 * MS) == []
    assert scheduler.schedule() is None
    (final,) = scheduler.update(batch, ModelOutput(0, [(7,)]))
    assert_timed_out(final)
    assert_nothing_is_held(driver)


def test_a_request_past_its_deadline_is_not_started():
    driver = Driver(make_scheduler())
    (final,) = driver.accept(make_request(1, allotted_time_ms=5, arrival_time_ns=1 * MS), now_ns=6 * MS)
    assert_timed_out(final)
    assert_nothing_is_held(driver)


def test_all_sequences_time_out_started_or_not():
    driver = Driver(make_scheduler(max_num_sequences=2))
    sampling = SamplingConfig(top_k=2, num_return_sequences=3)
    driver.accept(make_request(1, sampling=sampling, allotted_time_ms=5))
    driver.step()
    driver.step()
    responses = driver.accept(now_ns=5 * MS)
    assert [response.result.sequence_index for response in responses] == [0, 1, 2]
    for response, tokens in zip(responses, ((501, 502), (502,), ())):
        assert_timed_out(response, *tokens, is_final=response is responses[-1])
    assert_nothing_is_held(driver)


def test_a_request_that_ended_in_time_is_answered_once():
    driver = Driver(make_scheduler())
    driver.accept(make_request(1, new=1, allotted_time_ms=5))
    _, (final,) = driver.step(now_ns=4 * MS)
    assert final.result.finish_reasons == (FinishReason.LENGTH,)
    assert driver.accept(now_ns=5 * MS) == []


def test_a_stop_and_a_deadline_at_once_are_one_end():
    driver = Driver(make_scheduler())
    driver.accept(make_request(1, allotted_time_ms=5))
    (final,) = driver.accept(stop=(1,), now_ns=5 * MS)
    assert final.is_final and final.result.finish_reasons == (FinishReason.CANCELLED,)
    assert_nothing_is_held(driver)

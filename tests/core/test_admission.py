"""Admission: full queues, requests that wait for another one's prompt, and the reasons reported for waiting."""

from __future__ import annotations

import pytest

from inflight.config import CapacityPolicy
from inflight.core.request.request import OutputOptions, Request
from inflight.core.request.response import Response
from inflight.core.request.sampling_config import SamplingConfig
from inflight.core.schedule.batch import ModelOutput, ScheduledBatch
from inflight.core.scheduler import Scheduler
from inflight.errors import QueueFull, StepFailed, Unavailable

from .factories import Driver, make_request, make_scheduler

STATIC_BATCH = CapacityPolicy.STATIC_BATCH
MAX_UTILIZATION = CapacityPolicy.MAX_UTILIZATION
THREE_BEAMS = SamplingConfig(beam_width=3)
THREE_SEQUENCES = SamplingConfig(top_k=2, num_return_sequences=3)


def starts(batch: ScheduledBatch | None) -> list[int]:
    return [start.request.request_id for start in batch.starts] if batch else []


# ---------------------------------------------------------------- the queue's limit


def refused(responses: list[Response]) -> list[int]:
    """Ids of requests refused by the full queue; there are no other responses."""
    for response in responses:
        assert response.is_final and isinstance(response.error, Unavailable)
    return [response.request_id for response in responses]


def test_the_queue_full_message_is_that_of_the_specification():
    driver = Driver(make_scheduler(max_num_sequences=1, max_queue_size=2))
    (response,) = driver.accept(*(make_request(number) for number in range(4)))
    assert type(response.error) is QueueFull and response.is_final
    message = "Exceeds maximum queue size. Maximum queue size of 2 has been reached, please try again later"
    assert str(response.error) == message


def test_free_slots_do_not_count_as_queue_places():
    """With 4 slots and a queue of 2, six requests are accepted, whether the slots are still free or already
    taken."""
    driver = Driver(make_scheduler(max_queue_size=2))
    assert refused(driver.accept(*(make_request(number) for number in range(8)))) == [6, 7]
    driver = Driver(make_scheduler(max_queue_size=2))
    driver.accept(*(make_request(number) for number in range(4)))
    driver.step()
    assert refused(driver.accept(*(make_request(number) for number in range(4, 8)))) == [6, 7]


def test_a_queue_size_of_zero_is_unbounded():
    driver = Driver(make_scheduler(max_num_sequences=1))
    assert driver.accept(*(make_request(number) for number in range(500))) == []


def test_a_queue_place_freed_by_a_stop_can_be_taken():
    driver = Driver(make_scheduler(max_num_sequences=1, max_queue_size=1))
    assert refused(driver.accept(make_request(1, new=2), make_request(2), make_request(3))) == [3]
    driver.step()
    assert refused(driver.accept(make_request(4))) == [4]
    driver.accept(stop=(2,))
    assert refused(driver.accept(make_request(5), make_request(6))) == [6]


def test_a_continuation_of_a_request_is_admitted_behind_a_full_queue():
    driver = Driver(make_scheduler(max_num_sequences=1, max_queue_size=1))
    assert driver.accept(make_request(1), make_request(2)) == []
    later = [make_request(number, is_continuation=True) for number in (3, 4)]
    assert refused(driver.accept(*later, make_request(5))) == [5]


def test_the_queue_limit_ignores_lower_priorities():
    driver = Driver(make_scheduler(max_num_sequences=1, max_queue_size=2))
    driver.accept(*(make_request(number, priority=0.5) for number in range(3)))
    assert refused(driver.accept(make_request(3, priority=0.4), make_request(4, priority=0.5))) == [3, 4]
    urgent = [make_request(number, priority=0.6) for number in range(5, 9)]
    assert refused(driver.accept(*urgent)) == [8]
    assert refused(driver.accept(make_request(9, priority=0.5))) == [9]


def test_every_sequence_of_a_request_takes_a_place():
    driver = Driver(make_scheduler(max_num_sequences=1, max_queue_size=3))
    three = [make_request(number, sampling=THREE_SEQUENCES) for number in (1, 2)]
    assert refused(driver.accept(*three, make_request(3), make_request(4))) == [2, 4]


def test_a_paused_request_takes_no_place_in_the_queue():
    driver = Driver(make_scheduler(MAX_UTILIZATION, num_blocks=4, max_num_sequences=2, max_queue_size=1))
    driver.accept(make_request(1, prompt=4, new=8), make_request(2, prompt=4, new=8))
    for _ in range(6):
        driver.step()
    assert [(one.request_id, one.state) for one in driver.scheduler.state().waiting] == [(2, "PAUSED")]
    # A slot is free, and there is a place behind it.
    assert refused(driver.accept(make_request(3), make_request(4), make_request(5))) == [5]


def test_an_invalid_request_gets_its_own_error_when_the_queue_is_full():
    driver = Driver(make_scheduler(max_num_sequences=1, max_queue_size=1))
    driver.accept(make_request(1), make_request(2))
    wrong, again = driver.accept(make_request(3, new=0), make_request(1))
    assert (wrong.error.code, again.error.code) == ("INVALID_ARG", "ALREADY_EXISTS")


# ---------------------------------------------------------------- slots and blocks


def test_no_request_overtakes_the_first_that_does_not_fit():
    driver = Driver(make_scheduler(num_blocks=4))
    driver.accept(
        make_request(1, prompt=4, new=5), make_request(2, prompt=12), make_request(3, prompt=1, new=1)
    )
    batch, _ = driver.step()
    assert starts(batch) == [1]


def test_blocks_that_running_requests_are_about_to_take_are_not_given_away():
    """Under MAX_UTILIZATION two of three blocks are free when the running request needs its second one."""
    driver = Driver(make_scheduler(MAX_UTILIZATION, num_blocks=3))
    driver.accept(make_request(1, prompt=3, new=3))
    driver.step()
    driver.step()
    driver.accept(make_request(2, prompt=5, new=2))
    batch, _ = driver.step()
    assert starts(batch) == [] and batch.new_blocks == ((0, (1,)),)
    assert starts(driver.step()[0]) == [2]


def test_a_static_batch_admits_no_request_before_its_end():
    driver = Driver(make_scheduler(STATIC_BATCH))
    driver.accept(make_request(1, new=3))
    driver.step()
    driver.accept(make_request(2))
    assert [starts(driver.step()[0]) for _ in range(3)] == [[], [], [2]]


# ---------------------------------------------------------------- promised prefixes

PROMPT = tuple(range(10, 20))  # 10 tokens: two full blocks of 4, and a rest
COUNTED = OutputOptions(return_perf_metrics=True)


def alike(*request_ids: int, **fields) -> list[Request]:
    return [make_request(request_id, PROMPT, output=COUNTED, **fields) for request_id in request_ids]


def contexts(batch: ScheduledBatch | None) -> list[tuple[int, int]]:
    """Return (first position, tokens) of every chunk."""
    return [(chunk.start, len(chunk.token_ids)) for chunk in batch.context] if batch else []


def blocks_of(response: Response) -> tuple[int, int, int]:
    """Return the numbers of taken, reused and missed blocks."""
    metrics = response.result.perf_metrics
    return metrics.num_new_blocks, metrics.num_reused_blocks, metrics.num_missed_blocks


def test_equal_prompts_that_arrive_together_are_computed_once():
    driver = Driver(make_scheduler(reuse=True, num_blocks=64))
    driver.accept(*alike(1, 2, 3, new=3))
    batch, _ = driver.step()
    assert (starts(batch), contexts(batch)) == ([1], [(0, 10)])
    batch, _ = driver.step()
    assert (starts(batch), contexts(batch)) == ([2, 3], [(8, 2), (8, 2)])
    assert batch.new_blocks == ((1, (0, 1)), (2, (0, 1)), (1, (3,)), (2, (4,)))
    assert driver.scheduler.kv_cache.pool.num_held == 5
    _, (first,) = driver.step()
    _, others = driver.step()
    assert blocks_of(first) == (3, 0, 2)
    assert list(map(blocks_of, others)) == [(1, 2, 0), (1, 2, 0)]


def test_all_blocks_of_a_chunked_prompt_are_waited_for():
    driver = Driver(make_scheduler(reuse=True, num_blocks=64, max_num_tokens=8, chunked=True))
    driver.accept(*(make_request(number, prompt=21, new=9) for number in (1, 2)))
    assert [(starts(batch), contexts(batch)) for batch, _ in (driver.step() for _ in range(4))] == [
        ([1], [(0, 8)]),
        ([], [(8, 8)]),
        ([], [(16, 5)]),
        ([2], [(20, 1)]),
    ]


def test_without_reuse_no_request_waits_for_an_equal_prompt():
    driver = Driver(make_scheduler(reuse=False, num_blocks=64))
    driver.accept(*alike(1, 2))
    assert starts(driver.step()[0]) == [1, 2]


def test_a_request_waits_only_for_the_shared_beginning_of_a_prompt():
    """The second request shares one block with the first; the third shares no full block."""
    driver = Driver(make_scheduler(reuse=True, num_blocks=64))
    driver.accept(
        make_request(1, (1, 2, 3, 4, 5, 6, 7, 8, 9)),
        make_request(2, (1, 2, 3, 4, 0, 6, 7, 8, 9)),
        make_request(3, (1, 2, 3, 0, 5, 6, 7, 8, 9)),
    )
    batch, _ = driver.step()
    assert (starts(batch), contexts(batch)) == ([1, 3], [(0, 9), (0, 9)])
    batch, _ = driver.step()
    assert (starts(batch), contexts(batch)) == ([2], [(4, 5)])


def test_a_request_that_waits_for_a_prompt_delays_no_other_and_keeps_its_place():
    driver = Driver(make_scheduler(reuse=True, num_blocks=64, max_num_sequences=2))
    driver.accept(*alike(1, 2), make_request(3, prompt=2, new=1), make_request(4, prompt=2))
    assert starts(driver.step()[0]) == [1, 3]
    assert starts(driver.step()[0]) == [2]


def test_a_burst_of_equal_prompts_is_computed_once_and_keeps_its_order():
    driver = Driver(make_scheduler(reuse=True, num_blocks=64, max_num_sequences=3))
    driver.accept(*alike(*range(20), new=2))
    order = []
    while (batch := driver.step()[0]) is not None:
        order.append((starts(batch), contexts(batch)))
    assert order[0] == ([0], [(0, 10)])
    assert [request_id for ids, _ in order for request_id in ids] == list(range(20))
    assert {context for _, chunks in order[1:] for context in chunks} == {(8, 2)}


@pytest.mark.parametrize("ended_by", ["cancel", "failure"])
def test_the_next_sequence_computes_a_promised_prefix_if_its_producer_ends_early(ended_by):
    scheduler = make_scheduler(reuse=True, num_blocks=64)
    driver = Driver(scheduler)
    driver.accept(*alike(1, 2, 3, new=3))
    batch = scheduler.schedule()
    assert starts(batch) == [1]
    if ended_by == "cancel":
        assert driver.accept(stop=(1,)) == []
        (final,) = scheduler.update(batch, ModelOutput(0, [(7,)]))
    else:
        (final,) = scheduler.fail(batch, StepFailed("boom"))
    assert final.request_id == 1 and final.is_final
    batch, _ = driver.step()
    assert (starts(batch), contexts(batch)) == ([2], [(0, 10)])
    batch, _ = driver.step()
    assert (starts(batch), contexts(batch)) == ([3], [(8, 2)])


def test_blocks_that_a_cancelled_request_computed_are_reused():
    driver = Driver(make_scheduler(reuse=True, num_blocks=64, max_num_tokens=8, chunked=True))
    driver.accept(*(make_request(number, prompt=21, new=9) for number in (1, 2, 3)))
    driver.step()
    driver.accept(stop=(1,))
    assert [(starts(batch), contexts(batch)) for batch, _ in (driver.step() for _ in range(3))] == [
        ([2], [(8, 8)]),
        ([], [(16, 5)]),
        ([3], [(20, 1)]),
    ]


def test_a_request_for_prompt_log_probs_does_not_wait_for_an_equal_prompt():
    driver = Driver(make_scheduler(reuse=True, num_blocks=64))
    wants_context = make_request(2, PROMPT, output=OutputOptions(return_prompt_log_probs=True))
    driver.accept(*alike(1), wants_context)
    batch = driver.scheduler.schedule()
    assert (starts(batch), contexts(batch)) == ([1, 2], [(0, 10), (0, 10)])


def test_equal_prompts_share_a_static_batch():
    """The batch is filled only once: a request that waited for the prompt would wait for the whole batch."""
    driver = Driver(make_scheduler(STATIC_BATCH, reuse=True, num_blocks=64))
    driver.accept(*alike(1, 2, 3))
    assert starts(driver.step()[0]) == [1, 2, 3]


# ---------------------------------------------------------------- reports


def why(scheduler: Scheduler) -> dict[int, str]:
    return {one.request_id: one.why for one in scheduler.state().waiting}


def test_the_state_has_the_reason_why_requests_wait():
    scheduler = make_scheduler(num_blocks=5, max_num_sequences=3)
    driver = Driver(scheduler)
    driver.accept(make_request(1, prompt=4, new=9), make_request(2, prompt=4, new=9))
    assert why(scheduler) == {1: "starts with the next iteration", 2: "is behind request 1"}
    driver.step()
    driver.accept(make_request(3, prompt=4, new=1), make_request(4, prompt=4, new=1, sampling=THREE_BEAMS))
    assert why(scheduler) == {
        2: "needs 3 blocks, 2 free",
        3: "is behind request 2",
        4: "needs 3 slots, 2 free",
    }
    driver.accept(make_request(5, priority=1.0, prompt=4, new=1))
    driver.step()
    assert why(scheduler)[2] == "needs 3 blocks, 2 free"
    driver.accept(
        make_request(6, priority=1.0, prompt=4, new=2), make_request(7, priority=1.0, prompt=4, new=1)
    )
    scheduler.schedule()
    assert why(scheduler)[7] == "needs 1 block, 0 free"


def test_the_state_reports_waiting_for_a_promised_prefix():
    scheduler = make_scheduler(reuse=True, num_blocks=64)
    Driver(scheduler).accept(*alike(1, 2))
    scheduler.schedule()
    assert why(scheduler) == {2: "a running request is computing the next block of its prompt"}


def test_the_state_reports_waiting_for_a_static_batch():
    scheduler = make_scheduler(STATIC_BATCH)
    driver = Driver(scheduler)
    driver.accept(make_request(1))
    driver.step()
    driver.accept(make_request(2))
    assert why(scheduler) == {2: "static batching: waits for the end of the batch that runs"}


def test_the_state_shows_requests_that_are_being_retried():
    scheduler = make_scheduler()
    Driver(scheduler).accept(make_request(1), make_request(2))
    scheduler.fail(scheduler.schedule(), StepFailed("boom"))
    assert scheduler.state().suspects == (1, 2)
    assert why(scheduler) == {
        1: "starts with the next iteration",
        2: "an iteration failed: the requests that were in it are tried again apart",
    }


def test_a_retry_does_not_examine_requests_that_never_ran():
    """Requests that wait were never run, so they are not suspected."""
    driver = Driver(make_scheduler(num_blocks=64, max_num_sequences=2))
    driver.accept(*(make_request(number, (number,) * 4) for number in range(1, 1001)))
    waiting = driver.scheduler._waiting
    batch = driver.scheduler.schedule()
    driver.scheduler.fail(batch, StepFailed("boom"))
    removed = []
    remove = waiting.remove
    waiting.remove = lambda llm_request: removed.append(llm_request.request_id) or remove(llm_request)
    assert starts(driver.scheduler.schedule()) == [1]
    assert removed == [1]


def test_blocks_are_counted_as_upstreams_test_expects_them():
    """The prompt has 109 tokens and 50 are generated, in blocks of 32; then the same prompt comes again."""
    driver = Driver(make_scheduler(reuse=True, num_blocks=64, tokens_per_block=32, max_num_tokens=256))
    counts = []
    for number in (1, 2):
        driver.accept(make_request(number, prompt=109, new=50, output=COUNTED))
        responses = []
        while not responses:
            _, responses = driver.step()
        counts.append(blocks_of(responses[0])[:2])
    assert counts == [(4, 0), (1, 4)]


def test_a_cached_beginning_of_a_block_is_copied_and_not_computed():
    driver = Driver(make_scheduler(reuse=True, num_blocks=64))
    driver.accept(make_request(1, tuple(range(10, 22)), 1))
    driver.step()
    driver.accept(make_request(2, (*range(10, 16), 90, 91, 92), 2))
    batch, _ = driver.step()
    assert contexts(batch) == [(6, 3)]
    ((source, target),) = batch.block_copies
    assert source == 1 and batch.new_blocks[0][1][:2] == (0, target)

"""Failed iterations: which requests end, which keep their tokens, and the iterations of the search."""

from __future__ import annotations

import pytest

from inflight.config import CapacityPolicy
from inflight.core.kv.block_keys import ROOT_SCOPE, CacheRules
from inflight.core.kv.kv_cache_manager import KvCacheManager
from inflight.core.request.request import ExternalDraft, Request
from inflight.core.request.sampling_config import SamplingConfig
from inflight.core.request.stop import FinishReason
from inflight.core.schedule.batch import ModelOutput
from inflight.core.scheduler import Scheduler
from inflight.errors import StepFailed, Unavailable
from inflight.testing.fake_model import expected_beam_steps, expected_tokens
from inflight.testing.simulation.integrity import check_integrity

from .factories import Driver, make_limits, make_request, make_scheduler
from .faulty import FaultyDevice, Outcome, at_token, run

MAX_UTILIZATION = CapacityPolicy.MAX_UTILIZATION
STATIC_BATCH = CapacityPolicy.STATIC_BATCH
VOCABULARY = 1000
BOOM = StepFailed("boom")
TWO_BEAMS = SamplingConfig(beam_width=2)


def requests(count: int, prompt: int = 6, new: int = 9, **fields) -> list[Request]:
    """Different prompts, all streamed, ids from 1."""
    return [
        make_request(number, tuple(range(10 * number, 10 * number + prompt)), new, streaming=True, **fields)
        for number in range(1, count + 1)
    ]


def serve(
    arrived: list[Request],
    faults: dict[int, int],
    applies: bool = True,
    depth: int = 1,
    once: tuple[int, ...] = (),
    policy: CapacityPolicy = CapacityPolicy.GUARANTEED_NO_EVICT,
    **options,
) -> tuple[Outcome, FaultyDevice]:
    """Run requests that arrive together on a device with these faults, by request id."""
    limits = {"num_blocks": 128, "max_num_sequences": 8}
    limits.update({name: options.pop(name) for name in list(limits) if name in options})
    device = FaultyDevice(make_limits(**limits), faults, applies)
    device.once.update(once)
    scheduler = make_scheduler(policy, **options, **limits)
    return run(scheduler, device, {0: arrived}, depth), device


def assert_unharmed(outcome: Outcome, *innocent: Request) -> None:
    """Assert that these requests have ended once, with the same tokens as alone."""
    for request in innocent:
        assert request.request_id not in outcome.failed()
        for index in range(request.sampling.num_sequences):
            alone = expected_tokens(
                request.input_token_ids,
                request.max_new_tokens,
                VOCABULARY,
                request.sampling,
                sequence_index=index,
            )
            assert outcome.tokens(request.request_id, index) == alone


# ---------------------------------------------------------------- one faulty request


@pytest.mark.parametrize("applies", [True, False])
@pytest.mark.parametrize("number", [1, 2, 5, 9])
@pytest.mark.parametrize("faulty", range(1, 9))
def test_a_faulty_request_among_eight_is_found_in_four_failures(faulty, number, applies):
    arrived = requests(8)
    outcome, device = serve(arrived, {faulty: at_token(arrived[faulty - 1], number)}, applies)
    assert outcome.failed() == {faulty: "boom"}
    assert_unharmed(outcome, *(request for request in arrived if request.request_id != faulty))
    assert len(outcome.tokens(faulty)) == number - 1
    assert device.num_failures == 4


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_the_number_of_failures_is_the_number_of_halvings(count):
    failures = set()
    for request in (arrived := requests(count)):
        outcome, device = serve(arrived, {request.request_id: at_token(request, 3)})
        assert list(outcome.failed()) == [request.request_id]
        failures.add(device.num_failures)
    assert max(failures) == {1: 1, 2: 2, 3: 3, 5: 4, 8: 4}[count]


@pytest.mark.parametrize(
    ("faulty", "trials"),
    [
        (1, [(1, 2, 3, 4), (1, 2), (1,), (2,), (3, 4), (5, 6, 7, 8)]),
        (6, [(1, 2, 3, 4), (5, 6, 7, 8), (5, 6), (5,), (6,), (7, 8)]),
    ],
)
def test_halves_are_retried_in_order_and_cleared_requests_once(faulty, trials):
    arrived = requests(8)
    outcome, _ = serve(arrived, {faulty: at_token(arrived[faulty - 1], 3)})
    assert outcome.trials == trials
    # 9 for the tokens, a failure and 6 trials, of which one also gives a token. While the faulty request is
    # alone no other one progresses.
    assert outcome.num_iterations == 9 + 1 + 6 - 1


def test_two_faulty_requests_are_both_found():
    arrived = requests(8)
    outcome, device = serve(arrived, {number: at_token(arrived[number - 1], 3) for number in (2, 7)})
    assert outcome.failed() == {2: "boom", 7: "boom"}
    assert_unharmed(outcome, *(request for request in arrived if request.request_id not in (2, 7)))
    assert device.num_failures == 7


def test_a_request_that_arrives_during_a_retry_waits_and_is_not_suspected():
    arrived = requests(4)
    device = FaultyDevice(make_limits(max_num_sequences=8), {1: at_token(arrived[0], 2)})
    outcome = run(make_scheduler(max_num_sequences=8), device, {0: arrived[:3], 2: arrived[3:]})
    assert outcome.failed() == {1: "boom"}
    assert outcome.trials == [(1, 2), (1,), (2,), (3,)]
    assert_unharmed(outcome, *arrived[1:])


@pytest.mark.parametrize("applies", [True, False])
def test_a_faulty_request_is_found_with_a_second_batch_in_flight(applies):
    arrived = requests(8)
    outcome, _ = serve(arrived, {3: at_token(arrived[2], 3)}, applies, depth=2)
    assert outcome.failed() == {3: "boom"}
    assert_unharmed(outcome, *arrived[:2], *arrived[3:])


# ---------------------------------------------------------------- no faulty request, or all


def test_a_failure_that_does_not_repeat_ends_no_request():
    arrived = requests(3)
    outcome, device = serve(arrived, {}, once=(2,))
    assert outcome.failed() == {} and device.num_failures == 1
    assert outcome.trials == [(1, 2), (3,)]
    assert_unharmed(outcome, *arrived)


@pytest.mark.parametrize("depth", [1, 2])
def test_repeated_failures_end_no_request_while_several_run(depth):
    arrived = requests(4)
    outcome, _ = serve(arrived, {}, once=(1, 2, 5, 11), depth=depth)
    assert outcome.failed() == {}
    assert_unharmed(outcome, *arrived)


def test_a_request_that_fails_alone_ends_at_once():
    arrived = requests(1)
    outcome, device = serve(arrived, {}, once=(2,))
    assert outcome.failed() == {1: "boom"} and device.num_failures == 1


def test_a_broken_device_ends_the_running_and_not_the_waiting_requests():
    scheduler = make_scheduler(max_num_sequences=2)
    driver = Driver(scheduler)
    driver.accept(*requests(3, new=1))
    responses = scheduler.fail(scheduler.schedule(), Unavailable("the device is gone"))
    assert [(response.request_id, response.error.code) for response in responses] == [
        (1, "UNAVAILABLE"),
        (2, "UNAVAILABLE"),
    ]
    assert scheduler.state().suspects == ()
    check_integrity(scheduler)
    _, (final,) = driver.step()
    assert final.request_id == 3 and final.error is None


# ---------------------------------------------------------------- batches in flight after a failure


def fail_first_of_two(scheduler: Scheduler) -> list[int]:
    """Fail the first of two batches in flight and garble the second; return the order of restarts."""
    first, second = scheduler.schedule(), scheduler.schedule()
    assert scheduler.fail(first, BOOM) == []
    assert scheduler.schedule() is None, "those that are tried apart wait for what is in flight"
    nonsense = ModelOutput(second.iteration, [(999,) for _ in second.sampled_slots()])
    assert scheduler.update(second, nonsense) == []
    check_integrity(scheduler)
    return [one.request_id for one in scheduler.state().waiting]


def test_a_batch_after_a_failed_one_is_void_and_the_oldest_restart_first():
    scheduler = make_scheduler()
    driver = Driver(scheduler)
    driver.accept(*requests(3))
    driver.step(token=7)
    assert fail_first_of_two(scheduler) == [1, 2, 3]
    assert scheduler.state().running == () and scheduler.kv_cache.pool.num_held == 0
    batch = scheduler.schedule()
    assert [chunk.token_ids for chunk in batch.context] == [
        (10, 11, 12, 13, 14, 15, 7),
        (20, 21, 22, 23, 24, 25, 7),
    ]


def test_a_void_context_restarts_too():
    scheduler = make_scheduler(max_num_tokens=12, chunked=True)
    Driver(scheduler).accept(*requests(1, prompt=8), *requests(2)[1:])
    assert fail_first_of_two(scheduler) == [1, 2]
    assert scheduler.kv_cache.pool.num_held == 0


def test_a_request_that_ended_while_in_flight_is_answered_and_not_suspected():
    scheduler = make_scheduler()
    driver = Driver(scheduler)
    driver.accept(*requests(3))
    batch = scheduler.schedule()
    assert driver.accept(stop=(2,)) == []
    (final,) = scheduler.fail(batch, BOOM)
    assert final.request_id == 2 and final.result.finish_reasons == (FinishReason.CANCELLED,)
    assert scheduler.state().suspects == (1, 3)


def test_a_request_that_failed_beside_an_ended_one_is_retried_alone():
    scheduler = make_scheduler()
    driver = Driver(scheduler)
    driver.accept(*requests(2))
    batch = scheduler.schedule()
    driver.accept(stop=(2,))
    (final,) = scheduler.fail(batch, BOOM)
    assert final.request_id == 2
    assert scheduler.state().suspects == (1,)
    (final,) = scheduler.fail(scheduler.schedule(), BOOM)
    assert (final.request_id, str(final.error)) == (1, "boom")


def test_a_sequence_started_in_a_failed_batch_is_started_again_even_if_the_next_batch_has_its_row():
    """The device may lack the second request's state, so its row of the next batch is void."""
    scheduler = make_scheduler(max_num_tokens=6)
    driver = Driver(scheduler)
    driver.accept(*requests(2, prompt=5))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert [start.request.request_id for start in first.starts] == [1, 2]
    assert [chunk.slot for chunk in first.context] == [0] and [chunk.slot for chunk in second.context] == [1]
    assert scheduler.fail(first, BOOM) == []
    assert scheduler.schedule() is None
    nonsense = ModelOutput(second.iteration, [(999,) for _ in second.sampled_slots()])
    (failed,) = scheduler.update(second, nonsense)
    assert (failed.request_id, str(failed.error)) == (1, "boom")
    check_integrity(scheduler)
    batch = scheduler.schedule()
    assert [start.request.request_id for start in batch.starts] == [2]
    assert [chunk.token_ids for chunk in batch.context] == [(20, 21, 22, 23, 24)]


# ---------------------------------------------------------------- blocks of a faulty request

SEVERAL = SamplingConfig(top_k=5, num_return_sequences=3, random_seed=1)


@pytest.mark.parametrize("sampling", [SamplingConfig(), SEVERAL, TWO_BEAMS])
def test_blocks_of_a_faulty_request_are_not_reused(sampling):
    """No later request reuses blocks that may contain the cause; sequences and beams of the faulty request
    still share the prompt's blocks."""
    scheduler = make_scheduler(reuse=True)
    engine = FaultyDevice(make_limits(), {1: at_token(make_request(1, prompt=10), 3)})
    outcome = run(scheduler, engine, {0: [make_request(1, prompt=10, new=9, sampling=sampling)]})
    assert outcome.failed() == {1: "boom"}
    assert scheduler.state().blocks.cached == 0


def test_blocks_of_a_faulty_request_that_others_hold_are_still_found():
    cache, rules, tokens = KvCacheManager(8, 4), CacheRules(ROOT_SCOPE), list(range(10))
    for key in (1, 2):
        cache.admit(key, cache.match_prefix(key, tokens, rules), 3, rules)
        cache.extend(key, 10)
        cache.publish(key, tokens, 10)
    assert cache.block_table(1)[:2] == cache.block_table(2)[:2]
    cache.unpublish(1, 99)
    assert cache.match_prefix(3, tokens, rules).block_ids == cache.block_table(2)[:2]
    cache.unpublish(1, 2)
    assert cache.match_prefix(3, tokens, rules).block_ids == ()
    check_integrity(cache)


# ---------------------------------------------------------------- searches, sequences, drafts


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("failing", [(0,), (1,), (5,), (1, 5)])
def test_a_restarted_search_repeats_no_response(failing, streaming):
    search = make_request(1, new=6, streaming=streaming, sampling=TWO_BEAMS)
    beside = make_request(2, (5, 6, 7), 12, streaming=True)
    outcome, _ = serve([search, beside], {}, once=failing)
    assert_unharmed(outcome, beside)
    results = [response.result for response in outcome.responses[1]]
    steps = expected_beam_steps(search, VOCABULARY)
    prompt = () if streaming else search.input_token_ids
    assert [result.output_token_ids for result in results] == [
        tuple((*prompt, *beam.token_ids) for beam in beams) for beams in (steps if streaming else steps[-1:])
    ]


def test_a_faulty_search_is_found():
    search = make_request(2, new=6, sampling=TWO_BEAMS)
    first, _, last = requests(3)
    outcome, _ = serve([first, search, last], {2: at_token(search, 3)})
    assert outcome.failed() == {2: "boom"}
    assert_unharmed(outcome, first, last)


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("number", [1, 2, 4])
def test_sequences_of_a_faulty_request_end_together_with_one_error(number, reuse):
    faulty, innocent, plain = (make_request(n, tuple(range(n, n + 9)), 8, streaming=True, sampling=s)
                               for n, s in ((10, SEVERAL), (20, SEVERAL), (30, SamplingConfig())))  # fmt: skip
    outcome, _ = serve([faulty, innocent, plain], {10: at_token(faulty, number)}, reuse=reuse)
    assert outcome.failed() == {10: "boom"}
    assert [response.is_final for response in outcome.responses[10]].count(True) == 1
    assert_unharmed(outcome, innocent, plain)


def test_a_draft_is_verified_again_after_a_failure():
    tokens = expected_tokens(tuple(range(10, 16)), 9, VOCABULARY)
    drafted = make_request(1, 6, 9, streaming=True, draft=ExternalDraft((*tokens[:3], 999)))
    guessing = make_request(2, (1, 2, 3, 1, 2, 3, 1, 2), 9, streaming=True, prompt_lookup_num_tokens=3)
    _, _, plain = requests(3)
    for failing in range(6):
        outcome, _ = serve([drafted, guessing, plain], {}, once=(failing,))
        assert_unharmed(outcome, drafted, guessing, plain)


# ---------------------------------------------------------------- policies


def test_a_static_batch_admits_restarted_requests_only():
    arrived = requests(3)
    device = FaultyDevice(make_limits(), {1: at_token(arrived[0], 2)})
    scheduler = make_scheduler(STATIC_BATCH)
    outcome = run(scheduler, device, {0: arrived[:2], 1: arrived[2:]})
    assert outcome.failed() == {1: "boom"}
    assert_unharmed(outcome, *arrived[1:])
    last_of_second = outcome.responses[2][-1].result
    assert last_of_second.finish_reasons == (FinishReason.LENGTH,)


@pytest.mark.parametrize("num_blocks", [4, 5, 6, 8])
@pytest.mark.parametrize("faulty", [1, 2, 3])
def test_faulty_requests_are_found_when_blocks_are_tight(faulty, num_blocks):
    """The cache is too small for two full-length requests, so some are paused and some cannot be retried
    separately."""
    arrived = requests(4)
    faults = {faulty: at_token(arrived[faulty - 1], 3)}
    outcome, _ = serve(arrived, faults, policy=MAX_UTILIZATION, num_blocks=num_blocks)
    assert outcome.failed() == {faulty: "boom"}
    assert_unharmed(outcome, *(request for request in arrived if request.request_id != faulty))

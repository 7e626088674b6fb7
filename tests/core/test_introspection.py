"""The reported state of a scheduler: complete values for small scenarios."""

from __future__ import annotations

import pytest

from inflight.config import CapacityPolicy
from inflight.core.report.state import BlockMapState, RunningState, SchedulerState, WaitingState
from inflight.core.report.stats import RequestCounts, RequestStage
from inflight.core.request.sampling_config import SamplingConfig
from inflight.core.schedule.batch import ModelOutput
from inflight.errors import StepFailed

from .factories import Driver, make_request, make_scheduler

MAX_UTILIZATION = CapacityPolicy.MAX_UTILIZATION
MS = 1_000_000
SHORT, LONG = (1, 2, 3, 4, 5), tuple(range(11, 24))
THREE_SEQUENCES = SamplingConfig(top_k=2, num_return_sequences=3)


def test_the_state_of_an_idle_scheduler_has_only_free_slots_and_blocks():
    assert make_scheduler().state() == SchedulerState(
        iteration=0,
        policy="guaranteed_no_evict",
        slots=4,
        free_slots=4,
        generated_tokens=0,
        suspects=(),
        waiting=(),
        running=(),
        blocks=BlockMapState(total=16, held=0, cached=0, empty=16, reserved=0, shared=0, tokens_per_block=4),
    )


GENERATES = RunningState(
    request_id=1,
    sequence_index=0,
    slots=(0,),
    phase="generation",
    computed_tokens=6,
    scheduled_tokens=0,
    context_tokens=5,
    generated_tokens=2,
    max_new_tokens=8,
    blocks=2,
    reserved_blocks=1,
    running_ms=20.0,
    deadline_ms=80.0,
)
IN_CONTEXT = RunningState(
    request_id=2,
    sequence_index=0,
    slots=(1,),
    phase="context",
    computed_tokens=8,
    scheduled_tokens=0,
    context_tokens=13,
    generated_tokens=0,
    max_new_tokens=3,
    blocks=2,
    reserved_blocks=2,
    running_ms=10.0,
    deadline_ms=None,
)
WAITS = WaitingState(
    request_id=3,
    sequence_index=0,
    state="WAITING",
    why="needs 1 slot, 0 free",
    prompt_tokens=5,
    generated_tokens=0,
    max_new_tokens=2,
    priority=0.25,
    client_id=77,
    waited_ms=11.0,
    deadline_ms=29.0,
)


def test_the_state_tells_generating_context_and_waiting_requests_apart():
    """There are two slots and chunks of 8 tokens.

    The first request has computed its context, the second a part.
    """
    scheduler = make_scheduler(max_num_sequences=2, max_num_tokens=9, chunked=True)
    driver = Driver(scheduler)
    driver.accept(make_request(1, SHORT, 8, allotted_time_ms=100), now_ns=10 * MS)
    driver.step(now_ns=11 * MS)
    driver.accept(
        make_request(2, LONG, 3),
        make_request(3, SHORT, 2, priority=0.25, client_id=77, arrival_time_ns=19 * MS, allotted_time_ms=40),
        now_ns=20 * MS,
    )
    driver.step(now_ns=24 * MS)
    driver.accept(now_ns=30 * MS)
    assert scheduler.state() == SchedulerState(
        iteration=4,
        policy="guaranteed_no_evict",
        slots=2,
        free_slots=0,
        generated_tokens=2,
        suspects=(),
        waiting=(WAITS,),
        running=(GENERATES, IN_CONTEXT),
        blocks=BlockMapState(total=16, held=4, cached=0, empty=12, reserved=3, shared=0, tokens_per_block=4),
    )


def test_the_state_counts_tokens_of_ended_sequences():
    driver = Driver(make_scheduler())
    driver.accept(make_request(1, SHORT, 3), make_request(2, SHORT, 8))
    for _ in range(5):
        driver.step()
    state = driver.scheduler.state()
    assert [one.request_id for one in state.running] == [2]
    assert state.generated_tokens == 3 + state.running[0].generated_tokens == 8


def test_the_state_shows_the_tokens_of_paused_sequences():
    driver = Driver(make_scheduler(MAX_UTILIZATION, num_blocks=4))
    driver.accept(make_request(1, new=8), make_request(2, new=8), now_ns=5 * MS)
    for _ in range(6):
        driver.step(now_ns=6 * MS)
    (paused,) = driver.scheduler.state().waiting
    assert (paused.request_id, paused.state, paused.why) == (2, "PAUSED", "needs 3 blocks, 1 free")
    assert (paused.prompt_tokens, paused.generated_tokens, paused.waited_ms) == (4, 5, 1.0)


def test_the_state_distinguishes_sequences_in_flight_and_pending_endings():
    scheduler = make_scheduler()
    driver = Driver(scheduler)
    driver.accept(make_request(1, SHORT), make_request(2, SHORT))
    scheduler.schedule()
    driver.accept(stop=(2,))
    assert [(one.phase, one.scheduled_tokens, one.computed_tokens) for one in scheduler.state().running] == [
        ("context", 5, 0),
        ("ending", 5, 0),
    ]


def test_siblings_wait_for_the_first_sequence_then_run_and_share():
    scheduler = make_scheduler()
    driver = Driver(scheduler)
    driver.accept(make_request(1, SHORT, sampling=THREE_SEQUENCES), make_request(2, LONG, priority=0.1))
    state = scheduler.state()
    assert [(one.request_id, one.sequence_index, one.why) for one in state.waiting] == [
        (1, 0, "starts with the next iteration"),
        (2, 0, "is behind request 1"),
        (1, 1, "waits for its request's first sequence, which computes the prompt for all"),
        (1, 2, "waits for its request's first sequence, which computes the prompt for all"),
    ]
    driver.step()
    assert [(one.sequence_index, one.why) for one in scheduler.state().waiting] == [
        (1, "starts with the next iteration"),
        (2, "is behind request 1"),
    ]
    driver.step()
    state = scheduler.state()
    assert [(one.request_id, one.sequence_index, one.slots) for one in state.running] == [
        (1, 0, (0,)),
        (2, 0, (1,)),
        (1, 1, (2,)),
        (1, 2, (3,)),
    ]
    assert state.waiting == () and state.blocks.shared == 1


def test_a_search_has_slots_and_blocks_for_every_beam():
    """6 prompt tokens are in 2 blocks; 2 beams of 13 tokens need at most one shared block and 3 each."""
    scheduler = make_scheduler()
    Driver(scheduler).accept(make_request(1, prompt=6, new=8, sampling=SamplingConfig(beam_width=2)))
    scheduler.schedule()
    (search,) = scheduler.state().running
    assert (search.slots, search.blocks, search.reserved_blocks) == ((0, 1), 2, 5)


def test_the_state_lists_suspects_in_the_order_of_their_retries():
    scheduler = make_scheduler()
    Driver(scheduler).accept(*(make_request(number) for number in (1, 2, 3)))
    scheduler.fail(scheduler.schedule(), StepFailed("boom"))
    assert scheduler.state().suspects == (1, 2, 3)
    scheduler.fail(scheduler.schedule(), StepFailed("boom"))
    scheduler.fail(scheduler.schedule(), StepFailed("boom"))
    assert scheduler.state().suspects == (2, 3)


def test_the_state_distinguishes_cached_and_empty_blocks():
    driver = Driver(make_scheduler(reuse=True))
    driver.accept(make_request(1, LONG, 1))
    driver.step()
    assert driver.scheduler.state().blocks == BlockMapState(16, 0, 3, 13, 0, 0, 4)


@pytest.mark.parametrize("policy", CapacityPolicy)
def test_the_state_has_the_policys_name_in_the_configuration(policy):
    assert make_scheduler(policy).state().policy == policy.value


def test_reading_the_state_does_not_change_batches():
    """A run whose state is read in every iteration makes the same batches."""

    def batches(looks: bool) -> list:
        driver = Driver(
            make_scheduler(MAX_UTILIZATION, num_blocks=6, reuse=True, max_num_tokens=7, chunked=True)
        )
        driver.accept(*(make_request(number, (1, 2, 3, 4, number, 6), 7) for number in (1, 2, 3, 4)))
        made = []
        while driver.scheduler.num_active:
            made.append(driver.step()[0])
            if looks:
                driver.scheduler.state()
                driver.scheduler.request_stats(made[-1])
        return made

    assert batches(looks=True) == batches(looks=False)


# ---------------------------------------------------------------- statistics of every request


def test_request_statistics_have_stages_token_counts_and_block_counts():
    scheduler = make_scheduler(max_num_sequences=2, max_num_tokens=9, chunked=True, reuse=True)
    driver = Driver(scheduler)
    driver.accept(make_request(1, SHORT, 8))
    driver.step()
    driver.accept(make_request(2, LONG, 3), make_request(3, SHORT, 2))
    batch, _ = driver.step()
    assert scheduler.request_stats(batch) == (
        RequestCounts(1, 0, RequestStage.GENERATION_IN_PROGRESS, 5, 2, 2, True, False, 2, 0, 1),
        RequestCounts(2, 0, RequestStage.CONTEXT_IN_PROGRESS, 8, 0, 0, True, False, 4, 0, 3),
        RequestCounts(3, 0, RequestStage.QUEUED, 0, 0, 0, False, False, 0, 0, 0),
    )
    assert [one.is_scheduled for one in scheduler.request_stats(None)] == [False, False, False]


def test_request_statistics_add_up_over_pauses():
    driver = Driver(make_scheduler(MAX_UTILIZATION, num_blocks=4))
    driver.accept(make_request(1, new=8), make_request(2, new=8))
    for _ in range(6):
        batch, _ = driver.step()
    assert driver.scheduler.request_stats(batch)[1] == RequestCounts(
        2, 0, RequestStage.QUEUED, 0, 5, 5, False, True, 1, 0, 0
    )


def test_the_state_shows_ended_sequences_while_their_batch_is_in_flight():
    scheduler = make_scheduler()
    driver = Driver(scheduler)
    driver.accept(make_request(1))
    batch = scheduler.schedule()
    driver.accept(stop=(1,))
    (ending,) = scheduler.request_stats(batch)
    assert (ending.stage, ending.is_scheduled) == (RequestStage.GENERATION_COMPLETE, True)
    scheduler.update(batch, ModelOutput(0, [(7,)]))
    assert scheduler.request_stats(batch) == ()


def test_only_the_first_requests_of_a_long_queue_are_examined(monkeypatch):
    """The loop waits for the answer, and examining a request computes digests of its prompt."""
    scheduler = make_scheduler(reuse=True)
    looked_up = []
    match_prefix = scheduler.kv_cache.match_prefix
    monkeypatch.setattr(
        scheduler.kv_cache,
        "match_prefix",
        lambda key, *rest: looked_up.append(key) or match_prefix(key, *rest),
    )
    Driver(scheduler).accept(*(make_request(i, prompt=9) for i in range(100)))
    whys = [one.why for one in scheduler.state().waiting]
    assert len(whys) == 100 and len(looked_up) == 32
    assert (whys[0], whys[31], whys[32], whys[99]) == (
        "starts with the next iteration", "is behind request 0", "is behind 32 others", "is behind 99 others",
    )  # fmt: skip

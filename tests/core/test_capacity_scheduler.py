"""Capacity scheduling: reserved KV blocks, the choice of requests to pause, and filling of static batches."""

from __future__ import annotations

import pytest

from inflight.config import CapacityPolicy
from inflight.core.kv.block_keys import CacheRules
from inflight.core.kv.kv_cache_manager import KvCacheManager, PrefixMatch
from inflight.core.request.llm_request import LlmRequest
from inflight.core.request.request import ExternalDraft
from inflight.core.request.sampling_config import SamplingConfig
from inflight.core.request.stop import FinishReason
from inflight.core.schedule.capacity_scheduler import (
    Growth,
    GuaranteedNoEvict,
    MaxUtilization,
    make_capacity_scheduler,
)

from .factories import Driver, make_request, make_scheduler, make_sequence

MAX_UTILIZATION = CapacityPolicy.MAX_UTILIZATION
STATIC_BATCH = CapacityPolicy.STATIC_BATCH
TWO_BEAMS = SamplingConfig(beam_width=2)
BLOCK = 4


# ---------------------------------------------------------------- reservations


@pytest.mark.parametrize(
    ("fields", "to_the_end", "now"),
    [
        ({"prompt": 4, "new": 1}, 1, 1),  # 4 tokens of KV cache: the fifth is never fed back
        ({"prompt": 4, "new": 2}, 2, 2),
        ({"prompt": 3, "new": 20}, 6, 1),
        ({"prompt": 8, "new": 20}, 7, 3),
        ({"prompt": 6, "new": 20, "draft": ExternalDraft((1, 2, 3))}, 7, 3),
        ({"prompt": 6, "new": 8, "sampling": TWO_BEAMS}, 7, 7),  # a shared block, and 3 for each beam
    ],
)
def test_each_policy_reserves_its_number_of_blocks_at_admission(fields, to_the_end, now):
    sequence = make_sequence(**fields)
    assert GuaranteedNoEvict().blocks_to_reserve(sequence, BLOCK) == to_the_end
    assert MaxUtilization().blocks_to_reserve(sequence, BLOCK) == now


def test_a_resumed_sequence_reserves_blocks_for_its_generated_tokens_too():
    sequence = make_sequence(prompt=4, new=8)
    sequence.tokens += [1, 2, 3]
    assert MaxUtilization().blocks_to_reserve(sequence, BLOCK) == 2
    sequence.tokens.append(4)
    assert MaxUtilization().blocks_to_reserve(sequence, BLOCK) == 3


# ---------------------------------------------------------------- growth


class Blocks:
    """A KV cache and running sequences in it, each of which computes the token after `tokens` next."""

    def __init__(self, num_blocks: int) -> None:
        self.cache = KvCacheManager(num_blocks, BLOCK)
        self.running: list[LlmRequest] = []

    def run(self, priority: float = 0.5, tokens: int = 4, in_flight: int = 0, **fields) -> LlmRequest:
        sequence = make_sequence(len(self.running), prompt=tokens, new=40, priority=priority, **fields)
        self.cache.admit(sequence.key, PrefixMatch(), -(-tokens // BLOCK), CacheRules(None))
        self.cache.extend(sequence.key, tokens)
        sequence.start((len(self.running),), num_reused_tokens=tokens - in_flight)
        sequence.num_scheduled_tokens = in_flight
        sequence.tokens.append(7)
        self.running.append(sequence)
        return sequence

    def decide(self) -> Growth:
        return MaxUtilization().decide_growth(self.running, self.cache)


def test_no_sequence_is_paused_while_blocks_are_free():
    blocks = Blocks(6)
    for _ in range(3):
        blocks.run()
    assert blocks.decide() == Growth((), 3)


@pytest.mark.parametrize(
    ("num_free", "paused", "claimed"), [(0, [3, 2], 2), (1, [3, 2], 2), (2, [3], 3), (3, [3], 3), (4, [], 4)]
)
def test_the_sequences_that_started_last_are_paused(num_free, paused, claimed):
    """Four sequences hold one block each and need another.

    With an odd number of free ones the third pauses itself.
    """
    blocks = Blocks(4 + num_free)
    for _ in range(4):
        blocks.run()
    growth = blocks.decide()
    assert ([sequence.key for sequence in growth.paused], growth.num_blocks) == (paused, claimed)


def test_no_more_sequences_are_paused_than_necessary():
    """The last sequence gives up three blocks at once, which is enough for all others."""
    blocks = Blocks(6)
    *_, last = (blocks.run(tokens=tokens) for tokens in (4, 4, 4, 12))
    assert blocks.decide() == Growth((last,), 3, is_short=True)


def test_pausing_does_not_count_shared_blocks_as_freed():
    """The last sequence holds only shared blocks, so the one before it is paused too."""
    blocks = Blocks(3)
    _, second, last = blocks.run(), blocks.run(), blocks.run()
    blocks.cache.pool.share(blocks.cache.block_table(last.key))
    assert blocks.decide() == Growth((last, second), 1, is_short=True)


def test_the_last_request_is_paused_if_no_other_can_be():
    blocks = Blocks(1)
    alone = blocks.run()
    assert blocks.decide() == Growth((alone,), 0, is_short=True)


@pytest.mark.parametrize("num_free", [0, 1])
def test_lower_priorities_are_paused_first(num_free):
    """With an odd number of free blocks the sequence of the lowest priority pauses itself."""
    blocks = Blocks(4 + num_free)
    low, _, _, late = (blocks.run(priority) for priority in (0.2, 0.9, 0.5, 0.5))
    assert blocks.decide() == Growth((low, late), 2, is_short=True)


def test_within_a_priority_the_last_started_is_paused_first():
    blocks = Blocks(3)
    early, late, _ = (blocks.run(priority) for priority in (0.2, 0.2, 0.9))
    assert blocks.decide() == Growth((late, early), 1, is_short=True)


@pytest.mark.parametrize("priority", [0.1, 0.5, 0.9])
def test_only_a_higher_priority_pauses_an_older_sequence(priority):
    """The older sequence is in the middle of its second block and needs none."""
    blocks = Blocks(3)
    older, younger = blocks.run(0.5, tokens=6), blocks.run(priority)
    paused, claimed = ((older,), 1) if priority > 0.5 else ((younger,), 0)
    assert blocks.decide() == Growth(paused, claimed, is_short=True)


def test_a_request_with_tokens_in_flight_is_not_paused():
    blocks = Blocks(2)
    first, _ = blocks.run(), blocks.run(in_flight=1)
    assert blocks.decide() == Growth((first,), 0, is_short=True)


def test_a_search_is_never_paused():
    blocks = Blocks(2)
    _, last = blocks.run(sampling=TWO_BEAMS), blocks.run()
    assert blocks.decide() == Growth((last,), 0, is_short=True)


def test_ended_requests_and_requests_in_context_need_no_blocks():
    blocks = Blocks(3)
    ended, context, growing = blocks.run(in_flight=1), blocks.run(), blocks.run()
    ended.finish(FinishReason.CANCELLED)
    context.num_computed_tokens = 0
    assert blocks.decide() == Growth((growing,), 0, is_short=True)


def test_guaranteed_no_evict_pauses_no_sequence():
    blocks = Blocks(1)
    blocks.run()
    assert GuaranteedNoEvict().decide_growth(blocks.running, blocks.cache) == Growth()


# ---------------------------------------------------------------- in a scheduler


def test_every_capacity_policy_has_its_scheduler():
    assert isinstance(make_capacity_scheduler(MAX_UTILIZATION), MaxUtilization)
    guaranteed = make_capacity_scheduler(CapacityPolicy.GUARANTEED_NO_EVICT)
    static = make_capacity_scheduler(STATIC_BATCH)
    assert [guaranteed.fills_batches_once, static.fills_batches_once] == [False, True]


def run_to_the_end(driver: Driver) -> dict[int, list[int]]:
    """Return the requests that started in each iteration, counted from 1.

    Iterations without starts are left out.
    """
    starts = {}
    iteration = 0
    while (batch := driver.step()[0]) is not None:
        iteration += 1
        if batch.starts:
            starts[iteration] = [start.request.request_id for start in batch.starts]
    return starts


def test_a_paused_request_resumes_before_new_ones_that_would_fit():
    """Two requests hold 2 of the 4 blocks each when both need a third, for their ninth token; the third request
    needs one block, which is free as long as the second is paused."""
    driver = Driver(make_scheduler(MAX_UTILIZATION, num_blocks=4))
    driver.accept(make_request(1, prompt=4, new=8), make_request(2, prompt=4, new=8))
    for _ in range(6):
        batch, _ = driver.step()
    assert (batch.generation_slots, batch.released_slots) == ((0,), (1,))
    state = driver.scheduler.state()
    assert [(one.request_id, one.state, one.why) for one in state.waiting] == [
        (2, "PAUSED", "needs 3 blocks, 1 free")
    ]
    driver.accept(make_request(3, prompt=1, new=1))
    assert run_to_the_end(driver) == {3: [2, 3]}


def test_growth_and_pauses_go_by_priority():
    """The older request has the lower priority: it is paused, and resumes when the other one has ended."""
    driver = Driver(make_scheduler(MAX_UTILIZATION, num_blocks=4))
    driver.accept(make_request(1, prompt=4, new=8, priority=0.2))
    driver.step()
    driver.accept(make_request(2, prompt=4, new=8, priority=0.8))
    assert run_to_the_end(driver) == {1: [2], 9: [1]}


def test_a_static_batch_is_filled_once_and_runs_to_its_end():
    driver = Driver(make_scheduler(STATIC_BATCH))
    driver.accept(make_request(1, new=2), make_request(2, new=4))
    driver.step()
    driver.accept(make_request(3, new=1), make_request(4, new=1))
    assert run_to_the_end(driver) == {4: [3, 4]}


def test_siblings_belong_to_the_static_batch_of_their_first_sequence():
    driver = Driver(make_scheduler(STATIC_BATCH))
    sampling = SamplingConfig(top_k=2, num_return_sequences=3)
    driver.accept(make_request(1, new=3, sampling=sampling))
    driver.step()
    driver.accept(make_request(2, new=1))
    assert run_to_the_end(driver) == {1: [1, 1], 4: [2]}

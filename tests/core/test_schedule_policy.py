"""The policy LPM: waiting requests with longer cached prefixes start first, and nobody is overtaken too often."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.config import CapacityPolicy, SchedulePolicy
from inflight.core.kv import block_keys
from inflight.core.request.llm_request import LlmRequest
from inflight.core.request.request import Request
from inflight.core.schedule import waiting_queue
from inflight.core.schedule.waiting_queue import WaitingQueue
from inflight.core.scheduler import Scheduler
from inflight.testing.simulation.integrity import check_integrity

from .factories import Driver, make_request, make_scheduler, make_sequence

SYSTEM = {name: (number,) * 8 for number, name in enumerate("ABCD", 20)}  # two full blocks of 4 tokens


def lpm(**fields) -> Driver:
    fields = {"max_num_sequences": 1, "num_blocks": 64, "max_num_tokens": 64, **fields}
    return Driver(make_scheduler(reuse=True, schedule_policy=SchedulePolicy.LPM, **fields))


def asks(request_id: int, system: str, new: int = 1, **fields) -> Request:
    """A request whose prompt is a system prompt and two tokens of its own."""
    return make_request(request_id, (*SYSTEM[system], 100 + request_id, 7), new=new, **fields)


def started(driver: Driver) -> list[int]:
    """Run all requests to their end, and return their ids in order of their starts."""
    order: list[int] = []
    while driver.scheduler.num_active:
        batch, _ = driver.step()
        order += [start.request.request_id for start in batch.starts] if batch else []
    return order


# ---------------------------------------------------------------- the order


def test_the_longest_cached_prefix_starts_first_and_equal_ones_in_order_of_arrival():
    driver = lpm()
    driver.accept(asks(1, "A"))
    started(driver)
    half = make_request(2, (*SYSTEM["A"][:4], 1, 2, 3, 4, 5), new=1)
    driver.accept(half, asks(3, "B"), asks(4, "A"), asks(5, "C"), asks(6, "A"), asks(7, "B"))
    assert started(driver) == [4, 6, 2, 3, 7, 5]


def test_by_default_requests_start_in_order_of_arrival():
    driver = Driver(make_scheduler(reuse=True, max_num_sequences=1, num_blocks=64))
    driver.accept(asks(1, "A"))
    started(driver)
    driver.accept(asks(2, "B"), asks(3, "A"))
    assert started(driver) == [2, 3]


def test_priorities_precede_prefixes():
    driver = lpm()
    driver.accept(asks(1, "A"))
    started(driver)
    driver.accept(asks(2, "A", priority=0.4), asks(3, "B", priority=0.6))
    assert started(driver) == [3, 2]


def test_clients_take_turns_and_prefixes_decide_only_among_a_clients_own_requests():
    driver = lpm()
    driver.accept(asks(1, "A", client_id=1))
    started(driver)
    new = [(2, "B", 1), (3, "A", 1), (4, "A", 1), (5, "C", 2), (6, "D", 2), (7, "A", 2)]
    driver.accept(*(asks(number, system, client_id=client) for number, system, client in new))
    order = started(driver)
    assert ["1" if number < 5 else "2" for number in order] in (list("121212"), list("212121"))
    assert [n for n in order if n < 5] == [3, 4, 2] and [n for n in order if n > 4] == [7, 5, 6]


def test_a_paused_request_resumes_before_requests_with_cached_prefixes():
    driver = lpm(policy=CapacityPolicy.MAX_UTILIZATION, max_num_sequences=2, num_blocks=7)
    driver.accept(asks(1, "A", new=9), asks(2, "B", new=9), asks(3, "A"))
    order = started(driver)
    assert Counter(order)[2] == 2, "it was paused once"
    assert order[-1] == 3


@pytest.mark.parametrize("most", [0, 1, 3])
def test_a_request_is_overtaken_at_most_so_often(most):
    driver = lpm(max_overtaken=most)
    driver.accept(asks(1, "A"))
    started(driver)
    driver.accept(asks(2, "B"), *(asks(number, "A") for number in range(3, 9)))
    assert started(driver) == [*range(3, 3 + most), 2, *range(3 + most, 9)]


def test_only_the_first_waiting_requests_are_compared(monkeypatch):
    monkeypatch.setattr(waiting_queue, "_MAX_COMPARED", 3)
    driver = lpm()
    driver.accept(asks(1, "A"))
    started(driver)
    driver.accept(asks(2, "B"), asks(3, "C"), asks(4, "D"), asks(5, "A"))
    assert started(driver) == [2, 5, 3, 4]


def test_a_request_that_is_to_end_and_one_whose_prefix_is_being_computed_delay_no_other():
    driver = lpm(max_num_sequences=3, chunked=True, max_num_tokens=8)
    driver.accept(asks(1, "A"))
    started(driver)
    long = make_request(2, (*SYSTEM["A"], *range(50, 70)), new=1)
    same = make_request(3, (*SYSTEM["A"], *range(50, 70), 1), new=1)
    driver.accept(long)
    driver.step()
    driver.accept(same, asks(4, "C"), asks(5, "A"))
    order = started(driver)
    assert order.index(5) < order.index(4) and order.index(4) < order.index(3)


# ---------------------------------------------------------------- costs


def test_keys_of_blocks_are_computed_once_for_each_request(monkeypatch):
    count = 0
    digest = block_keys.block_digest

    def counted(*args):
        nonlocal count
        count += 1
        return digest(*args)

    monkeypatch.setattr(block_keys, "block_digest", counted)
    driver = lpm()
    driver.accept(*(asks(number, "ABCD"[number % 4]) for number in range(20)))
    assert sorted(started(driver)) == list(range(20))
    assert count == 20 * 2, "two full blocks in each prompt"


def test_no_request_is_compared_without_a_free_slot_or_twice_for_the_same_start(monkeypatch):
    driver = lpm(num_blocks=8, max_num_sequences=2)
    driver.accept(asks(1, "A", new=12))
    driver.step()
    compared = []
    counted = driver.scheduler.kv_cache.num_cached_blocks
    monkeypatch.setattr(
        driver.scheduler.kv_cache,
        "num_cached_blocks",
        lambda key, *args: compared.append(key) or counted(key, *args),
    )
    driver.accept(asks(2, "B", new=12), asks(3, "C", new=12), asks(4, "D", new=12))
    for _ in range(5):
        driver.step()
    assert len(compared) == 3, "they wait for blocks"
    started(driver)
    assert len(compared) <= 3 + 2 + 1


# ---------------------------------------------------------------- properties


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.integers(0, 6),
    st.lists(
        st.tuples(st.sampled_from(["add", "add", "start"]), st.integers(0, 3), st.integers(0, 5)), max_size=60
    ),
)
def test_no_order_of_lengths_overtakes_a_sequence_more_than_the_bound(most, calls):
    """Whichever sequence is chosen, all that came before it have been overtaken less often than the bound; so each
    starts after at most as many later ones."""
    queue, waiting = WaitingQueue(), list[LlmRequest]()
    overtaken: Counter[int] = Counter()
    for key, (call, client, place) in enumerate(calls):
        if call == "add":
            waiting.append(make_sequence(key, client_id=client))
            queue.add(waiting[-1])
        elif waiting:
            first = queue.first()
            assert first is not None
            allowed = queue.may_overtake(first, most)
            chosen = allowed[place % len(allowed)]
            if chosen is not first:
                queue.overtake(chosen)
                check_integrity(queue)
            queue.remove(chosen)
            queue.charge(chosen)
            waiting.remove(chosen)
            overtaken.update(
                other.key
                for other in waiting
                if other.key < chosen.key and other.request.client_id == chosen.request.client_id
            )
            assert all(count <= most for count in overtaken.values())
        check_integrity(queue)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.integers(0, 5), st.sampled_from([1, 2, 3]), st.sampled_from([8, 12, 40]))
def test_every_request_starts_and_equal_prefixes_start_in_order(seed, most, slots, num_blocks):
    """Requests with the same system prompt start in order of arrival, whatever the cache evicts."""
    rng = random.Random(seed)
    driver = lpm(max_overtaken=most, max_num_sequences=slots, num_blocks=num_blocks)
    requests = [asks(number, rng.choice("ABCD"), rng.randint(1, 4)) for number in range(30)]
    system_of = {request.request_id: request.input_token_ids[0] for request in requests}
    order: list[int] = []
    while requests or driver.scheduler.num_active:
        count = rng.randint(0, 4)
        driver.accept(*requests[:count])
        del requests[:count]
        batch, _ = driver.step()
        order += [start.request.request_id for start in batch.starts] if batch else []
        check_counts(driver.scheduler)
    assert sorted(order) == list(range(30))
    for system in set(system_of.values()):
        of_system = [number for number in order if system_of[number] == system]
        assert of_system == sorted(of_system)


def check_counts(scheduler: Scheduler) -> None:
    """Check that the number of cached blocks of every waiting request is that which admission finds."""
    for sequence in scheduler._waiting.in_order():
        match = scheduler.kv_cache.match_prefix(sequence.key, sequence.tokens, sequence.rules)
        count = scheduler.kv_cache.num_cached_blocks(sequence.key, sequence.tokens, sequence.rules)
        assert count == len(match.block_ids)

"""Clients of one priority get equal shares, within the bound of start-time fair queueing.

Reference: Goyal, Vin, Cheng, "Start-time Fair Queueing" (1996), theorem 1: over any time in which two clients both
have requests waiting, the tokens that they were served differ by at most one largest request of each.
"""

from __future__ import annotations

import random
from collections import Counter
from itertools import combinations

import pytest

from inflight.config import CapacityPolicy, SchedulingConfig
from inflight.core.request.request import Request
from inflight.core.request.sampling_config import SamplingConfig
from inflight.core.schedule.batch import EngineLimits
from inflight.testing.simulation.drawn_requests import draw_tokens
from inflight.testing.simulation.queue_oracle import cost_of
from inflight.testing.simulation.scenario import Scenario
from inflight.testing.simulation.simulated_server import SimulatedServer
from tests.tiers import with_all

VOCAB_SIZE = 50


def draw_backlog(
    seed: int, end_ids: tuple[int, ...] = (), priorities: tuple[float, ...] = (0.5,)
) -> Scenario:
    """Draw two to four clients whose requests all wait from the start.

    Each client has its own size of requests.
    """
    rng = random.Random(seed)
    requests: list[Request] = []
    for client in range(rng.randint(2, 4)):
        longest, most_new = rng.choice([2, 8, 30]), rng.choice([1, 4, 12])
        for _ in range(14):
            requests.append(
                Request(
                    len(requests),
                    draw_tokens(rng, VOCAB_SIZE, rng.randint(1, longest)),
                    rng.randint(1, most_new),
                    end_ids=end_ids,
                    sampling=SamplingConfig(beam_width=rng.choice([1, 1, 1, 2])),
                    priority=rng.choice(priorities),
                    client_id=client,
                )
            )
    rng.shuffle(requests)
    limits = EngineLimits(VOCAB_SIZE, 100, rng.choice([2, 3, 5]), rng.choice([60, 200]), 4)
    policy = rng.choice([CapacityPolicy.GUARANTEED_NO_EVICT, CapacityPolicy.MAX_UTILIZATION])
    config = SchedulingConfig(policy, max_num_tokens=64, enable_kv_cache_reuse=rng.random() < 0.5)
    return Scenario(seed, limits, config, {0: tuple(requests)}, {})


def run_to_the_end(scenario: Scenario) -> SimulatedServer:
    server = SimulatedServer(scenario)
    while not server.is_done:
        server.step()
    server.check_end()
    return server


def starts_while_both_wait(server: SimulatedServer, pair: tuple[int, int]) -> list[Request]:
    """Return the started requests, in order, as long as requests of both clients were waiting."""
    waiting = Counter(request.client_id for request in server.scenario.requests.values())
    started = []
    for llm_request in server.queue.starts:
        waiting[llm_request.request.client_id] -= 1
        started.append(llm_request.request)
        if not all(waiting[client] for client in pair):
            break
    return started


@pytest.mark.parametrize("seed", with_all(range(40), range(15)))
def test_served_tokens_of_two_waiting_clients_differ_by_at_most_a_largest_request_each(seed):
    """In any interval, the difference between two clients' shares changes by at most one largest request of
    each."""
    server = run_to_the_end(draw_backlog(seed))
    clients = {request.client_id for request in server.scenario.requests.values()}
    for one, other in combinations(clients, 2):
        lead, leads, largest = 0, [0], {one: 0, other: 0}
        for request in starts_while_both_wait(server, (one, other)):
            if request.client_id in largest:
                lead += cost_of(request) if request.client_id == one else -cost_of(request)
                leads.append(lead)
                largest[request.client_id] = max(largest[request.client_id], cost_of(request))
        assert len(leads) > 8
        assert max(leads) - min(leads) <= sum(largest.values())


@pytest.mark.parametrize("seed", with_all(range(40), range(15)))
def test_charges_for_tokens_that_are_not_generated_are_credited(seed):
    """Even if end ids end requests early, clients' shares differ by at most their running requests and one
    largest request each."""
    server = run_to_the_end(draw_backlog(seed, end_ids=tuple(range(0, VOCAB_SIZE, 5))))
    sequences = {r.request_id: r for r in server.queue.starts}
    clients = {request.client_id for request in server.scenario.requests.values()}
    for one, other in combinations(clients, 2):
        got: Counter[int] = Counter()
        started = starts_while_both_wait(server, (one, other))
        for request in started:
            sequence = sequences[request.request_id]
            unused = request.max_new_tokens - sequence.num_generated
            got[request.client_id] += cost_of(request) - unused * request.sampling.beam_width
        largest = max(map(cost_of, started))
        most_running = server.scenario.limits.max_num_sequences
        assert abs(got[one] - got[other]) <= (most_running + 2) * largest


@pytest.mark.parametrize("seed", range(10))
def test_order_holds_with_many_priorities(seed):
    """There are about as many priorities as requests; the order is checked at every start."""
    server = run_to_the_end(draw_backlog(seed, priorities=tuple(level / 20 for level in range(20))))
    started = [r.request.priority for r in server.queue.starts]
    assert len(set(started)) > 10 and started == sorted(started, reverse=True)


def test_a_late_client_has_no_credit():
    """A client takes turns from its arrival on, without compensation for the time before."""
    early = tuple(Request(i, (i % 7 + 1,) * 4, 4, client_id=1) for i in range(30))
    late = tuple(Request(100 + i, (i % 7 + 11,) * 4, 4, client_id=2) for i in range(10))
    config = SchedulingConfig(max_num_tokens=64, enable_kv_cache_reuse=False)
    limits = EngineLimits(VOCAB_SIZE, 100, 1, 20, 4)
    server = run_to_the_end(Scenario(0, limits, config, {0: early, 40: late}, {}))
    order = [r.request.client_id for r in server.queue.starts]
    first = order.index(2)
    assert first >= 8, "the early client's requests had the device to themselves until then"
    assert order[first : first + 20] == [2, 1] * 10
    assert set(order[first + 20 :]) == {1}

"""Clients of one priority get equal shares, within the bound of start-time fair queueing.

Reference: Goyal, Vin, Cheng, "Start-time Fair Queueing" (1996), theorem 1: over any time in which two clients both
have requests waiting, the tokens that they were served differ by at most one largest request of each.
"""

from __future__ import annotations

import random
from collections import Counter
from itertools import combinations

import pytest

from inflight.config import CapacityPolicy, SchedulePolicy, SchedulingConfig
from inflight.core.request.request import IterationInput, Request
from inflight.core.request.sampling_config import SamplingConfig
from inflight.core.schedule.batch import EngineLimits, ModelOutput
from inflight.core.scheduler import Scheduler
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


CLIENTS = ((8, 8, 4), (60, 4, 40), (4, 40, 9), (40, 12, 300))
"""For each client: the longest prompt, the longest output, and how many of its requests are kept waiting."""
SECOND = 1_000_000_000


def served_by_client(config: SchedulingConfig, seed: int, seconds: int) -> list[tuple[int, list[int]]]:
    """Run four clients, which always have requests waiting, and return after each iteration the time, and each
    client's tokens so far: prompts that have started, and generated tokens.

    An iteration takes 5 ms, and 0.1 ms for each of its tokens. Most outputs end before their limit. Half of the
    clients have prompts with a common beginning, which may be cached.
    """
    rng = random.Random(seed)
    scheduler = Scheduler(config, EngineLimits(VOCAB_SIZE, 100, 8, 140, 4))
    prefixes = [
        draw_tokens(rng, VOCAB_SIZE, longest // 2 if client % 2 else 0)
        for client, (longest, *_) in enumerate(CLIENTS)
    ]
    served, num_waiting = [0] * len(CLIENTS), [0] * len(CLIENTS)
    history = [(0, list(served))]
    now_ns = next_id = 0
    while now_ns < seconds * SECOND:
        new: list[Request] = []
        for client, (longest, most_new, kept) in enumerate(CLIENTS):
            while num_waiting[client] < kept:
                own = draw_tokens(rng, VOCAB_SIZE, rng.randint(1, longest - len(prefixes[client])))
                output = rng.randint(1, most_new)
                new.append(Request(next_id, prefixes[client] + own, output, end_ids=(0,), client_id=client))
                next_id += 1
                num_waiting[client] += 1
        scheduler.accept(IterationInput(next_id, now_ns, tuple(new)))
        batch = scheduler.schedule()
        assert batch is not None
        for start in batch.starts:
            served[start.request.client_id] += start.request.prompt_length
            num_waiting[start.request.client_id] -= 1
        running = [(sequence, sequence.num_generated) for sequence in scheduler.running_sequences]
        count = len(batch.sampled_slots())
        tokens = [(rng.randrange(VOCAB_SIZE) if rng.random() < 0.9 else 0,) for _ in range(count)]
        scheduler.update(batch, ModelOutput(batch.iteration, tokens))
        for sequence, before in running:
            served[sequence.request.client_id] += sequence.num_generated - before
        num_tokens = len(batch.generation_slots) + sum(len(chunk.token_ids) for chunk in batch.context)
        now_ns += 5_000_000 + 100_000 * num_tokens
        history.append((now_ns, list(served)))
    return history


@pytest.mark.parametrize("policy", SchedulePolicy)
@pytest.mark.parametrize("seed", with_all(range(10), [0]))
def test_each_client_gets_nine_tenths_of_its_share_in_any_ten_seconds(seed, policy):
    config = SchedulingConfig(max_num_tokens=512, schedule_policy=policy)
    history = served_by_client(config, seed, seconds=18)
    end, num_windows, lowest = 0, 0, 1.0
    for began_ns, before in history:
        while end < len(history) and history[end][0] < began_ns + 10 * SECOND:
            end += 1
        if end == len(history):
            break
        tokens = [now - then for now, then in zip(history[end][1], before, strict=True)]
        lowest = min(lowest, min(tokens) * len(CLIENTS) / sum(tokens))
        num_windows += 1
    assert num_windows > 1000
    assert lowest >= 0.9


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

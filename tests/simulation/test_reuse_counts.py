"""Numbers of reused and missed blocks: missing reuse does not show in results.

The families have room for all blocks, so that the counts follow from the prompts alone: a prefix is computed
by the first request that needs it, and found by all others, at once or after a wait.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Hashable

import pytest

from inflight.config import CapacityPolicy, ChunkingPolicy, SchedulingConfig
from inflight.core.kv.block_keys import PrefixIdentity
from inflight.core.kv.retention import Retention, RetentionConfig, TokenRangeRetention
from inflight.core.request.request import OutputOptions, Request
from inflight.core.request.sampling_config import SamplingConfig
from inflight.core.schedule.batch import EngineLimits
from inflight.testing.simulation.drawn_requests import draw_tokens
from inflight.testing.simulation.outcome import RunOutcome
from inflight.testing.simulation.scenario import Scenario
from inflight.testing.simulation.simulated_server import SimulatedServer, run
from inflight.testing.small_inputs import make_table
from tests.tiers import with_all

VOCAB_SIZE = 5000
"""Size of the vocabulary, large enough that no generated text equals a prompt."""


def draw_family(seed: int) -> Scenario:
    """Draw prompts with common beginnings under several identities; none ends with a full block."""
    rng = random.Random(seed)
    size, slots = rng.choice([2, 3, 5]), rng.choice([2, 4, 8])
    stems = [draw_tokens(rng, VOCAB_SIZE, size * rng.randint(1, 6)) for _ in range(2)]
    identities = (PrefixIdentity(), PrefixIdentity(cache_salt_id=3))
    arrivals: dict[int, tuple[Request, ...]] = {}
    for request_id in range(rng.randint(4, 12)):
        stem = rng.choice(stems)
        branch = draw_tokens(rng, 3, rng.randint(0, 2 * size))
        prompt = stem[: rng.randint(0, len(stem))] + branch
        # One token more than full blocks, because a full last block is computed but never reused.
        prompt = prompt[: len(prompt) // size * size] + (rng.randrange(3),)
        at = rng.randint(0, 20)
        request = Request(
            request_id,
            prompt,
            rng.randint(1, 4),
            sampling=SamplingConfig(num_return_sequences=rng.choice([1, 1, 3])),
            output=OutputOptions(return_perf_metrics=True),
            identity=_with_extra_ids(rng, rng.choice(identities), len(prompt)),
            prompt_table=rng.choice([None, None, make_table()]),
        )
        arrivals[at] = (*arrivals.get(at, ()), request)
    config = SchedulingConfig(
        rng.choice([CapacityPolicy.GUARANTEED_NO_EVICT, CapacityPolicy.MAX_UTILIZATION]),
        max_num_tokens=slots + size + rng.choice([0, 60]),
        enable_chunked_context=True,
        context_chunking_policy=rng.choice(list(ChunkingPolicy)),
    )
    limits = EngineLimits(
        VOCAB_SIZE, 100, slots, 2000, size, overlaps_iterations=rng.choice([False, True]), hidden_size=1
    )
    return Scenario(seed, limits, config, arrivals, {})


def _with_extra_ids(rng: random.Random, identity: PrefixIdentity, prompt_length: int) -> PrefixIdentity:
    extra_ids = rng.choice([(), (0,) * prompt_length, (9, *(0,) * (prompt_length - 1))])
    return dataclasses.replace(identity, extra_ids=extra_ids)


def prefixes_of(request: Request, tokens_per_block: int) -> list[Hashable]:
    """Return everything that each reusable full block of a prompt depends on."""
    identity, prompt = request.identity, request.input_token_ids
    scope = identity.cache_salt_id, request.prompt_table
    extra_ids = identity.extra_ids or (0,) * len(prompt)
    ends = range(tokens_per_block, len(prompt), tokens_per_block)
    return [(scope, prompt[:end], extra_ids[:end]) for end in ends]


@pytest.mark.parametrize("seed", with_all(range(80), range(30)))
def test_every_prefix_is_computed_once(seed):
    scenario = draw_family(seed)
    size, requests = scenario.limits.tokens_per_block, scenario.requests.values()
    sought = sum(len(prefixes_of(r, size)) * r.sampling.num_sequences for r in requests)
    distinct = {prefix for request in requests for prefix in prefixes_of(request, size)}
    server = SimulatedServer(scenario)
    while not server.is_done:
        server.step()
    server.check_end()
    outcome, metrics, stats = server.outcome, server.scheduler.metrics(), server.scheduler.stats(None)
    assert outcome.missed.total() == stats.num_missed_blocks == len(distinct)
    assert outcome.reused.total() == sought - len(distinct)
    assert stats.num_reused_blocks == sought - len(distinct) + outcome.copied.total()
    assert metrics.num_hit_tokens >= (sought - len(distinct)) * size
    assert metrics.num_missed_tokens == len(distinct) * size
    told = [
        response.result.perf_metrics
        for responses in outcome.responses.values()
        for response in responses
        if response.result and response.result.is_sequence_final and response.result.perf_metrics
    ]
    assert len(told) == sum(request.sampling.num_sequences for request in requests)
    assert sum(each.num_missed_blocks for each in told) == len(distinct)
    assert sum(each.num_reused_blocks for each in told) == stats.num_reused_blocks


def test_many_requests_of_a_family_share_prefixes():
    outcomes = [run(draw_family(seed)) for seed in range(20)]
    assert sum(outcome.reused.total() >= outcome.missed.total() for outcome in outcomes) > 5
    assert sum(outcome.missed.total() > 10 for outcome in outcomes) > 5


# ---------------------------------------------------------------------- eviction

SIZE = 4
PROMPT = tuple(range(100, 100 + 6 * SIZE + 1))  # six full blocks and a token
OTHER = tuple(range(300, 300 + 3 * SIZE + 1))  # three full blocks and a token


def run_one_after_another(num_blocks: int, *requests: Request, gap: int = 10) -> RunOutcome:
    """Run requests of which each arrives long after the previous one has ended."""
    config = SchedulingConfig(max_num_tokens=64)
    arrivals = {gap * place: (request,) for place, request in enumerate(requests)}
    return run(Scenario(0, EngineLimits(VOCAB_SIZE, 100, 2, num_blocks, SIZE), config, arrivals, {}))


def make_request(
    request_id: int, prompt: tuple[int, ...], *worth: tuple[int, int | None, Retention]
) -> Request:
    ranges = tuple(TokenRangeRetention(start, end, retention) for start, end, retention in worth)
    return Request(request_id, prompt, 1, retention=RetentionConfig(ranges))


def unrelated_prompt(num_blocks: int, first_token: int = 500) -> tuple[int, ...]:
    """A prompt without a common beginning with the others."""
    return tuple(range(first_token, first_token + num_blocks * SIZE))


def test_the_end_of_a_prefix_is_evicted_before_its_beginning():
    """Nine cached blocks and one empty one; four are needed, so the oldest prompt loses its last three."""
    outcome = run_one_after_another(
        10,
        make_request(1, PROMPT),
        make_request(2, OTHER),
        make_request(3, unrelated_prompt(4)),
        make_request(4, PROMPT),
    )
    assert (outcome.reused[4, 0], outcome.missed[4, 0]) == (3, 3)


def test_a_block_of_low_priority_stays_while_its_children_do():
    """The beginning has priority 0 and the rest 100: the other prompt is evicted before any of its blocks."""
    low, high = Retention(0), Retention(100)
    kept = make_request(1, PROMPT, (0, 2 * SIZE, low), (2 * SIZE, None, high))
    outcome = run_one_after_another(
        10, kept, make_request(2, OTHER), make_request(3, unrelated_prompt(4)), make_request(4, PROMPT)
    )
    assert (outcome.reused[4, 0], outcome.missed[4, 0]) == (6, 0)


@pytest.mark.parametrize(("duration_ms", "num_found"), [(None, 6), (10_000, 6), (40, 3)])
def test_a_timed_priority_holds_for_its_duration(duration_ms, num_found):
    """The iterations between take 50 ms; after 40 ms the prompt has the default priority again."""
    kept = make_request(1, PROMPT, (0, None, Retention(100, duration_ms)))
    outcome = run_one_after_another(
        10, kept, make_request(2, OTHER), make_request(3, unrelated_prompt(4)), make_request(4, PROMPT)
    )
    assert outcome.reused[4, 0] == num_found

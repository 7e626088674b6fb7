"""Random seeds through the simulated server, and proof that it would notice if the core were wrong."""

from __future__ import annotations

import dataclasses

import pytest

import inflight.core.kv_cache_manager as kv_cache_manager
from inflight.core.block_pool import BlockPool
from inflight.core.config import CapacitySchedulerPolicy
from inflight.core.kv_cache_manager import ROOT_DIGEST, KvCacheManager
from inflight.core.scheduler import Scheduler

from .simulated_server import Outcome, Scenario, draw, run, scenarios

SEEDS = range(1500)


@pytest.fixture(scope="module")
def outcomes() -> list[tuple[Scenario, Outcome]]:
    """Every scenario with one and with two batches in flight."""
    drawn = (dataclasses.replace(scenario, depth=depth) for scenario in scenarios(SEEDS) for depth in (1, 2))
    return [(scenario, run(scenario)) for scenario in drawn]


def test_every_seed_gives_every_request_the_tokens_it_has_alone(outcomes):
    assert len(outcomes) == 2 * len(SEEDS)


def test_the_seeds_reach_what_they_are_meant_to_reach(outcomes):
    """Pauses, chunks, reuse, full batches: a simulation that never gets there proves nothing."""
    assert sum(outcome.num_pauses > 0 for _, outcome in outcomes) > len(SEEDS) // 20
    assert sum(outcome.num_chunks > 0 for _, outcome in outcomes) > len(SEEDS) // 20
    assert sum(outcome.num_reused_blocks > 0 for _, outcome in outcomes) > len(SEEDS) // 10
    errors = [r for _, outcome in outcomes for rs in outcome.responses.values() for r in rs if r.error]
    assert len(errors) > len(SEEDS) // 20
    assert sum(outcome.max_rows > 3 for _, outcome in outcomes) > len(SEEDS) // 20


def test_guaranteed_no_evict_never_pauses(outcomes):
    policy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
    assert not any(outcome.num_pauses for scenario, outcome in outcomes if scenario.config.policy is policy)


def test_a_run_is_a_function_of_its_seed():
    for seed in range(20):
        first, second = run(draw(seed)), run(draw(seed))
        assert first.responses == second.responses and first.num_iterations == second.num_iterations


def test_max_utilization_admits_at_least_as_early():
    """With plenty of blocks the two policies make the same batches."""
    for seed in range(100):
        scenario = draw(seed)
        roomy = dataclasses.replace(scenario.limits, num_blocks=1000)
        runs = [
            run(
                dataclasses.replace(
                    scenario, limits=roomy, config=dataclasses.replace(scenario.config, policy=policy)
                )
            )
            for policy in CapacitySchedulerPolicy
        ]
        assert runs[0].num_iterations == runs[1].num_iterations


# ---------------------------------------------------------------------- planted faults


def _unchained_block_hash(patch: pytest.MonkeyPatch) -> None:
    chained = kv_cache_manager.block_digest
    patch.setattr(kv_cache_manager, "block_digest", lambda parent, tokens: chained(ROOT_DIGEST, tokens))


def _missing_reference_count(patch: pytest.MonkeyPatch) -> None:
    share = BlockPool.share

    def share_without_counting(pool: BlockPool, block_ids: tuple[int, ...]) -> None:
        share(pool, [block_id for block_id in block_ids if not pool.is_held(block_id)])

    patch.setattr(BlockPool, "share", share_without_counting)


def _pause_without_free(patch: pytest.MonkeyPatch) -> None:
    pause = Scheduler._pause

    def pause_and_keep_blocks(scheduler: Scheduler, llm_request) -> None:
        release = KvCacheManager.release
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(KvCacheManager, "release", lambda *_: None)
            pause(scheduler, llm_request)
        assert KvCacheManager.release is release

    patch.setattr(Scheduler, "_pause", pause_and_keep_blocks)


def _wrong_block_boundary(patch: pytest.MonkeyPatch) -> None:
    publish = KvCacheManager.publish

    def publish_one_token_early(kv_cache, request_id, token_ids, num_computed_tokens) -> None:
        publish(kv_cache, request_id, token_ids, min(num_computed_tokens + 1, len(token_ids)))

    patch.setattr(KvCacheManager, "publish", publish_one_token_early)
    confirm = Scheduler._confirm

    def confirm_and_publish(scheduler: Scheduler, llm_request, num_tokens: int) -> None:
        confirm(scheduler, llm_request, num_tokens)
        scheduler.kv_cache.publish(
            llm_request.request_id, llm_request.tokens, llm_request.num_computed_tokens
        )

    patch.setattr(Scheduler, "_confirm", confirm_and_publish)


def _freed_while_in_flight(patch: pytest.MonkeyPatch) -> None:
    def drain_at_once(scheduler: Scheduler, llm_request):
        llm_request.num_scheduled_tokens = 0
        return drain(scheduler, llm_request)

    drain = Scheduler._drain
    patch.setattr(Scheduler, "_drain", drain_at_once)


def _streamed_twice_after_a_pause(patch: pytest.MonkeyPatch) -> None:
    pause = Scheduler._pause

    def pause_and_forget(scheduler: Scheduler, llm_request) -> None:
        pause(scheduler, llm_request)
        llm_request.num_streamed_tokens = 0

    patch.setattr(Scheduler, "_pause", pause_and_forget)


@pytest.mark.parametrize(
    "plant",
    [
        _unchained_block_hash,
        _missing_reference_count,
        _pause_without_free,
        _wrong_block_boundary,
        _freed_while_in_flight,
        _streamed_twice_after_a_pause,
    ],
)
def test_a_planted_fault_is_caught(plant, monkeypatch):
    plant(monkeypatch)
    caught = 0
    for seed in range(300):
        try:
            run(draw(seed))
        except (AssertionError, KeyError, IndexError):
            caught += 1
    assert caught > 0, "300 seeds and nothing noticed"

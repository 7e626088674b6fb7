"""Random seeds through the simulated server, and proof that it would notice if the core were wrong."""

from __future__ import annotations

import dataclasses

import pytest

import inflight.core.kv_cache_manager as kv_cache_manager
import inflight.core.scheduler as scheduler_module
from inflight.core.batch import BeamMove, ScheduledBatch
from inflight.core.block_pool import BlockPool
from inflight.core.config import CapacitySchedulerPolicy
from inflight.core.kv_cache_manager import ROOT_SCOPE, KvCacheManager
from inflight.core.scheduler import Scheduler
from inflight.core.stop import FinishReason

from .scenario import Scenario, draw
from .simulated_server import Outcome, run

SEEDS = range(1500)


@pytest.fixture(scope="module")
def outcomes() -> list[tuple[Scenario, Outcome]]:
    """Every scenario with one and with two batches in flight."""
    drawn = (dataclasses.replace(draw(seed), depth=depth) for seed in SEEDS for depth in (1, 2))
    return [(scenario, run(scenario)) for scenario in drawn]


def test_every_seed_gives_every_request_what_it_has_alone(outcomes):
    assert len(outcomes) == 2 * len(SEEDS)


def test_the_seeds_reach_what_they_are_meant_to_reach(outcomes):
    """Pauses, chunks, copies, rejected drafts: a simulation that never gets there proves nothing."""
    often, seldom = len(SEEDS) // 10, len(SEEDS) // 20

    def count(reached) -> int:
        return sum(bool(reached(outcome)) for _, outcome in outcomes)

    assert count(lambda outcome: outcome.num_pauses) > seldom
    assert count(lambda outcome: outcome.num_chunks) > seldom
    assert count(lambda outcome: outcome.num_reused_blocks) > often
    assert count(lambda outcome: outcome.max_rows > 3) > often
    assert count(lambda outcome: outcome.num_copies) > often
    assert count(lambda outcome: outcome.num_mixed_batches) > often
    assert count(lambda outcome: outcome.num_lookups) > often
    assert count(lambda outcome: outcome.num_accepted) > often
    assert count(lambda outcome: outcome.num_rejected) > often


def test_the_seeds_reach_every_ending(outcomes):
    responses = [r for _, outcome in outcomes for rs in outcome.responses.values() for r in rs]
    assert sum(response.error is not None for response in responses) > len(SEEDS) // 20
    reasons = [reason for r in responses if r.result for reason in r.result.finish_reasons]
    for reason in (FinishReason.END_ID, FinishReason.STOP_WORDS, FinishReason.LENGTH, FinishReason.CANCELLED):
        assert reasons.count(reason) > len(SEEDS) // 2


def test_guaranteed_no_evict_never_pauses(outcomes):
    policy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
    assert not any(outcome.num_pauses for scenario, outcome in outcomes if scenario.config.policy is policy)


def test_a_run_is_a_function_of_its_seed():
    for seed in range(20):
        first, second = run(draw(seed)), run(draw(seed))
        assert first.responses == second.responses and first.num_iterations == second.num_iterations


def test_max_utilization_admits_at_least_as_early():
    """With plenty of blocks the two policies make the same batches; looked-up drafts need reserved ones."""
    for seed in range(60):
        scenario = draw(seed)
        arrivals = {
            iteration: [dataclasses.replace(request, prompt_lookup_num_tokens=0) for request in requests]
            for iteration, requests in scenario.arrivals.items()
        }
        scenario = dataclasses.replace(scenario, arrivals=arrivals)
        roomy = dataclasses.replace(scenario.limits, num_blocks=3000)
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
    patch.setattr(kv_cache_manager, "block_digest", lambda parent, tokens: chained(ROOT_SCOPE, tokens))


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

    def publish_one_token_early(kv_cache, key, token_ids, num_computed_tokens) -> None:
        publish(kv_cache, key, token_ids, min(num_computed_tokens + 1, len(token_ids)))

    patch.setattr(KvCacheManager, "publish", publish_one_token_early)


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


def _missing_copy_on_write(patch: pytest.MonkeyPatch) -> None:
    grow_beams = KvCacheManager.grow_beams

    def write_into_shared_blocks(kv_cache: KvCacheManager, key: int, num_tokens: int):
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(BlockPool, "is_held_once", lambda pool, block_id: True)
            return grow_beams(kv_cache, key, num_tokens)

    patch.setattr(KvCacheManager, "grow_beams", write_into_shared_blocks)


def _copy_of_nothing(patch: pytest.MonkeyPatch) -> None:
    """The beam gets a block of its own, but not what was in it."""
    _change_batches(patch, lambda batch: dataclasses.replace(batch, block_copies=()))


def _move_to_the_wrong_parent(patch: pytest.MonkeyPatch) -> None:
    def swapped(batch: ScheduledBatch) -> ScheduledBatch:
        parents = [move.parent_slot for move in batch.moves]
        moves = (
            BeamMove(move.slot, parent, move.token_id)
            for move, parent in zip(batch.moves, parents[1:] + parents[:1])
        )
        return dataclasses.replace(batch, moves=tuple(moves))

    _change_batches(patch, swapped)


def _only_the_prompt_looked_back_at(patch: pytest.MonkeyPatch) -> None:
    """A resumed sequence's penalties would forget what it had generated."""
    _change_starts(patch, lambda start: {"token_ids": start.token_ids[: start.request.prompt_length]})


def _siblings_with_the_same_random_numbers(patch: pytest.MonkeyPatch) -> None:
    _change_starts(patch, lambda start: {"sequence_index": 0})


def _change_starts(patch: pytest.MonkeyPatch, fields) -> None:
    def changed(batch: ScheduledBatch) -> ScheduledBatch:
        starts = (dataclasses.replace(start, **fields(start)) for start in batch.starts)
        return dataclasses.replace(batch, starts=tuple(starts))

    _change_batches(patch, changed)


def _change_batches(patch: pytest.MonkeyPatch, change) -> None:
    schedule = Scheduler.schedule

    def schedule_wrongly(scheduler: Scheduler) -> ScheduledBatch | None:
        batch = schedule(scheduler)
        return batch and change(batch)

    patch.setattr(Scheduler, "schedule", schedule_wrongly)


def _rejected_draft_token_kept(patch: pytest.MonkeyPatch) -> None:
    confirm_chunk = scheduler_module.confirm_chunk

    def confirm_every_draft(llm_request, chunk, num_new_tokens: int) -> None:
        confirm_chunk(llm_request, chunk, 1 + chunk.num_draft_tokens)

    patch.setattr(scheduler_module, "confirm_chunk", confirm_every_draft)


@pytest.mark.parametrize(
    "plant",
    [
        _unchained_block_hash,
        _missing_reference_count,
        _pause_without_free,
        _wrong_block_boundary,
        _freed_while_in_flight,
        _streamed_twice_after_a_pause,
        _missing_copy_on_write,
        _copy_of_nothing,
        _move_to_the_wrong_parent,
        _rejected_draft_token_kept,
        _only_the_prompt_looked_back_at,
        _siblings_with_the_same_random_numbers,
    ],
)
def test_a_planted_fault_is_caught(plant, monkeypatch):
    plant(monkeypatch)
    assert any(map(_notices, range(300))), "300 seeds and nothing noticed"


def _notices(seed: int) -> bool:
    try:
        run(draw(seed))
    except (AssertionError, KeyError, IndexError):
        return True
    return False

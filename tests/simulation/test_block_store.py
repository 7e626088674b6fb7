"""Random seeds through a server that saves KV blocks, restarts, and loads them; and faults planted in it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection

import pytest

from inflight.core.kv import block_store, kv_cache_manager
from inflight.core.kv.block_loader import BlockLoader
from inflight.core.kv.block_pool import BlockPool
from inflight.core.kv.block_store import LoadResult, SavedBlocks, SavedPiece, StoreCommands
from inflight.core.kv.kv_cache_manager import KvCacheManager
from inflight.core.kv.state_snapshots import StateSnapshots
from inflight.core.schedule.admission import Admission
from inflight.core.scheduler import Scheduler
from inflight.testing.simulation.scenario import Scenario, draw
from inflight.testing.simulation.store_simulation import draw_conversations, run_with_store
from tests.tiers import examples

NUM_SEEDS = examples(fast=60, all=1000)
SEEDS_OF_FAULTS = range(150)


def scenarios(seed: int) -> tuple[Scenario, Scenario]:
    return draw(seed).in_turn(), draw(seed).ahead().without_host_waits()


def conversations(seed: int, has_state: bool) -> Scenario:
    drawn = draw_conversations(seed)
    return drawn.with_state() if has_state else drawn


@pytest.mark.parametrize("has_state", [False, True], ids=["blocks", "blocks and recurrent states"])
def test_saved_blocks_change_no_result_whatever_the_store_loses(has_state):
    found: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        for scenario in scenarios(seed):
            found.update(vars(run_with_store(scenario.with_state() if has_state else scenario)))
    assert found["num_loaded"] > NUM_SEEDS
    assert (
        min(found[name] for name in ("num_unread", "num_waits", "num_rebuilds", "num_failed")) > NUM_SEEDS / 3
    )


@pytest.mark.parametrize("has_state", [False, True], ids=["blocks", "blocks and recurrent states"])
def test_loads_beside_copies_in_a_small_cache_change_no_result(has_state):
    found: Counter[str] = Counter()
    for seed in range(NUM_SEEDS // 3):
        found.update(vars(run_with_store(conversations(seed, has_state))))
    assert min(found["num_loaded"], found["num_unread"]) > NUM_SEEDS


Patch = pytest.MonkeyPatch


def blocks_of_a_failed_load_published(patch: Patch) -> None:
    end = SavedBlocks.end_load

    def end_all(saved: SavedBlocks, result: LoadResult):
        loading = end(saved, result)
        object.__setattr__(result, "num_pieces", len(loading.pieces))
        return loading

    patch.setattr(SavedBlocks, "end_load", end_all)


def blocks_published_before_they_are_loaded(patch: Patch) -> None:
    start = KvCacheManager.load_saved

    def start_and_publish(kv_cache: KvCacheManager, *arguments) -> None:
        start(kv_cache, *arguments)
        assert kv_cache.saved is not None
        for block in list(kv_cache.saved.loads.values())[-1].blocks:
            kv_cache.pool.publish(block.block_id, block.digest, block.parent, tokens=block.tokens)

    patch.setattr(KvCacheManager, "load_saved", start_and_publish)


def loads_forgotten_when_records_are_rebuilt(patch: Patch) -> None:
    clear = BlockPool.clear
    patch.setattr(BlockPool, "clear", lambda pool, held=(): clear(pool))


def loaded_blocks_never_released(patch: Patch) -> None:
    update = BlockLoader.update

    def update_and_hold(loader: BlockLoader, news) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(BlockPool, "release", lambda pool, block_ids: None)
            update(loader, news)

    patch.setattr(BlockLoader, "update", update_and_hold)


def loads_not_promised(patch: Patch) -> None:
    start = KvCacheManager.load_saved

    def start_without_promise(kv_cache: KvCacheManager, *arguments) -> None:
        before = dict(kv_cache._promises)
        start(kv_cache, *arguments)
        kv_cache._promises.clear()
        kv_cache._promises.update(before)

    patch.setattr(KvCacheManager, "load_saved", start_without_promise)


def saved_after_the_next_batch(patch: Patch) -> None:
    take = Scheduler.take_store_commands
    late: dict[int, StoreCommands] = {}

    def take_late(scheduler: Scheduler) -> StoreCommands:
        now, before = take(scheduler), late.get(id(scheduler), StoreCommands())
        late[id(scheduler)] = StoreCommands(saves=now.saves)
        return StoreCommands(before.saves, now.loads, now.drops)

    patch.setattr(Scheduler, "take_store_commands", take_late)


def a_block_saved_under_the_next_digest(patch: Patch) -> None:
    save = SavedBlocks.save
    last: list[int] = [0]

    def save_the_block_before(saved: SavedBlocks, piece: SavedPiece, retention) -> None:
        save(saved, dataclasses.replace(piece, index=last[0]), retention)
        last[0] = piece.index

    patch.setattr(SavedBlocks, "save", save_the_block_before)


def a_load_that_is_never_begun(patch: Patch) -> None:
    patch.setattr(Admission, "_load_saved_blocks", lambda admission, llm_request: None)


def snapshot_of_a_failed_load_used(patch: Patch) -> None:
    end = StateSnapshots.end_load
    patch.setattr(StateSnapshots, "end_load", lambda states, digest, _: end(states, digest, True))


def snapshot_taken_while_it_is_loaded(patch: Patch) -> None:
    begin = StateSnapshots.begin_load

    def begin_and_free(states: StateSnapshots, digest: bytes, kept: Collection[int] = ()) -> int | None:
        snapshot = begin(states, digest, kept)
        if snapshot is not None:
            states._free.append(snapshot)
        return snapshot

    patch.setattr(StateSnapshots, "begin_load", begin_and_free)


def states_of_all_prefixes_under_one_key(patch: Patch) -> None:
    for module in (kv_cache_manager, block_store):
        patch.setattr(module, "state_key", lambda digest: b"state")


def loaded_snapshots_forgotten_when_records_are_rebuilt(patch: Patch) -> None:
    clear = StateSnapshots.clear

    def clear_all(states: StateSnapshots) -> None:
        clear(states)
        states._free = list(reversed(range(states.num_snapshots)))

    patch.setattr(StateSnapshots, "clear", clear_all)


class _Never(set[int]):
    """A set that stays empty."""

    def add(self, element: int) -> None:
        pass


def sources_of_copies_loaded_over(patch: Patch) -> None:
    _without_sources(patch, "_source_blocks")


def snapshots_of_starts_loaded_over(patch: Patch) -> None:
    _without_sources(patch, "_source_snapshots")


def _without_sources(patch: Patch, name: str) -> None:
    init = BlockLoader.__init__

    def init_without(loader: BlockLoader, *arguments) -> None:
        init(loader, *arguments)
        setattr(loader, name, _Never())

    patch.setattr(BlockLoader, "__init__", init_without)


FAULTS_OF_STATES: list[Callable[[Patch], None]] = [
    snapshot_of_a_failed_load_used,
    snapshot_taken_while_it_is_loaded,
    states_of_all_prefixes_under_one_key,
    loaded_snapshots_forgotten_when_records_are_rebuilt,
]
FAULTS: list[Callable[[Patch], None]] = [
    blocks_of_a_failed_load_published,
    blocks_published_before_they_are_loaded,
    loads_forgotten_when_records_are_rebuilt,
    loaded_blocks_never_released,
    loads_not_promised,
    saved_after_the_next_batch,
    a_block_saved_under_the_next_digest,
    a_load_that_is_never_begun,
]


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_detected(plant, monkeypatch):
    plant(monkeypatch)
    assert any(map(_is_noticed, SEEDS_OF_FAULTS)), f"{len(SEEDS_OF_FAULTS)} seeds and nothing noticed"


@pytest.mark.parametrize("plant", FAULTS_OF_STATES, ids=lambda plant: plant.__name__)
def test_a_fault_planted_in_recurrent_states_is_detected(plant, monkeypatch):
    plant(monkeypatch)
    found = (_is_noticed(seed, has_state=True) for seed in SEEDS_OF_FAULTS)
    assert any(found), f"{len(SEEDS_OF_FAULTS)} seeds and nothing noticed"


@pytest.mark.parametrize(
    ("plant", "has_state"),
    [(sources_of_copies_loaded_over, False), (snapshots_of_starts_loaded_over, True)],
    ids=["blocks", "snapshots"],
)
def test_a_load_over_the_source_of_a_copy_is_detected(plant, has_state, monkeypatch):
    plant(monkeypatch)
    found = (_fails(conversations(seed, has_state)) for seed in SEEDS_OF_FAULTS)
    assert any(found), f"{len(SEEDS_OF_FAULTS)} seeds and nothing noticed"


def _is_noticed(seed: int, has_state: bool = False) -> bool:
    return any(_fails(scenario.with_state() if has_state else scenario) for scenario in scenarios(seed))


def _fails(scenario: Scenario) -> bool:
    """Whether a check fails or the core raises."""
    try:
        run_with_store(scenario)
    except (AssertionError, LookupError, ValueError):
        return True
    return False

"""Faults to plant in recurrent states and their snapshots."""

from __future__ import annotations

import dataclasses

import pytest

from inflight.core.kv.kv_cache_manager import KvCacheManager, PrefixMatch
from inflight.core.kv.state_snapshots import StateSnapshots
from inflight.core.schedule import batch_builder
from inflight.testing.fake_engine import FakeEngine

Patch = pytest.MonkeyPatch


def prefix_used_without_its_state(patch: Patch) -> None:
    def match(kv_cache: KvCacheManager, states, saved, digests, block_ids, num_saved) -> PrefixMatch:
        num_held = sum(map(kv_cache.pool.is_held, block_ids))
        return PrefixMatch(tuple(block_ids), num_held, num_found=len(block_ids))

    patch.setattr(KvCacheManager, "_match_state", match)
    patch.setattr(StateSnapshots, "use", lambda states, digest, key: -1)


def snapshot_of_another_prefix(patch: Patch) -> None:
    def use_the_oldest(states: StateSnapshots, digest: bytes, key: int) -> int:
        return next(iter(states._snapshot_of.values()))

    patch.setattr(StateSnapshots, "use", use_the_oldest)


def snapshot_not_waited_for(patch: Patch) -> None:
    patch.setattr(StateSnapshots, "is_promised", lambda *_: False)


def overwritten_snapshot_still_found(patch: Patch) -> None:
    take = StateSnapshots._take

    def take_and_keep(states: StateSnapshots) -> int | None:
        oldest = next(iter(states._snapshot_of.items()), None)
        snapshot = take(states)
        if oldest is not None and snapshot == oldest[1]:
            states._snapshot_of[oldest[0]] = snapshot
        return snapshot

    patch.setattr(StateSnapshots, "_take", take_and_keep)


def snapshot_found_before_its_batch_is_back(patch: Patch) -> None:
    save = StateSnapshots.save

    def save_and_publish(states: StateSnapshots, key: int, start: int, end: int):
        saved = save(states, key, start, end)
        for num_tokens, snapshot in saved:
            digest = states._saves[key].planned[num_tokens]
            states._snapshot_of.setdefault(digest, snapshot)
        return saved

    patch.setattr(StateSnapshots, "save", save_and_publish)


def failed_saves_still_found(patch: Patch) -> None:
    release = StateSnapshots.release

    def publish_what_is_pending(states: StateSnapshots, key: int) -> None:
        saves = states._saves.get(key)
        for num_tokens, digest in list(saves.planned.items()) if saves else ():
            if num_tokens in saves.pending:
                states.computed(key, num_tokens, digest)
        release(states, key)

    patch.setattr(StateSnapshots, "release", publish_what_is_pending)


def snapshot_outlives_its_block(patch: Patch) -> None:
    drop = StateSnapshots.drop

    def drop_no_block(states: StateSnapshots, digest: bytes) -> None:
        if states._rolling.get(digest) is not None or not states._free:
            drop(states, digest)

    patch.setattr(StateSnapshots, "drop", drop_no_block)


def saved_a_token_late(patch: Patch) -> None:
    save = batch_builder.StateSave
    patch.setattr(
        batch_builder,
        "StateSave",
        lambda slot, num_tokens, snapshot: (
            save(slot, num_tokens - 1, snapshot) if num_tokens > 1 else save(slot, num_tokens, snapshot)
        ),
    )


def rejected_draft_kept_in_the_state(patch: Patch) -> None:
    choose = FakeEngine._choose

    def choose_and_keep(engine: FakeEngine, row, digests, drafts):
        tokens = choose(engine, row, digests, drafts)
        row.state = digests[min(len(tokens), len(digests) - 1)]
        return tokens

    patch.setattr(FakeEngine, "_choose", choose_and_keep)


def state_left_from_the_slots_last_sequence(patch: Patch) -> None:
    apply = FakeEngine._apply

    def apply_and_keep(engine: FakeEngine, batch) -> None:
        left = {slot: engine._slots[slot].state for slot in batch.released_slots if slot in engine._slots}
        apply(engine, batch)
        for start in batch.starts:
            if start.snapshot < 0 and start.slot in left:
                engine._slots[start.slot] = dataclasses.replace(
                    engine._slots[start.slot], state=left[start.slot]
                )

    patch.setattr(FakeEngine, "_apply", apply_and_keep)


FAULTS_OF_STATES = (
    prefix_used_without_its_state,
    snapshot_of_another_prefix,
    snapshot_not_waited_for,
    overwritten_snapshot_still_found,
    snapshot_found_before_its_batch_is_back,
    failed_saves_still_found,
    snapshot_outlives_its_block,
    saved_a_token_late,
    rejected_draft_kept_in_the_state,
    state_left_from_the_slots_last_sequence,
)

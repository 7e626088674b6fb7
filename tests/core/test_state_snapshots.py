"""Snapshots of recurrent states: saving, lookup and eviction."""

from __future__ import annotations

from inflight.core.kv.state_snapshots import StateSnapshots
from inflight.testing.simulation.integrity import check_integrity

A, B, C, D = (bytes([number]) * 16 for number in range(4))


def saved(states: StateSnapshots, key: int, num_tokens: int, digest: bytes) -> None:
    """Run a sequence that saves one snapshot in its context, and release it."""
    states.start(key, {num_tokens: digest})
    states.save(key, 0, num_tokens)
    states.computed(key, num_tokens, digest)
    states.release(key)
    check_integrity(states)


def test_a_snapshot_is_found_only_after_its_batch_has_returned():
    states = StateSnapshots(2)
    states.start(1, {8: B})
    assert states.save(1, 0, 8) == [(8, 0)]
    assert states.find([A, B]) == 0 and states.is_promised([A, B])
    states.computed(1, 8, B)
    assert states.find([A, B, C]) == 2 and not states.is_promised([A, B])
    assert states.use(B) == 0


def test_a_chunk_saves_the_planned_snapshots_of_its_tokens():
    states = StateSnapshots(3)
    states.start(1, {4: A, 8: B})
    assert states.save(1, 0, 6) == [(4, 0)]
    assert states.save(1, 6, 10) == [(8, 1)]
    check_integrity(states)


def test_the_least_recently_used_snapshot_is_evicted():
    states = StateSnapshots(2)
    saved(states, 1, 4, A)
    saved(states, 2, 4, B)
    states.use(A)
    saved(states, 3, 4, C)
    assert [states.find([digest]) for digest in (A, B, C)] == [1, 0, 1]


def test_pending_snapshots_are_not_evicted():
    states = StateSnapshots(1)
    states.start(1, {4: A})
    states.start(2, {4: B})
    assert states.save(1, 0, 4) == [(4, 0)]
    assert states.save(2, 0, 4) == []
    assert not states.is_promised([B]), "a snapshot that is not saved stayed promised"
    states.computed(1, 4, A)
    states.computed(2, 4, B)
    assert [states.find([A]), states.find([B])] == [1, 0]


def test_generation_replaces_the_previous_snapshot_of_its_sequence():
    states = StateSnapshots(3)
    states.start(1, {})
    for num_tokens, digest in ((4, A), (8, B)):
        assert states.save_generated(1, num_tokens) is not None
        states.computed(1, num_tokens, digest)
    assert [states.find([A]), states.find([B])] == [0, 1]
    check_integrity(states)


def test_generation_keeps_a_snapshot_that_another_sequence_has_used():
    states = StateSnapshots(3)
    states.start(1, {})
    states.save_generated(1, 4)
    states.computed(1, 4, A)
    states.use(A)
    states.save_generated(1, 8)
    assert states.find([A]) == 1


def test_release_frees_pending_snapshots_and_withdraws_promises():
    states = StateSnapshots(1)
    states.start(1, {4: A, 8: B})
    states.save(1, 0, 4)
    states.release(1)
    assert states.find([A, B]) == 0 and not states.is_promised([A, B])
    assert states.num_pending == 0
    saved(states, 2, 4, D)


def test_without_memory_for_snapshots_none_is_saved_or_promised():
    states = StateSnapshots(0)
    states.start(1, {4: A})
    assert not states.is_promised([A]) and states.save(1, 0, 4) == []
    assert states.save_generated(1, 8) is None

"""Snapshots of recurrent states: saving, lookup and eviction."""

from __future__ import annotations

from inflight.core.kv.state_snapshots import StateSnapshots
from inflight.testing.simulation.integrity import check_integrity

A, B, C, D, E, F, G = (bytes([number]) * 16 for number in range(7))


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
    assert states.use(B, 9) == 0


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
    states.use(A, 9)
    saved(states, 3, 4, C)
    assert [states.find([digest]) for digest in (A, B, C)] == [1, 0, 1]


def take_turn(states: StateSnapshots, key: int, before: bytes | None, prompt: bytes, answer: bytes) -> None:
    """Run a sequence that starts from a snapshot and saves one at the end of its prompt and one in generation."""
    states.start(key, {8: prompt})
    if before is not None:
        states.use(before, key)
    states.save(key, 4, 8)
    states.computed(key, 8, prompt)
    states.save_generated(key, 12)
    states.computed(key, 12, answer)
    check_integrity(states)
    states.release(key)
    check_integrity(states)


def test_a_conversation_keeps_the_snapshot_of_its_last_turn_longest():
    states = StateSnapshots(4)
    saved(states, 9, 4, D)
    take_turn(states, 1, None, A, B)
    saved(states, 8, 4, C)
    assert [states.find([digest]) for digest in (A, B, C, D)] == [1, 1, 1, 1]
    saved(states, 7, 4, E)
    assert [states.find([digest]) for digest in (A, B, C, D, E)] == [0, 1, 1, 1, 1]
    take_turn(states, 2, B, F, G)  # evicts D and C, the least recently used
    assert [states.find([digest]) for digest in (B, E, F, G)] == [1, 1, 1, 1]
    saved(states, 6, 4, A)
    saved(states, 5, 4, C)
    assert [states.find([digest]) for digest in (B, F, E, G)] == [0, 0, 1, 1]


def test_a_snapshot_that_others_use_is_not_superseded():
    states = StateSnapshots(3)
    states.start(1, {4: A})
    states.save(1, 0, 4)
    states.computed(1, 4, A)
    states.start(2, {})
    states.use(A, 2)
    states.save_generated(1, 8)
    states.computed(1, 8, B)
    saved(states, 3, 4, C)
    saved(states, 4, 4, D)
    assert [states.find([digest]) for digest in (A, B, C, D)] == [0, 1, 1, 1], "A was used before B"
    check_integrity(states)


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
    states.use(A, 9)
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

"""Block tables, reservations, prefix reuse and promises, in exact block ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from inflight.core.kv.block_keys import ROOT_SCOPE, CacheRules, block_digest, private_scope
from inflight.core.kv.kv_cache_manager import KvCacheManager, PrefixMatch
from inflight.testing.simulation.integrity import check_integrity

SHARED, UNSHARED = CacheRules(ROOT_SCOPE), CacheRules(None)


def make_cache(num_blocks: int = 8, tokens_per_block: int = 4) -> KvCacheManager:
    return KvCacheManager(num_blocks, tokens_per_block)


def admit(
    cache: KvCacheManager, key: int, num_blocks: int, tokens: Sequence[int] = (), rules: CacheRules = SHARED
) -> None:
    match = cache.match_prefix(key, tokens, rules) if tokens else PrefixMatch()
    cache.admit(key, match, num_blocks, rules, len(tokens))


def found(cache: KvCacheManager, key: int, tokens: Sequence[int], rules: CacheRules = SHARED) -> PrefixMatch:
    return cache.match_prefix(key, tokens, rules)


def run_to_end(
    cache: KvCacheManager, key: int, tokens: Sequence[int], rules: CacheRules = SHARED
) -> tuple[int, ...]:
    """Admit, compute and release a sequence; returns its blocks."""
    admit(cache, key, cache.blocks_for(len(tokens)), tokens, rules)
    cache.extend(key, len(tokens))
    cache.publish(key, tokens, len(tokens))
    table = cache.block_table(key)
    cache.release(key)
    return table


def test_growth_uses_the_reservation_and_release_returns_it():
    cache = make_cache()
    admit(cache, 1, 3)
    assert (cache.num_reserved, cache.num_unreserved) == (3, 5)
    assert cache.extend(1, 5) == (0, 1)
    assert (cache.num_reserved, cache.num_unreserved) == (1, 5)
    assert cache.extend(1, 8) == ()
    cache.release(1)
    assert (cache.num_reserved, cache.num_unreserved) == (0, 8)


def test_growth_beyond_the_reservation_counts_as_missing():
    cache = make_cache()
    admit(cache, 1, 1)
    assert cache.missing_blocks(1, 4) == 0
    assert cache.missing_blocks(1, 9) == 2


def test_a_second_prompt_shares_the_full_blocks_of_the_first():
    cache = make_cache()
    first = run_to_end(cache, 1, list(range(10)))
    match = found(cache, 2, [*range(8), 99, 98])
    assert match == PrefixMatch(first[:2], num_held=0)


def test_the_last_token_is_always_left_to_compute():
    cache = make_cache()
    run_to_end(cache, 1, list(range(8)))
    assert len(found(cache, 2, list(range(8))).block_ids) == 1
    assert len(found(cache, 3, list(range(9))).block_ids) == 2


def test_equal_blocks_behind_different_parents_are_not_shared():
    cache = make_cache()
    run_to_end(cache, 1, [1, 1, 1, 1, 5, 6, 7, 8])
    assert found(cache, 2, [2, 2, 2, 2, 5, 6, 7, 8, 9]).block_ids == ()


def test_a_block_is_shared_while_its_producer_runs():
    cache = make_cache()
    tokens = list(range(9))
    admit(cache, 1, 3, tokens)
    cache.extend(1, 9)
    cache.publish(1, tokens, 4)
    match = found(cache, 2, tokens)
    assert match.num_held == len(match.block_ids) == 1


def test_blocks_freed_counts_only_unshared_blocks():
    cache = make_cache()
    tokens = list(range(9))
    admit(cache, 1, 3, tokens)
    cache.extend(1, 9)
    cache.publish(1, tokens, 9)
    admit(cache, 2, 3, tokens)
    assert cache.blocks_freed_by(1) == 1
    assert cache.blocks_freed_by(2) == 1


def test_without_a_scope_no_block_is_reused_or_published():
    cache = make_cache()
    run_to_end(cache, 1, list(range(8)))
    assert found(cache, 2, list(range(9)), UNSHARED) == PrefixMatch()
    run_to_end(cache, 3, list(range(20, 28)), UNSHARED)
    assert found(cache, 4, list(range(20, 29))) == PrefixMatch()


def test_a_private_scope_is_shared_only_by_its_own_sequences():
    cache = make_cache()
    run_to_end(cache, 1, list(range(8)), CacheRules(private_scope(1)))
    assert len(found(cache, 2, list(range(9)), CacheRules(private_scope(1))).block_ids) == 2
    assert found(cache, 3, list(range(9)), CacheRules(private_scope(3))) == PrefixMatch()
    assert found(cache, 4, list(range(9))) == PrefixMatch()


def test_later_blocks_of_a_released_sequence_are_evicted_first():
    cache = make_cache(num_blocks=3)
    run_to_end(cache, 1, list(range(12)))
    admit(cache, 2, 1)
    cache.extend(2, 4)
    assert len(found(cache, 3, list(range(13))).block_ids) == 2


def test_digests_of_minus_one_and_minus_two_differ():
    assert hash(-1) == hash(-2)
    assert block_digest(ROOT_SCOPE, [-1]) != block_digest(ROOT_SCOPE, [-2])


def test_a_running_block_is_found_again_once_its_parent_is_computed_again():
    """Two sequences compute the same prompt; the one whose blocks are found ends first and is evicted."""
    cache, tokens = make_cache(num_blocks=7), list(range(12))
    for key in (1, 2):
        admit(cache, key, 3, tokens[:9])
    cache.extend(1, 9), cache.extend(2, 9)
    cache.publish(1, tokens[:9], 8)
    cache.publish(2, tokens[:9], 8)
    cache.publish(2, tokens, 12)  # a child of blocks of the first
    cache.release(1)
    assert cache.block_table(2) == (3, 4, 5)
    assert (cache.pool.num_cached, cache.pool.num_empty) == (2, 2)
    admit(cache, 3, 3)
    assert cache.extend(3, 12) == (
        2,
        6,
        1,
    )  # blocks without content, then, without a leaf, the block released first
    check_integrity(cache)
    assert found(cache, 4, [*tokens, 99]).block_ids == (0,)
    cache.release(3)
    assert run_to_end(cache, 5, tokens[:8]) == (0, 2)  # the content of block 1, which has a child already
    assert found(cache, 6, [*tokens, 99]).block_ids == (0, 2, 5)
    check_integrity(cache)


# ---------------------------------------------------------------------- counts


def test_reused_missed_and_taken_blocks_are_counted():
    cache = make_cache()
    run_to_end(cache, 1, list(range(9)))
    run_to_end(cache, 2, list(range(9)))
    assert (cache.num_reused_blocks, cache.num_missed_blocks, cache.num_taken_blocks) == (2, 2, 4)


def test_block_counts_of_a_sequence_are_those_of_its_admission():
    cache = make_cache()
    run_to_end(cache, 1, list(range(9)))
    admit(cache, 2, 5, [*range(8), 50, 51, 52, 53, 54])
    counts = cache.block_counts(2)
    assert (counts.new, counts.reused, counts.missed) == (2, 2, 1)
    cache.extend(2, 17)
    assert cache.block_counts(2) == counts, "blocks of generated tokens are not among them"
    cache.release(2)
    admit(cache, 2, 5, [*range(8), 50, 51, 52, 53, 54])
    assert cache.block_counts(2) == (2, 2, 1)


def test_a_block_that_must_be_computed_does_not_count_as_missed():
    cache = make_cache()
    admit(cache, 1, 2, list(range(8)))
    assert cache.block_counts(1) == (2, 0, 1)
    run_to_end(cache, 2, list(range(20, 23)))
    assert cache.num_missed_blocks == 1


def test_held_and_reserved_blocks_of_a_sequence_are_counted():
    cache = make_cache()
    admit(cache, 1, 4)
    assert cache.held(1) == (0, 4)
    cache.extend(1, 5)
    assert cache.held(1) == (2, 2)
    beams = make_beams()
    assert beams.held(1)[0] == 2
    beams.grow_beams(1, 7)
    assert beams.held(1)[0] == 4
    assert sum(beams.held(1)) == 1 + 3 * 3


def test_blocks_taken_by_beams_are_counted():
    cache = make_beams()
    assert cache.num_taken_blocks == 2
    cache.grow_beams(1, 7)
    assert cache.num_taken_blocks == 4
    assert cache.num_generation_blocks == cache.num_copied_blocks == 2
    cache.grow_beams(1, 9)
    assert (cache.num_generation_blocks, cache.num_copied_blocks) == (5, 2)


# ---------------------------------------------------------------------- beginnings of blocks


def test_a_block_with_a_common_beginning_is_copied():
    cache = make_cache()
    run_to_end(cache, 1, list(range(12)))
    tokens = [*range(6), 90, 91]
    match = found(cache, 2, tokens)
    assert (match.block_ids, match.num_copied_tokens) == ((0,), 2)
    admit(cache, 2, 2, tokens)
    source, target = cache.block_copy(2)
    assert source == 1 and cache.block_table(2) == (0, target) and target not in (0, 1, 2)
    assert cache.block_counts(2) == (1, 2, 0) and cache.held(2) == (2, 0)
    cache.publish(2, tokens, 8)
    assert found(cache, 3, [*tokens, 0]).block_ids == (0, target)
    assert found(cache, 4, list(range(9))).block_ids == (0, 1), "the source is as it was"
    check_integrity(cache)


@pytest.mark.parametrize(("tokens", "num_copied"), [([0], 0), ([0, 1], 1), ([0, 1, 2, 3], 3), ([1, 2, 3], 0)])
def test_the_last_token_is_never_copied_from_a_cached_block(tokens, num_copied):
    cache = make_cache()
    run_to_end(cache, 1, list(range(9)))
    match = found(cache, 2, tokens)
    assert (match.block_ids, match.num_copied_tokens) == ((), num_copied)


def test_the_block_with_the_longest_common_beginning_is_copied():
    cache = make_cache(num_blocks=16)
    for key, prompt in enumerate(([1, 2, 3, 9], [1, 2, 9, 9], [1, 9, 9, 9])):
        run_to_end(cache, key, [*prompt, 0])
    match = found(cache, 9, [1, 2, 3, 4, 5])
    assert (match.source, match.num_copied_tokens) == (0, 3)


def test_common_beginnings_include_extra_ids():
    cache = make_cache()
    run_to_end(cache, 1, list(range(5)))
    pictures = CacheRules(ROOT_SCOPE, (0, 0, 7, 7))
    assert cache.match_prefix(2, list(range(5)), pictures).num_copied_tokens == 2


def test_the_block_for_the_copy_may_be_the_source():
    """The only free block is the one to copy from: it keeps its content, and is no longer found by that
    content."""
    cache = make_cache(num_blocks=2)
    run_to_end(cache, 1, list(range(8)))
    tokens = [0, 1, 2, 3, 4, 5, 90]
    admit(cache, 2, 2, tokens)
    assert cache.block_copy(2) == (1, 1) and cache.block_table(2) == (0, 1)
    assert cache.pool.num_free == 0
    check_integrity(cache)


# ---------------------------------------------------------------------- promises


def test_blocks_that_a_sequence_is_computing_are_promised_until_published():
    cache, tokens = make_cache(num_blocks=16), list(range(13))
    assert not found(cache, 2, tokens).is_promised
    admit(cache, 1, 4, tokens)
    cache.extend(1, 13)
    assert found(cache, 2, tokens) == PrefixMatch((), 0, is_promised=True)
    cache.publish(1, tokens, 4)
    assert found(cache, 2, tokens) == PrefixMatch((0,), 1, is_promised=True)
    cache.publish(1, tokens, 12)
    assert found(cache, 2, tokens) == PrefixMatch((0, 1, 2), 3, is_promised=False)
    check_integrity(cache)


def test_only_the_first_missing_block_is_waited_for():
    cache = make_cache(num_blocks=16)
    admit(cache, 1, 4, list(range(9)))
    assert found(cache, 2, [*range(4), 50, 51, 52, 53, 54]).is_promised
    cache.extend(1, 9)
    cache.publish(1, list(range(9)), 4)
    assert not found(cache, 3, [*range(4), 50, 51, 52, 53, 54]).is_promised
    assert not found(cache, 4, [*range(8)]).is_promised  # all blocks that may be reused are found
    assert found(cache, 5, [*range(9)]).is_promised


def test_the_last_full_block_of_a_prompt_is_promised():
    cache = make_cache(num_blocks=16)
    admit(cache, 1, 2, list(range(8)))
    cache.extend(1, 8)
    cache.publish(1, list(range(8)), 4)
    assert found(cache, 2, list(range(9))).is_promised
    cache.publish(1, list(range(8)), 8)
    assert found(cache, 2, list(range(9))) == PrefixMatch((0, 1), 2)
    check_integrity(cache)


def test_a_promise_ends_with_its_sequence():
    cache = make_cache(num_blocks=16)
    admit(cache, 1, 3, list(range(9)))
    cache.release(1)
    assert not found(cache, 2, list(range(9))).is_promised
    check_integrity(cache)


def test_a_promise_by_two_sequences_lasts_until_both_have_ended():
    cache = make_cache(num_blocks=16)
    for key in (1, 2):
        admit(cache, key, 3, list(range(9)))
    cache.release(1)
    assert found(cache, 3, list(range(9))).is_promised
    check_integrity(cache)
    cache.release(2)
    assert not found(cache, 3, list(range(9))).is_promised


def test_blocks_that_are_shared_are_not_promised():
    cache = make_cache(num_blocks=4)
    run_to_end(cache, 1, list(range(8)))
    admit(cache, 2, 4, list(range(13)))
    cache.extend(2, 13)
    cache.publish(2, list(range(13)), 12)
    cache.release(2)
    assert len(found(cache, 3, list(range(13))).block_ids) == 3
    run_to_end(cache, 4, list(range(50, 66)))
    assert found(cache, 3, list(range(13))) == PrefixMatch()
    check_integrity(cache)


def test_generated_tokens_known_at_admission_are_promised_too():
    """A resumed sequence computes its generated tokens as context."""
    cache = make_cache(num_blocks=16)
    tokens = list(range(10))
    admit(cache, 1, 4, tokens[:6])
    assert not found(cache, 2, [*tokens[:4], 4, 5, 6, 7, 99]).block_ids
    cache.release(1)
    admit(cache, 1, 4, tokens)
    cache.extend(1, 10)
    cache.publish(1, tokens, 4)
    assert found(cache, 2, [*tokens[:8], 99]).is_promised
    check_integrity(cache)


def test_promises_of_other_scopes_do_not_count():
    cache = make_cache(num_blocks=16)
    admit(cache, 1, 3, list(range(9)), CacheRules(private_scope(1)))
    admit(cache, 2, 3, list(range(9)), UNSHARED)
    assert not found(cache, 3, list(range(9))).is_promised
    assert found(cache, 4, list(range(9)), CacheRules(private_scope(1))).is_promised


def test_blocks_of_a_prompt_that_was_not_matched_are_published():
    """All rows of the context are requested, so no block is reused.

    Its own blocks can be reused by others.
    """
    cache, tokens = make_cache(), list(range(9))
    cache.admit(1, PrefixMatch(), 3, SHARED, len(tokens))
    cache.extend(1, 9)
    cache.publish(1, tokens, 9)
    assert found(cache, 2, tokens).block_ids == (0, 1)
    assert cache.block_counts(1) == (3, 0, 0)
    check_integrity(cache)


# ---------------------------------------------------------------------- the integrity check


def _promise_nobody_made(cache: KvCacheManager) -> None:
    cache._promises[b"x"] = 1


def _promise_forgotten(cache: KvCacheManager) -> None:
    cache._promises.clear()


def _reservation_lost(cache: KvCacheManager) -> None:
    cache.num_reserved -= 1


def _block_held_by_nobody(cache: KvCacheManager) -> None:
    cache.pool.take(1)


def _table_of_anothers_block(cache: KvCacheManager) -> None:
    cache._tables[1].block_ids.append(7)


@pytest.mark.parametrize(
    "plant",
    [
        _promise_nobody_made,
        _promise_forgotten,
        _reservation_lost,
        _block_held_by_nobody,
        _table_of_anothers_block,
    ],
)
def test_check_integrity_detects_a_planted_fault(plant: Callable[[KvCacheManager], None]):
    cache = make_cache()
    admit(cache, 1, 4, list(range(9)))
    cache.extend(1, 5)
    cache.publish(1, list(range(9)), 4)
    check_integrity(cache)
    plant(cache)
    with pytest.raises(AssertionError):
        check_integrity(cache)


# ---------------------------------------------------------------------- beams


def make_beams(num_beams: int = 3, prompt: int = 6, num_blocks: int = 20) -> KvCacheManager:
    """Beams of sequence 1 whose prompt of `prompt` tokens is computed, blocks of 4, up to 14 tokens."""
    cache = make_cache(num_blocks)
    shared = prompt // 4
    admit(cache, 1, shared + num_beams * (4 - shared))
    cache.extend(1, prompt)
    cache.reorder_beams(1, [0] * num_beams)
    return cache


def test_beams_share_all_blocks_until_they_write():
    cache = make_beams()
    assert cache.pool.num_held == 2
    growth = cache.grow_beams(1, 7)
    assert growth.copies == [(1, 2), (1, 3)]
    assert growth.replaced == [(0, 1, 2), (1, 1, 3)]  # the last of them keeps the original
    assert growth.appended == []
    check_integrity(cache)
    assert cache.grow_beams(1, 8).copies == []


def test_at_a_block_boundary_every_beam_gets_a_block_and_nothing_is_copied():
    cache = make_beams(prompt=8)
    growth = cache.grow_beams(1, 9)
    assert growth.copies == growth.replaced == []
    assert [beam for beam, _ in growth.appended] == [0, 1, 2]


def test_a_dropped_beam_returns_its_block_to_the_reservation():
    cache = make_beams()
    free, reserved = cache.num_unreserved, cache.num_reserved
    cache.grow_beams(1, 7)
    assert (cache.num_unreserved, cache.num_reserved) == (free, reserved - 2)
    cache.reorder_beams(1, [1, 1, 1])
    assert (cache.num_unreserved, cache.num_reserved) == (free, reserved)
    check_integrity(cache)
    assert len(cache.grow_beams(1, 8).copies) == 2
    cache.release(1)
    assert (cache.pool.num_held, cache.num_reserved) == (0, 0)


def test_beams_that_continue_one_beam_share_its_blocks():
    cache = make_beams(prompt=8)
    assert cache.block_table(1) == (0,)  # the last block of a beam is always its own to write into
    cache.grow_beams(1, 9)
    cache.reorder_beams(1, [2, 2, 2])
    assert len(cache.block_table(1)) == 2 and cache.pool.num_held == 3
    check_integrity(cache)
    growth = cache.grow_beams(1, 10)
    assert [index for _, index, _ in growth.replaced] == [2, 2]
    check_integrity(cache)

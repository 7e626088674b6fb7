"""Block tables, reservations and prefix reuse, in exact block ids."""

from __future__ import annotations

from collections.abc import Sequence

from inflight.core.kv_cache_manager import (
    ROOT_SCOPE,
    KvCacheManager,
    PrefixMatch,
    block_digest,
    private_scope,
)


def make_cache(num_blocks: int = 8, tokens_per_block: int = 4) -> KvCacheManager:
    return KvCacheManager(num_blocks, tokens_per_block)


def admit(
    cache: KvCacheManager,
    key: int,
    num_blocks: int,
    tokens: Sequence[int] = (),
    scope: bytes | None = ROOT_SCOPE,
) -> None:
    cache.admit(key, cache.match_prefix(key, tokens, scope) if tokens else PrefixMatch(), num_blocks, scope)


def found(cache: KvCacheManager, key: int, tokens: Sequence[int], scope: bytes | None = ROOT_SCOPE):
    return cache.match_prefix(key, tokens, scope)


def run_to_end(
    cache: KvCacheManager, key: int, tokens: Sequence[int], scope: bytes | None = ROOT_SCOPE
) -> tuple[int, ...]:
    """Admit, compute and release a sequence; returns its blocks."""
    admit(cache, key, cache.blocks_for(len(tokens)), tokens, scope)
    cache.extend(key, len(tokens))
    cache.publish(key, tokens, len(tokens))
    table = cache.block_table(key)
    cache.release(key)
    return table


def test_a_reservation_is_spent_by_growth_and_given_back_by_release():
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
    assert cache.blocks_to_admit(match, 3) == 2


def test_blocks_freed_counts_only_what_nobody_else_holds():
    cache = make_cache()
    tokens = list(range(9))
    admit(cache, 1, 3, tokens)
    cache.extend(1, 9)
    cache.publish(1, tokens, 9)
    admit(cache, 2, 3, tokens)
    assert cache.blocks_freed_by(1) == 1
    assert cache.blocks_freed_by(2) == 1


def test_without_a_scope_nothing_matches_and_nothing_is_found():
    cache = make_cache()
    run_to_end(cache, 1, list(range(8)))
    assert found(cache, 2, list(range(9)), None) == PrefixMatch()
    run_to_end(cache, 3, list(range(20, 28)), None)
    assert found(cache, 4, list(range(20, 29))) == PrefixMatch()


def test_a_private_scope_is_shared_by_its_own_sequences_alone():
    cache = make_cache()
    run_to_end(cache, 1, list(range(8)), private_scope(1))
    assert len(found(cache, 2, list(range(9)), private_scope(1)).block_ids) == 2
    assert found(cache, 3, list(range(9)), private_scope(3)) == PrefixMatch()
    assert found(cache, 4, list(range(9))) == PrefixMatch()


def test_later_blocks_of_a_released_sequence_are_evicted_first():
    cache = make_cache(num_blocks=3)
    run_to_end(cache, 1, list(range(12)))
    admit(cache, 2, 1)
    cache.extend(2, 4)
    assert len(found(cache, 3, list(range(13))).block_ids) == 2


def test_digests_tell_minus_one_from_minus_two():
    assert hash(-1) == hash(-2)
    assert block_digest(ROOT_SCOPE, [-1]) != block_digest(ROOT_SCOPE, [-2])


def test_reused_and_missed_blocks_are_counted():
    cache = make_cache()
    run_to_end(cache, 1, list(range(9)))
    run_to_end(cache, 2, list(range(9)))
    assert (cache.num_reused_blocks, cache.num_missed_blocks) == (2, 2)


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
    cache.check_integrity()
    assert cache.grow_beams(1, 8).copies == []


def test_at_a_block_boundary_every_beam_gets_a_block_and_nothing_is_copied():
    cache = make_beams(prompt=8)
    growth = cache.grow_beams(1, 9)
    assert growth.copies == growth.replaced == []
    assert [beam for beam, _ in growth.appended] == [0, 1, 2]


def test_a_beam_that_nobody_goes_on_from_gives_its_block_back_to_the_reservation():
    cache = make_beams()
    free, reserved = cache.num_unreserved, cache.num_reserved
    cache.grow_beams(1, 7)
    assert (cache.num_unreserved, cache.num_reserved) == (free, reserved - 2)
    cache.reorder_beams(1, [1, 1, 1])
    assert (cache.num_unreserved, cache.num_reserved) == (free, reserved)
    cache.check_integrity()
    assert len(cache.grow_beams(1, 8).copies) == 2
    cache.release(1)
    assert (cache.pool.num_held, cache.num_reserved) == (0, 0)


def test_what_beams_have_in_common_is_held_once_when_they_go_on_from_one_of_them():
    cache = make_beams(prompt=8)
    assert cache.block_table(1) == (0,)  # the last block of a beam is always its own to write into
    cache.grow_beams(1, 9)
    cache.reorder_beams(1, [2, 2, 2])
    assert len(cache.block_table(1)) == 2 and cache.pool.num_held == 3
    cache.check_integrity()
    growth = cache.grow_beams(1, 10)
    assert [index for _, index, _ in growth.replaced] == [2, 2]
    cache.check_integrity()

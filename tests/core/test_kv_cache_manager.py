"""Block tables, reservations and prefix reuse, in exact block ids."""

from __future__ import annotations

from inflight.core.kv_cache_manager import ROOT_DIGEST, KvCacheManager, PrefixMatch, block_digest


def make_cache(num_blocks: int = 8, tokens_per_block: int = 4, reuse: bool = True) -> KvCacheManager:
    return KvCacheManager(num_blocks, tokens_per_block, reuse)


def run_to_end(cache: KvCacheManager, request_id: int, tokens: list[int]) -> tuple[int, ...]:
    """Admit, compute and release a sequence; returns its blocks."""
    match = cache.match_prefix(request_id, tokens)
    cache.admit(request_id, match, len(tokens))
    cache.extend(request_id, len(tokens))
    cache.publish(request_id, tokens, len(tokens))
    table = cache.block_table(request_id)
    cache.release(request_id)
    return table


def test_a_reservation_is_spent_by_growth_and_given_back_by_release():
    cache = make_cache()
    cache.admit(1, PrefixMatch(), 10)
    assert (cache.num_reserved, cache.num_unreserved) == (3, 5)
    assert cache.extend(1, 5) == (0, 1)
    assert (cache.num_reserved, cache.num_unreserved) == (1, 5)
    assert cache.extend(1, 8) == ()
    cache.release(1)
    assert (cache.num_reserved, cache.num_unreserved) == (0, 8)


def test_growth_beyond_the_reservation_counts_as_missing():
    cache = make_cache()
    cache.admit(1, PrefixMatch(), 4)
    assert cache.missing_blocks(1, 4) == 0
    assert cache.missing_blocks(1, 9) == 2


def test_a_second_prompt_shares_the_full_blocks_of_the_first():
    cache = make_cache()
    first = run_to_end(cache, 1, list(range(10)))
    match = cache.match_prefix(2, [*range(8), 99, 98])
    assert match == PrefixMatch(first[:2], num_held=0)


def test_the_last_token_is_always_left_to_compute():
    cache = make_cache()
    run_to_end(cache, 1, list(range(8)))
    assert len(cache.match_prefix(2, list(range(8))).block_ids) == 1
    assert len(cache.match_prefix(3, list(range(9))).block_ids) == 2


def test_equal_blocks_behind_different_parents_are_not_shared():
    cache = make_cache()
    run_to_end(cache, 1, [1, 1, 1, 1, 5, 6, 7, 8])
    assert cache.match_prefix(2, [2, 2, 2, 2, 5, 6, 7, 8, 9]).block_ids == ()


def test_a_block_is_shared_while_its_producer_runs():
    cache = make_cache()
    tokens = list(range(9))
    cache.admit(1, cache.match_prefix(1, tokens), 12)
    cache.extend(1, 9)
    cache.publish(1, tokens, 4)
    match = cache.match_prefix(2, tokens)
    assert match.num_held == len(match.block_ids) == 1
    assert cache.blocks_to_admit(match, 12) == 2


def test_blocks_freed_counts_only_what_nobody_else_holds():
    cache = make_cache()
    tokens = list(range(9))
    cache.admit(1, cache.match_prefix(1, tokens), 12)
    cache.extend(1, 9)
    cache.publish(1, tokens, 9)
    cache.admit(2, cache.match_prefix(2, tokens), 12)
    assert cache.blocks_freed_by(1) == 1
    assert cache.blocks_freed_by(2) == 1


def test_without_reuse_nothing_matches():
    cache = make_cache(reuse=False)
    run_to_end(cache, 1, list(range(8)))
    assert cache.match_prefix(2, list(range(9))) == PrefixMatch()


def test_later_blocks_of_a_released_sequence_are_evicted_first():
    cache = make_cache(num_blocks=3)
    run_to_end(cache, 1, list(range(12)))
    cache.admit(2, PrefixMatch(), 4)
    cache.extend(2, 4)
    assert len(cache.match_prefix(3, list(range(13))).block_ids) == 2


def test_digests_tell_minus_one_from_minus_two():
    assert hash(-1) == hash(-2)
    assert block_digest(ROOT_DIGEST, [-1]) != block_digest(ROOT_DIGEST, [-2])


def test_reused_and_missed_blocks_are_counted():
    cache = make_cache()
    run_to_end(cache, 1, list(range(9)))
    run_to_end(cache, 2, list(range(9)))
    assert (cache.num_reused_blocks, cache.num_missed_blocks) == (2, 2)

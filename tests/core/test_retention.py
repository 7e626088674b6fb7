"""Retention settings of requests: the blocks they apply to, their validation, and the blocks kept by them."""

from __future__ import annotations

import pytest

from inflight.core.kv.block_keys import ROOT_SCOPE, CacheRules
from inflight.core.kv.kv_cache_manager import KvCacheManager
from inflight.core.kv.retention import Retention, RetentionConfig, TokenRangeRetention
from inflight.errors import InvalidArgument
from inflight.testing.simulation.integrity import check_integrity

MS = 1_000_000
SIZE = 4
PLAIN = CacheRules(ROOT_SCOPE)


def ranges(*parts: tuple[int, int | None, int, int | None]) -> RetentionConfig:
    """A RetentionConfig of ranges (start, end, priority, duration in milliseconds)."""
    return RetentionConfig(tuple(TokenRangeRetention(s, e, Retention(p, d)) for s, e, p, d in parts))


def rules(config: RetentionConfig, prompt_length: int = 8) -> CacheRules:
    return CacheRules(ROOT_SCOPE, retention=config, prompt_length=prompt_length)


def prompt(first: int, count: int = 8) -> list[int]:
    """A prompt that no other prompt of this test begins with."""
    return list(range(first * 100, first * 100 + count))


def run_to_end(cache: KvCacheManager, key: int, tokens: list[int], say: CacheRules = PLAIN) -> None:
    match = cache.match_prefix(key, tokens, say)
    cache.admit(key, match, cache.blocks_for(len(tokens)), say)
    cache.extend(key, len(tokens))
    cache.publish(key, tokens, len(tokens))
    cache.release(key)
    check_integrity(cache)


def num_kept(cache: KvCacheManager, tokens: list[int]) -> int:
    """Number of blocks of these tokens that are still found."""
    match = cache.match_prefix(999, [*tokens, 1], PLAIN)
    cache.release(999)
    return len(match.block_ids)


# ---------------------------------------------------------------------- which block


def test_a_block_belongs_to_the_range_that_its_first_token_is_in():
    config = ranges((4, 8, 50, None), (8, None, 70, 20))
    said = [config.of_block(first, prompt_length=14) for first in (0, 4, 7, 8, 12)]
    assert said == [None, Retention(50), Retention(50), Retention(70, 20), Retention(70, 20)]


def test_retention_ranges_end_with_the_prompt():
    config = RetentionConfig(
        (TokenRangeRetention(0, 1000, Retention(80)),), decode=Retention(10, duration_ms=5)
    )
    assert config.of_block(12, prompt_length=14) == Retention(
        80
    )  # it has generated tokens, but begins before
    assert config.of_block(16, prompt_length=14) == Retention(10, 5)
    assert ranges((0, None, 80, None)).of_block(16, prompt_length=14) is None


def test_ranges_may_come_in_any_order():
    config = ranges((8, None, 70, 20), (2, 4, 10, None), (4, 7, 50, None))
    assert config == ranges((2, 4, 10, None), (4, 7, 50, None), (8, None, 70, 20))
    said = [config.of_block(first, prompt_length=14) for first in (0, 2, 5, 7, 8, 13)]
    assert said == [None, Retention(10), Retention(50), None, Retention(70, 20), Retention(70, 20)]


def test_the_cost_of_a_block_does_not_grow_with_the_number_of_ranges():
    """A prompt may have a range for every token; a block compares only a few of them."""

    class Counted(int):
        compared = 0

        def __lt__(self, other):
            Counted.compared += 1
            return int.__lt__(self, other)

        def __gt__(self, other):
            Counted.compared += 1
            return int.__gt__(self, other)

    config = RetentionConfig(
        tuple(TokenRangeRetention(Counted(start), start + 1, Retention(50)) for start in range(4096))
    )
    Counted.compared = 0
    assert config.of_block(4095, prompt_length=5000) == Retention(50)
    assert Counted.compared <= 13


def test_an_empty_retention_config_applies_to_no_block():
    assert RetentionConfig().of_block(0, prompt_length=4) is None
    assert RetentionConfig().of_block(8, prompt_length=4) is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ranges((0, 4, 101, None)), r"retention_token_range_priorities must be in \[0, 100\], got 101"),
        (ranges((0, 4, -1, None)), r"retention_token_range_priorities must be in \[0, 100\], got -1"),
        (ranges((0, 4, 5, 0)), r"retention_token_range_durations_ms must be >= 1 \(-1: for ever\), got 0"),
        (ranges((-1, 4, 5, None)), "retention_token_range_starts must be >= 0, got -1"),
        (ranges((4, 4, 5, None)), r"retention_token_range_ends must be greater.*got \[4, 4\)"),
        (
            ranges((4, 8, 5, None), (0, 5, 5, None)),
            r"must not overlap, got \[0, 5\) and one that starts at 4",
        ),
        (ranges((9, 12, 5, None), (4, None, 5, None)), r"overlap, got \[4, -1\) and one that starts at 9"),
        (RetentionConfig(decode=Retention(101)), r"retention_decode_priority must be in \[0, 100\], got 101"),
        (RetentionConfig(decode=Retention(1, -5)), "retention_decode_duration_ms must be >= 1.*got -5"),
    ],
)
def test_an_invalid_retention_is_refused_with_its_field(config: RetentionConfig, message: str):
    with pytest.raises(InvalidArgument, match=message):
        config.validate()


def test_adjacent_ranges_and_extreme_priorities_are_accepted():
    RetentionConfig(
        ranges((4, 8, 0, 1), (0, 4, 100, None), (8, None, 35, None)).ranges, Retention(100, 1)
    ).validate()


# ---------------------------------------------------------------------- what is kept


def test_blocks_are_evicted_by_their_producers_retention():
    cache = KvCacheManager(6, SIZE)
    run_to_end(cache, 1, prompt(1), rules(ranges((0, None, 80, None))))
    run_to_end(cache, 2, prompt(2))
    run_to_end(cache, 3, prompt(3), rules(ranges((0, None, 10, None))))
    kept = []
    for key in (4, 5, 6):
        cache.admit(key, cache.match_prefix(key, prompt(key), PLAIN), 2, PLAIN)
        cache.extend(key, 8)
        kept.append([num_kept(cache, prompt(first)) for first in (1, 2, 3)])
        check_integrity(cache)
    assert kept == [[2, 2, 0], [2, 0, 0], [0, 0, 0]]


def test_a_system_prompt_outlives_the_prompts_after_it():
    """The common beginning has a range of its own."""
    cache = KvCacheManager(8, SIZE)
    system = prompt(1)
    say = rules(ranges((0, 8, 90, None)), prompt_length=16)
    run_to_end(cache, 1, system + prompt(2), say)
    for key in range(3, 9):
        run_to_end(cache, key, prompt(key, 16))
        assert num_kept(cache, system) == 2, f"after prompt {key}"
    assert num_kept(cache, system + prompt(2)) == 2


def test_generated_blocks_may_have_a_lower_priority():
    cache = KvCacheManager(6, SIZE)
    config = RetentionConfig(decode=Retention(0))
    run_to_end(cache, 1, prompt(1, 16), rules(config, prompt_length=8))
    run_to_end(cache, 2, prompt(2))
    cache.admit(3, cache.match_prefix(3, prompt(3), PLAIN), 2, PLAIN)
    cache.extend(3, 8)
    assert (num_kept(cache, prompt(1, 16)), num_kept(cache, prompt(2))) == (2, 2)


def test_a_block_in_which_a_range_begins_is_not_in_it():
    cache = KvCacheManager(4, SIZE)
    run_to_end(cache, 1, prompt(1, 4), rules(ranges((1, None, 0, None))))
    run_to_end(cache, 2, prompt(2, 4), rules(ranges((0, 1, 0, None))))
    cache.admit(3, cache.match_prefix(3, prompt(3, 12), PLAIN), 3, PLAIN)
    cache.extend(3, 12)
    assert (num_kept(cache, prompt(1, 4)), num_kept(cache, prompt(2, 4))) == (1, 0)


def test_retention_after_a_pause_distinguishes_prompt_and_generated_tokens():
    """A resumed sequence computes generated tokens as context, but they do not belong to the prompt."""
    cache = KvCacheManager(4, SIZE)
    config = RetentionConfig((TokenRangeRetention(0, None, Retention(90)),), decode=Retention(0))
    say = rules(config, prompt_length=4)
    run_to_end(cache, 1, prompt(1, 4), say)
    run_to_end(cache, 1, prompt(1, 12), say)
    run_to_end(cache, 2, prompt(2, 4))
    cache.admit(3, cache.match_prefix(3, prompt(3), PLAIN), 2, PLAIN)
    cache.extend(3, 8)
    assert (num_kept(cache, prompt(1, 12)), num_kept(cache, prompt(2, 4))) == (1, 1)


def test_reuse_changes_the_retention_of_blocks_only_with_a_range():
    cache = KvCacheManager(6, SIZE)
    run_to_end(cache, 1, prompt(1, 9))
    run_to_end(cache, 2, prompt(2, 9), rules(ranges((0, None, 80, None)), prompt_length=9))
    run_to_end(cache, 2, prompt(2, 9))  # no retention: it keeps 80
    run_to_end(cache, 1, prompt(1, 9), rules(ranges((0, 4, 90, None)), prompt_length=9))  # the first of two
    cache.admit(3, cache.match_prefix(3, prompt(3, 20), PLAIN), 5, PLAIN)
    cache.extend(3, 12)
    assert (num_kept(cache, prompt(1)), num_kept(cache, prompt(2))) == (1, 2)
    cache.extend(3, 20)
    assert (num_kept(cache, prompt(1)), num_kept(cache, prompt(2))) == (1, 0)


def test_reuse_may_lower_a_priority():
    cache = KvCacheManager(5, SIZE)
    run_to_end(cache, 1, prompt(1), rules(ranges((0, None, 80, None))))
    run_to_end(cache, 2, prompt(2))
    run_to_end(cache, 1, [*prompt(1), 5], rules(ranges((0, None, 1, None)), prompt_length=9))
    cache.admit(3, cache.match_prefix(3, prompt(3), PLAIN), 2, PLAIN)
    cache.extend(3, 8)
    assert (num_kept(cache, prompt(1)), num_kept(cache, prompt(2))) == (1, 2)


# ---------------------------------------------------------------------- for how long


def test_a_duration_begins_when_no_sequence_holds_the_block():
    cache = KvCacheManager(4, SIZE)
    say = rules(ranges((0, None, 80, 10)))
    cache.pool.expire(100 * MS)
    cache.admit(1, cache.match_prefix(1, prompt(1), say), 2, say)
    cache.extend(1, 8)
    cache.publish(1, prompt(1), 8)
    cache.pool.expire(500 * MS)
    cache.release(1)
    run_to_end(cache, 2, prompt(2))
    cache.pool.expire(510 * MS - 1)
    cache.admit(3, cache.match_prefix(3, prompt(3), PLAIN), 1, PLAIN)
    cache.extend(3, 4)
    assert (num_kept(cache, prompt(1)), num_kept(cache, prompt(2))) == (2, 1)
    cache.pool.expire(510 * MS)
    cache.admit(4, cache.match_prefix(4, prompt(4), PLAIN), 1, PLAIN)
    cache.extend(4, 4)
    assert (num_kept(cache, prompt(1)), num_kept(cache, prompt(2))) == (1, 1)
    check_integrity(cache)


def test_a_shared_block_expires_after_its_last_release():
    cache = KvCacheManager(4, SIZE)
    say = rules(ranges((0, None, 80, 10)), prompt_length=4)
    cache.admit(1, cache.match_prefix(1, prompt(1, 4), say), 1, say)
    cache.extend(1, 4)
    cache.publish(1, prompt(1, 4), 4)
    cache.admit(2, cache.match_prefix(2, prompt(1, 5), PLAIN), 2, PLAIN)
    cache.release(1)
    cache.pool.expire(50 * MS)
    cache.release(2)
    run_to_end(cache, 3, prompt(3, 4))
    cache.pool.expire(59 * MS)
    cache.admit(4, cache.match_prefix(4, prompt(4, 12), PLAIN), 3, PLAIN)
    cache.extend(4, 12)  # two blocks without content, and then the one of default priority
    assert (num_kept(cache, prompt(1, 4)), num_kept(cache, prompt(3, 4))) == (1, 0)
    check_integrity(cache)

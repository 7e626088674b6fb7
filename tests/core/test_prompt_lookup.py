"""Draft tokens guessed from a sequence's own tokens."""

from __future__ import annotations

import random

from inflight.core.request.prompt_lookup import NGRAM_SIZES, PromptLookup


def search(tokens: list[int], max_tokens: int) -> tuple[int, ...]:
    """The definition of prompt lookup, by a search of every position."""
    for size in NGRAM_SIZES:
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == tokens[-size:]:
                return tuple(tokens[start + size : start + size + max_tokens])
    return ()


def test_tokens_that_followed_an_earlier_occurrence_are_proposed():
    lookup = PromptLookup([1, 2, 3, 4, 5, 6, 1, 2, 3])
    assert lookup.propose(2) == (4, 5)
    assert lookup.propose(100) == (4, 5, 6, 1, 2, 3)


def test_the_most_recent_occurrence_is_used():
    assert PromptLookup([1, 2, 7, 1, 2, 8, 1, 2]).propose(1) == (8,)


def test_a_longer_ngram_is_preferred_to_a_recent_one():
    assert PromptLookup([9, 1, 2, 7, 5, 1, 2, 8, 9, 1, 2]).propose(1) == (7,)


def test_no_draft_is_made_from_one_token_or_none():
    assert PromptLookup().propose(4) == ()
    assert PromptLookup([1]).propose(4) == ()
    assert PromptLookup([1, 5, 1]).propose(4) == ()
    assert PromptLookup([1, 2]).propose(4) == ()


def test_a_repeated_token_is_proposed_once():
    assert PromptLookup([4, 4, 4]).propose(8) == (4,)
    assert PromptLookup([4] * 10).propose(8) == (4,)


def test_tokens_can_come_one_by_one_or_together():
    rng = random.Random(1)
    found = 0
    for _ in range(100):
        tokens = rng.choices(range(4), k=rng.randint(0, 12))
        lookup = PromptLookup(tokens)
        for _ in range(20):
            more = rng.choices(range(4), k=rng.randint(1, 3))
            tokens += more
            lookup.append(more)
            guess = lookup.propose(3)
            assert guess == search(tokens, 3)
            found += bool(guess)
    assert found > 1000

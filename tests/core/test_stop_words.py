"""Stop words: detection of the token that completes a word."""

from __future__ import annotations

import random

import pytest

from inflight.core.request.stop import StopWords

WORDS = StopWords([(5, 6, 7), (7,), (9, 0), (0, 0)])


@pytest.mark.parametrize(
    ("tokens", "num_generated", "matches"),
    [
        ((7,), 1, True),
        ((1, 5, 6, 7), 3, True),
        ((9, 0), 2, True),
        ((0, 0), 2, True),
        ((0,), 1, False),
        ((9, 0, 1), 3, False),
        ((6, 9), 2, False),
    ],
)
def test_a_word_at_the_end_matches(tokens, num_generated, matches):
    assert WORDS.matches(tokens, num_generated) is matches
    assert WORDS.matches(list(tokens), num_generated) is matches


def test_a_prompts_tokens_are_no_part_of_a_word():
    words = StopWords([(1, 2, 3)])
    assert not words.matches([1, 2, 3], 2)
    assert words.matches([1, 2, 3], 3)
    assert not StopWords([(1,)]).matches([1], 0)


def test_a_word_longer_than_the_text_does_not_match():
    assert not StopWords([(3, 1, 2)]).matches([1, 2], 2)


def test_the_last_tokens_and_the_greatest_length_of_words_are_known():
    assert WORDS.may_end_with(0, 1) and WORDS.may_end_with(7, 1) and not WORDS.may_end_with(5, 1)
    assert WORDS.longest == 3 and WORDS
    assert StopWords(()).longest == 0 and not StopWords(())


def test_a_word_completed_before_min_length_does_not_end_the_sequence():
    words = StopWords([(1, 2), (2,)], after=3)
    assert not words.matches([7, 1, 2], 3) and not words.may_end_with(2, 3)
    assert words.matches([7, 7, 1, 2], 4) and words.may_end_with(2, 4)
    assert words.matches([1, 2], 4), "only the last tokens are read"


def test_matches_equal_a_comparison_with_every_word():
    rng = random.Random(0)
    seen = set()
    for _ in range(2000):
        words = [tuple(rng.choices(range(3), k=rng.randint(1, 4))) for _ in range(rng.randint(1, 3))]
        tokens = rng.choices(range(3), k=rng.randint(1, 6))
        num_generated = rng.randint(1, len(tokens))
        generated = tuple(tokens[len(tokens) - num_generated :])
        expected = any(generated[-len(word) :] == word for word in words)
        assert StopWords(words).matches(tokens, num_generated) is expected
        seen.add(expected)
    assert seen == {True, False}


def test_the_cost_depends_on_the_longest_word_only():
    """A new token is compared with at most as many tokens as the longest word has, even if many words end
    alike."""

    class Counted(list):
        reads = 0

        def __getitem__(self, place):
            Counted.reads += 1
            return super().__getitem__(place)

    words = StopWords([(number // 100, number % 100, 7) for number in range(5000)])
    assert not words.matches(Counted([99, 5, 7]), 3) and words.matches(Counted([49, 99, 7]), 3)
    assert Counted.reads <= 6

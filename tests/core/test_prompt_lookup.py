"""Draft tokens guessed from a sequence's own tokens."""

from __future__ import annotations

import random

import pytest

from inflight.core.request.draft_length import DraftLength
from inflight.core.request.prompt_lookup import NGRAM_SIZES, PromptLookup
from inflight.core.request.request import IterationInput
from inflight.core.schedule.batch import ModelOutput
from tests.core.factories import make_request, make_scheduler


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


def test_a_draft_gets_shorter_when_it_is_rejected_and_longer_when_it_is_accepted():
    length = DraftLength(8)
    found = [length.tokens]
    for _ in range(3):
        length.verified(length.tokens, length.tokens)
        found.append(length.tokens)
    assert found == [2, 4, 8, 8]
    for _ in range(3):
        length.verified(length.tokens, 0)
        found.append(length.tokens)
    assert found[4:] == [4, 2, 1]
    for _ in range(3):
        length.verified(length.tokens, length.tokens)
    assert length.tokens == 8
    length.verified(8, 3)
    assert length.tokens == 4
    length.verified(2, 2)  # the sequence had no more tokens to propose
    assert length.tokens == 4


def test_useless_drafts_are_made_less_and_less_often():
    length = DraftLength(4)
    num_drafts = 0
    for _ in range(1000):
        if length.tokens:
            num_drafts += length.tokens
            length.verified(length.tokens, 0)
        length.advance(1)
    assert num_drafts == 2 + 1 + 3 + (1000 - 2 - 8 - 16 - 32) // 64


def test_drafts_are_made_only_if_a_large_enough_share_of_earlier_ones_was_accepted():
    length = DraftLength(8)
    assert length.tokens_if(1.0) == 2
    length.verified(2, 1)
    assert (length.tokens_if(0.8), length.tokens_if(0.9)) == (2, 0)
    length.verified(8, 2)  # earlier drafts do not count any more
    assert (length.tokens_if(0.25), length.tokens_if(0.26)) == (3, 0)
    length.advance(63)
    assert length.tokens_if(0.9) == 0
    length.advance(1)
    assert length.tokens_if(0.9) == 3  # it tries again
    length.verified(3, 3)
    assert length.tokens_if(0.5) == 6


def test_an_accepted_token_ends_the_longer_pauses():
    length = DraftLength(1)
    for pause in (8, 16, 32, 64, 64):
        length.verified(1, 0)
        assert length.tokens == 0
        length.advance(pause - 1)
        assert length.tokens == 0
        length.advance(1)
        assert length.tokens == 1
    length.verified(1, 1)
    length.verified(1, 0)
    length.advance(8)
    assert length.tokens == 1


def test_drafts_are_over_once_they_have_cost_the_time_of_a_few_tokens_more_than_they_saved():
    length = DraftLength(4)
    length.spend(2.0)
    assert not length.is_over
    length.verified(2, 1)
    length.spend(1.25)
    assert not length.is_over
    length.spend(0.25)
    assert length.is_over


def test_nothing_is_drafted_where_even_accepted_tokens_save_no_time():
    length = DraftLength(4)
    assert length.tokens_if(1.01) == 0
    length.advance(200)
    assert length.tokens_if(1.01) == 0
    assert length.tokens_if(0.99) == 2


def drafted(num_sequences: int, num_iterations: int, break_even_rows: int = 256) -> int:
    """Number of tokens that are drafted for sequences whose drafts are always rejected."""
    prompt = (1, 2, 3, 4, 5, 6, 1, 2)
    requests = [
        make_request(each, prompt, new=60, prompt_lookup_num_tokens=4) for each in range(num_sequences)
    ]
    scheduler = make_scheduler(
        num_blocks=400,
        max_num_sequences=num_sequences,
        max_num_tokens=256,
        break_even_rows=break_even_rows,
    )
    scheduler.accept(IterationInput(0, 0, tuple(requests)))
    count = 0
    for iteration in range(num_iterations):
        batch = scheduler.schedule()
        assert batch is not None
        count += sum(chunk.num_draft_tokens for chunk in batch.context)
        tokens = [(2 if iteration % 2 else 1,) for _ in batch.sampled_slots()]  # each pair occurred before
        scheduler.update(batch, ModelOutput(batch.iteration, tokens))
    return count


def test_drafts_get_shorter_only_where_they_take_time_from_other_sequences():
    assert drafted(4, 40) / 4 > 4 * 15
    assert drafted(5, 40) / 5 < 20


@pytest.mark.parametrize("num_sequences", [1, 4])
def test_useless_drafts_of_few_sequences_get_shorter_once_they_have_taken_the_time_of_a_few_tokens(
    num_sequences: int,
) -> None:
    """A CPU's time is equal for 16 rows and for reading the weights."""
    rows = drafted(num_sequences, 50, break_even_rows=16) / num_sequences
    assert 2.5 < rows * num_sequences / (num_sequences + 16) < 4

"""Draft tokens guessed from a sequence's own tokens and from recent answers of others."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from inflight.config import SchedulingConfig, Speculation
from inflight.core.kv.block_keys import PrefixIdentity
from inflight.core.request.drafters import Drafters
from inflight.core.request.prompt_lookup import PromptLookup
from inflight.core.request.request import ExternalDraft, IterationInput, OutputOptions, Request
from inflight.core.request.sampling_config import SamplingConfig
from inflight.core.request.suffix_decoding import MAX_MATCH, MAX_PLACES, PairPlaces, Place, SuffixDecoding
from inflight.core.schedule.batch import ModelOutput
from inflight.core.scheduler import Scheduler
from tests.core.factories import make_limits, make_request

SUFFIX = Speculation(Speculation.SUFFIX, 4)


def search(tokens: list[int], max_tokens: int, answers: list[Place]) -> tuple[int, ...]:
    """The definition of suffix decoding, by a search of every position. `answers`: oldest first."""
    own = [(tokens, position) for position in range(2, len(tokens))]
    places: list[Place] = []
    for known in (own, answers):
        following = [(text, at) for text, at in reversed(known) if text[at - 2 : at] == tokens[-2:]]
        places += following[:MAX_PLACES]
    lengths = [common_suffix(text[:position], tokens) for text, position in places]
    rests = [
        text[position : position + max_tokens]
        for (text, position), length in zip(places, lengths, strict=True)
        if length == max(lengths)
    ]
    draft: list[int] = []
    while rests := [rest for rest in rests if rest[: len(draft)] == draft and len(rest) > len(draft)]:
        draft.append(Counter(rest[len(draft)] for rest in rests).most_common(1)[0][0])
    return tuple(draft)


def common_suffix(one: list[int], other: list[int]) -> int:
    """The number of equal tokens at the ends of two texts, MAX_MATCH at most."""
    for length in range(min(len(one), len(other), MAX_MATCH)):
        if one[-1 - length] != other[-1 - length]:
            return length
    return min(len(one), len(other), MAX_MATCH)


def propose(tokens: list[int], max_tokens: int = 4) -> tuple[int, ...]:
    return SuffixDecoding(tokens, max_tokens).propose(max_tokens)


def test_what_followed_the_longest_occurrence_is_proposed() -> None:
    assert propose([1, 2, 3, 4, 5, 6, 2, 3, 7, 7, 1, 2, 3], 2) == (4, 5)
    assert propose([1, 2, 3, 4, 5, 1, 2, 3], 100) == (4, 5, 1, 2, 3)


def test_the_most_frequent_of_equally_long_occurrences_wins_and_then_the_latest() -> None:
    assert propose([0, 1, 2, 7, 4, 1, 2, 8, 5, 1, 2, 7, 6, 1, 2], 2) == (7, 6)
    assert propose([0, 1, 2, 7, 3, 1, 2, 8, 3, 5, 1, 2], 1) == (8,)


def test_nothing_is_proposed_without_an_earlier_occurrence() -> None:
    for tokens in ([], [1], [1, 2], [1, 5, 1], [1, 2, 3, 4]):
        assert propose(list(tokens)) == ()


def test_answers_of_others_are_found_and_the_sequences_own_tokens_come_first() -> None:
    answers = PairPlaces()
    SuffixDecoding(first := [9], 4, answers).append((1, 2, 3, 4, 5))
    assert SuffixDecoding([7, 1, 2], 4, answers).propose(2) == (3, 4)
    assert SuffixDecoding([7, 1, 2, 6, 7, 1, 2], 4, answers).propose(2) == (6, 7)  # the longer one
    assert SuffixDecoding([1, 2, 6, 1, 2], 4, answers).propose(1) == (6,)  # as long and as frequent
    assert first == [9]


@pytest.mark.parametrize("capacity", [1, 7, 1000])
def test_drafts_are_those_of_a_slow_search(capacity: int) -> None:
    rng, found = random.Random(capacity), 0
    answers, log = PairPlaces(capacity), list[Place]()
    for _ in range(15):
        texts = [rng.choices(range(3), k=rng.randint(0, 8)) for _ in range(3)]
        drafters = [SuffixDecoding(tokens, 6, answers) for tokens in texts]
        outputs: list[list[int]] = [[], [], []]
        for _ in range(40):
            which, more = rng.randrange(3), rng.choices(range(3), (6, 3, 1), k=rng.randint(1, 3))
            texts[which] += more
            drafters[which].append(more)
            for token_id in more:
                outputs[which].append(token_id)
                if len(outputs[which]) > 2:
                    log.append((outputs[which], len(outputs[which]) - 1))
            del log[:-capacity]
            which = rng.randrange(3)
            others = [place for place in log if place[0] is not outputs[which]]
            # Own places count among the latest ones that are looked at, but are not used twice.
            latest = [place for place in log if place[0][place[1] - 2 : place[1]] == texts[which][-2:]]
            looked_at = latest[-MAX_PLACES:]
            guess = drafters[which].propose(5)
            assert guess == search(
                texts[which], 5, [place for place in others if any(place is each for each in looked_at)]
            )
            found += bool(guess)
    assert found > 300
    assert len(answers) == min(capacity, len(answers))


def test_the_oldest_places_are_forgotten() -> None:
    places, text = PairPlaces(3), [1, 2, 3, 1, 2, 4, 5, 6]
    for position in range(2, len(text)):
        places.add(text, position)
    assert len(places) == 3
    assert places.find([1, 2]) == [(text, 5)]
    assert places.find([2, 3]) == []
    assert places.find([4, 5]) == [(text, 7)]


# ---------------------------------------------------------------------- requests


def drafter_of(request: Request, drafters: Drafters) -> object:
    request = drafters.with_default(request)
    return drafters.make(request, list(request.input_token_ids))


def test_the_server_drafts_for_requests_that_do_not_say_how() -> None:
    drafters = Drafters(SUFFIX)
    assert drafters.with_default(make_request()).prompt_lookup_num_tokens == 4
    asking = make_request(prompt_lookup_num_tokens=2)
    assert drafters.with_default(asking) is asking
    assert isinstance(drafter_of(asking, drafters), SuffixDecoding)
    for kept in (
        make_request(sampling=SamplingConfig(beam_width=2)),
        make_request(draft=ExternalDraft((1,))),
        make_request(output=OutputOptions(return_generation_logits=True)),
    ):
        assert drafters.with_default(kept) is kept
        assert drafter_of(kept, drafters) is None


def test_without_a_method_only_requests_that_ask_draft_and_by_prompt_lookup() -> None:
    drafters = Drafters(None)
    assert drafter_of(make_request(), drafters) is None
    assert isinstance(drafter_of(make_request(prompt_lookup_num_tokens=2), drafters), PromptLookup)
    by_default = Drafters(Speculation(Speculation.PROMPT_LOOKUP, 3))
    assert isinstance(drafter_of(make_request(), by_default), PromptLookup)


ANSWER = (50, 51, 52, 53, 54, 55, 56, 57)


def accepted(scheduler: Scheduler, request: Request) -> tuple[int, int]:
    """Answer a request with ANSWER; return the number of its iterations and of its draft tokens."""
    scheduler.accept(IterationInput(0, 0, (request,)))
    given = num_iterations = num_drafts = 0
    while (batch := scheduler.schedule()) is not None:
        num_iterations += 1
        tokens: list[int] = [ANSWER[given]]
        for chunk in batch.context:
            num_drafts += chunk.num_draft_tokens
            for guess in chunk.token_ids[len(chunk.token_ids) - chunk.num_draft_tokens :]:
                if guess != tokens[-1]:
                    break
                tokens.append(ANSWER[given + len(tokens)])
        given += len(tokens)
        scheduler.update(batch, ModelOutput(batch.iteration, [tuple(tokens)]))
    return num_iterations, num_drafts


@pytest.mark.parametrize(
    ("first_salt", "second_salt", "shares"), [(0, 0, True), (0, 5, False), (5, 0, False), (5, 5, False)]
)
def test_an_answer_that_another_request_got_is_drafted_unless_one_of_them_has_a_salt(
    first_salt: int, second_salt: int, shares: bool
) -> None:
    scheduler = Scheduler(SchedulingConfig(speculative_decoding_mode=SUFFIX), make_limits(num_blocks=64))
    first = make_request(1, new=8, identity=PrefixIdentity(first_salt))
    second = replace(first, request_id=2, identity=PrefixIdentity(second_salt))
    assert accepted(scheduler, first) == (8, 0)
    # The prompt, one token, four drafts after the first two tokens, and the last token.
    assert accepted(scheduler, second) == ((4, 4) if shares else (8, 0))

"""Draft tokens guessed from a sequence's own tokens and from recent answers of others."""

from __future__ import annotations

import random
import re
import sys
import tracemalloc
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from inflight.config import SchedulingConfig, Speculation
from inflight.core.kv.block_keys import PrefixIdentity
from inflight.core.request import suffix_decoding
from inflight.core.request.drafters import Drafters
from inflight.core.request.prompt_lookup import PromptLookup
from inflight.core.request.request import ExternalDraft, IterationInput, OutputOptions, Request
from inflight.core.request.sampling_config import SamplingConfig
from inflight.core.request.suffix_decoding import (
    CAPACITY,
    MAX_MATCH,
    MAX_PLACES,
    MAX_READ,
    MIN_MATCH,
    Place,
    SuffixDecoding,
    SuffixTree,
    _Branch,
)
from inflight.core.schedule.batch import ModelOutput
from inflight.core.scheduler import Scheduler
from tests.core.factories import make_limits, make_request

SUFFIX = Speculation(Speculation.SUFFIX, 4)


def longest(texts: Iterable[Place], tokens: list[int]) -> tuple[int, list[Place]]:
    """The definition of the longest occurrence, by a search of every place; the places are the latest first.

    Args:
        texts: All places, oldest first.
        tokens: A sequence.
    """
    lengths = [(common_suffix(text[:position], tokens), (text, position)) for text, position in texts]
    most = max((length for length, _ in lengths), default=0)
    if most < MIN_MATCH:
        return 0, []
    return most, [place for length, place in lengths if length == most][::-1]


def search(tokens: list[int], max_tokens: int, answers: list[Place], answer: list[int]) -> tuple[int, ...]:
    """The definition of suffix decoding.

    Args:
        tokens: The sequence.
        max_tokens: Maximum number of tokens of the draft.
        answers: Places in recent answers, oldest first.
        answer: The sequence's own one of these.
    """
    num_own, own = longest(((tokens, position) for position in range(2, len(tokens))), tokens)
    num_others, others = longest(answers, tokens)
    num_places = suffix_decoding.MAX_PLACES
    others = [place for place in others[:num_places] if place[0] is not answer]
    places = own[:num_places] * (num_own >= num_others) + others * (num_others >= num_own)
    rests = [text[position : position + max_tokens] for text, position in places]
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
    answers = SuffixTree()
    SuffixDecoding(first := [9], 4, answers).append((1, 2, 3, 4, 5))
    assert SuffixDecoding([7, 1, 2], 4, answers).propose(2) == (3, 4)
    assert SuffixDecoding([7, 1, 2, 6, 7, 1, 2], 4, answers).propose(2) == (6, 7)  # the longer one
    assert SuffixDecoding([1, 2, 6, 1, 2], 4, answers).propose(1) == (6,)  # as long and as frequent
    assert first == [9]


@pytest.mark.parametrize("num_places", [1, 3, MAX_PLACES])
@pytest.mark.parametrize("capacity", [1, 7, 100, 1000])
def test_drafts_are_those_of_a_slow_search(
    capacity: int, num_places: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suffix_decoding, "MAX_PLACES", num_places)
    rng, found = random.Random(capacity), 0
    answers, log = SuffixTree(capacity), list[Place]()
    for _ in range(8):
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
            guess = drafters[which].propose(5)
            assert guess == search(texts[which], 5, log, outputs[which])
            found += bool(guess)
    assert found > 150
    assert len(answers) == len(log)


def words(page: str) -> list[int]:
    """The words and signs of a page of the documentation, as numbers."""
    numbers: dict[str, int] = {}
    text = (Path(__file__).parents[2] / "docs" / page).read_text()
    return [numbers.setdefault(word, len(numbers)) for word in re.findall(r"\w+|\W", text)]


TEXTS = {
    **{f"vocabulary of {size}": random.Random(size).choices(range(size), k=1200) for size in (2, 5, 50)},
    "one token": [7] * 300,
    "repeated": random.Random(1).choices(range(30), k=20) * 60,
    "prose": words("speculation.md")[:2500],
    "table": words("flags.md")[:1500],
}


@pytest.mark.parametrize("num_places", [1, MAX_PLACES])
@pytest.mark.parametrize("capacity", [40, 500, CAPACITY])
@pytest.mark.parametrize("name", TEXTS)
def test_the_longest_occurrence_is_found_at_every_position(
    name: str, capacity: int, num_places: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the sequence itself, and among places that are added in turn to three texts, of which old ones are
    forgotten."""
    monkeypatch.setattr(suffix_decoding, "MAX_PLACES", num_places)
    whole, known = TEXTS[name], Occurrences()
    tree, texts, num_found = SuffixTree(capacity), [list[int]() for _ in range(3)], 0
    for at, token in enumerate(whole):
        text = texts[at // 7 % 3]  # seven tokens at a time
        if len(text) >= MIN_MATCH:
            tree.add(text, len(text))
            known.add((text, len(text)), capacity)
        text.append(token)
        if len(text) >= MIN_MATCH:
            length, places = tree.find(text)
            assert (length, places) == known.longest(text, num_places)
            num_found += length > 0
    assert num_found > 20
    assert len(tree) == min(capacity, sum(len(text) - MIN_MATCH for text in texts))
    check_size(tree)


class Occurrences:
    """All occurrences of all runs of 2 to MAX_MATCH tokens before the latest places, oldest first."""

    def __init__(self) -> None:
        self._places: list[Place] = []
        self._by_tokens: dict[tuple[int, ...], list[Place]] = defaultdict(list)

    def add(self, place: Place, capacity: int) -> None:
        """Add a place; forget the oldest if there are more than `capacity`."""
        self._places.append(place)
        for run in self._runs(*place):
            self._by_tokens[run].append(place)
        if len(self._places) > capacity:
            for run in self._runs(*self._places.pop(0)):
                del self._by_tokens[run][0]

    def longest(self, tokens: list[int], num_places: int) -> tuple[int, list[Place]]:
        """Return what `SuffixTree.find` should return."""
        for run in reversed(self._runs(tokens, len(tokens))):
            if places := self._by_tokens[run]:
                return len(run), places[-num_places:][::-1]
        return 0, []

    @staticmethod
    def _runs(text: list[int], position: int) -> list[tuple[int, ...]]:
        most = min(position, MAX_MATCH)
        return [tuple(text[position - length : position]) for length in range(MIN_MATCH, most + 1)]


def check_size(tree: SuffixTree) -> None:
    """Check that each branch has many places, so that the number of branches is bounded, and that nothing is left
    of forgotten places."""
    num_places, most = Counter[int](), suffix_decoding.MAX_PLACES
    for text, position in tree._places:
        children, key, depth = tree._root, text[position - 2] << 32 | text[position - 1], 2
        while isinstance(node := children[key], _Branch):
            num_places[id(node)] += 1
            children, depth = node.children, depth + 1
            key = text[position - depth] if depth <= position else -1
        num_places[id(node)] += 1
    remaining: list[_Branch | list[Place]] = [*tree._root.values()]
    while remaining:
        node = remaining.pop()
        if isinstance(node, _Branch):
            assert len(node.places) == most <= num_places[id(node)]
            remaining += node.children.values()
        else:
            assert len(node) == min(most, num_places[id(node)]) > 0


def test_the_oldest_places_are_forgotten() -> None:
    tree, text = SuffixTree(3), [1, 2, 3, 1, 2, 4, 5, 6]
    for position in range(2, len(text)):
        tree.add(text, position)
    assert len(tree) == 3
    assert tree.find([1, 2]) == (2, [(text, 5)])
    assert tree.find([2, 3]) == (0, [])
    assert tree.find([4, 5]) == (2, [(text, 7)])


class RaisesAtLine(Exception):
    """A planted exception."""


def test_after_an_exception_at_any_line_all_other_places_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a place is added that divides a list at every depth, and another one is forgotten."""
    monkeypatch.setattr(suffix_decoding, "MAX_PLACES", 2)
    line, is_raised = 0, True

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith("suffix_decoding.py"):
            return None
        left -= event == "line"
        if left == 0 and event == "line":
            raise RaisesAtLine
        return trace

    text = [1, 2, 3, 4, 5, 6] * 7
    while is_raised:
        tree = SuffixTree(12)
        for position in range(20, 32):
            tree.add(text, position)
        line, is_raised = line + 1, False
        left, before = line, sys.gettrace()
        sys.settrace(trace)
        try:
            tree.add(text, 32)
        except RaisesAtLine:
            is_raised = True
        finally:
            sys.settrace(before)
        for end in range(2, 33):
            length, places = longest(tree._places, text[:end])
            assert tree.find(text[:end]) == (length, places[:2])
        assert [position for _, position in tree._places if 20 < position < 32] == [*range(21, 32)]
        tree.add(text, 33)
        assert tree.find(text[:33]) == (MAX_MATCH, [(text, 33), (text, 27)])
        check_size(tree)
    assert line > 200


@pytest.mark.parametrize(
    "text",
    [
        random.Random(1).choices(range(1000), k=250) * (MAX_PLACES + 1),  # has the most branches
        random.Random(1).choices(range(50_000), k=4000),
        [7] * 4000,
        words("speculation.md")[:4000],
    ],
    ids=["repeated", "random", "one token", "prose"],
)
def test_a_token_takes_at_most_600_bytes(text: list[int]) -> None:
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tree = SuffixTree(len(text))
        for position in range(2, len(text)):
            tree.add(text, position)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 50 < (after - before) / len(text) < 600


@pytest.mark.parametrize("name", ["one token", "repeated", "vocabulary of 2", "prose"])
def test_a_token_takes_a_bounded_number_of_steps(name: str) -> None:
    """Also in texts that are as bad as possible; lines of the module are counted, as times would vary."""
    num_lines, most = 0, 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal num_lines
        if not frame.f_code.co_filename.endswith("suffix_decoding.py"):
            return None
        num_lines += event == "line"
        return trace

    tree, text, before = SuffixTree(20 * MAX_PLACES + 10), TEXTS[name] * 2, sys.gettrace()
    for position in range(2, len(text)):
        num_lines = 0
        sys.settrace(trace)
        try:
            tree.add(text, position)
            tree.find(text[: position + 1])
        finally:
            sys.settrace(before)
        most = max(most, num_lines)
    assert most < MAX_MATCH * 4 * (MAX_PLACES + 6)


def test_a_long_prompt_is_read_in_parts() -> None:
    """So that no iteration takes long; the first parts are already used."""
    numbers = range(10, 10 + 2 * MAX_READ)
    drafter = SuffixDecoding([1, 2, 3, *numbers, 1, 2, 4, *numbers, 1, 2], 4)
    assert [drafter.propose(1) for _ in range(4)] == [(3,), (3,), (4,), (4,)]


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

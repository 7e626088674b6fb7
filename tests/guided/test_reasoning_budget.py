"""Guides that bound reasoning: which tokens are allowed, compared with the text so far."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from inflight.core.request.guide import Guide, GuideKind
from inflight.errors import InvalidArgument
from inflight.guided.backend import MaskJob
from inflight.guided.budget import try_out
from inflight.guided.make_backend import make_backend
from inflight.guided.vocabulary import GuideVocabulary
from tests.guided.factories import has_bit
from tests.tiers import examples

TOKENS = (
    *(bytes([code]) for code in range(32, 127)),
    *(
        b"\n",
        b"\n\n",
        b"</",
        b"think",
        b"k>",
        b">{",
        b">\n",
        b"</think>",
        b"</think>x",
        b"a</think>{",
        b"",
        b"<think>",
    ),
)
SPECIAL = frozenset((len(TOKENS) - 1,))
VOCABULARY = GuideVocabulary(TOKENS, SPECIAL)
YES = Guide(GuideKind.REGEX, "yes|no")


@pytest.fixture(params=["llguidance", "xgrammar"], scope="module")
def backend(request: pytest.FixtureRequest):
    pytest.importorskip(request.param)
    return make_backend(request.param, VOCABULARY)


def follow(backend, guide: Guide, seed: int, length: int) -> tuple[list[int], bool]:
    """Return random allowed tokens, and whether the text may end behind them."""
    rng = random.Random(seed)
    matcher = backend.load(guide, backend.compile(guide))
    ids: list[int] = []
    may_end = False
    for _ in range(length):
        masks = np.zeros((1, VOCABULARY.num_words), dtype=np.int32)
        assert not backend.fill([MaskJob(matcher, 0)], masks)
        allowed = [index for index in range(len(TOKENS)) if has_bit(masks[0], index)]
        may_end = has_bit(masks[0], VOCABULARY.end_id)
        if not allowed:
            break
        token = rng.choice(allowed)
        copy = matcher.fork()
        matcher.consume((token,))
        matcher.rollback(1)
        again = np.zeros_like(masks)
        backend.fill([MaskJob(matcher, 0)], again)
        assert (again == masks).all()
        backend.fill([MaskJob(copy, 0)], again)
        assert (again == masks).all()
        matcher.consume((token,))
        ids.append(token)
    return ids, may_end


@pytest.mark.parametrize("max_tokens", [0, 1, 7])
def test_an_answer_with_a_guide_follows_within_the_budget(backend, max_tokens: int) -> None:
    guide = Guide.behind_reasoning("", "</think>", max_tokens, YES)
    try_out(backend, VOCABULARY, guide, backend.compile(guide))
    for seed in range(examples(25, all=300)):
        ids, may_end = follow(backend, guide, seed, max_tokens + 20)
        text = b"".join(TOKENS[each] for each in ids).decode()
        thought, end, answer = text.partition("</think>")
        assert end and answer.strip(" \n") in ("yes", "no") and may_end
        before = next(n for n in range(len(ids) + 1) if b"</think>" in b"".join(TOKENS[i] for i in ids[:n]))
        assert before <= max_tokens + len("</think>") and len(answer) <= 5
        if max_tokens == 0:
            assert thought == "" and ids[0] == TOKENS.index(b"</think>")


def test_a_free_answer_has_every_token_behind_the_reasoning(backend) -> None:
    guide = Guide.behind_reasoning("<think>", "</think>", 3, None)
    matcher = backend.load(guide, backend.compile(guide))

    def allowed() -> set[int]:
        masks = np.zeros((1, VOCABULARY.num_words), dtype=np.int32)
        assert not backend.fill([MaskJob(matcher, 0)], masks)
        return {index for index in range(len(TOKENS) + 1) if has_bit(masks[0], index)}

    everything = set(range(len(TOKENS) + 1))
    ids = [TOKENS.index(each) for each in (b"\n", b"<think>", b"a", b"b", b"</")]
    for token in ids:
        assert allowed() == everything
        matcher.consume((token,))
    assert allowed() == {TOKENS.index(b"think")}  # the longest token of what is left
    with pytest.raises(InvalidArgument, match="reached its budget"):
        matcher.consume((TOKENS.index(b"a"),))
    matcher.consume((TOKENS.index(b"think"), TOKENS.index(b">")))
    for token in (TOKENS.index(b"<think>"), *range(5)):
        assert allowed() == everything
        matcher.consume((token,))
    matcher.rollback(8)
    assert allowed() == {TOKENS.index(b"think")}
    other = backend.load(guide, b"")
    other.consume([TOKENS.index(each) for each in (b"N", b"o", b"<think>", b"a", b"a", b"a", b"a")])
    matcher = other
    assert allowed() == everything  # no reasoning, as the text begins otherwise


@pytest.mark.parametrize(
    "text",
    [
        {"reasoning": {"end": "", "max_tokens": 3}},
        {"reasoning": {"end": "x", "max_tokens": -1}},
        {"reasoning": {"end": "x", "max_tokens": True}},
        {"reasoning": {"end": "x"}},
        {"reasoning": {"end": "x", "max_tokens": 1, "more": 1}},
        {"reasoning": {"end": "x", "max_tokens": 1, "begin": "y"}, "guide": {"type": "regex", "guide": "a"}},
        {"reasoning": {"end": "x", "max_tokens": 1}, "guide": {"type": "verse"}},
        {"reasoning": [], "guide": {"type": "json"}},
    ],
)
def test_other_forms_are_refused(text: object) -> None:
    backend = make_backend("llguidance", VOCABULARY)
    with pytest.raises(InvalidArgument, match="guided_decoding_guide"):
        backend.compile(Guide(GuideKind.STRUCTURAL_TAG, json.dumps(text)))


def test_texts_of_clients_take_bounded_memory(backend) -> None:
    for number in range(100):
        matcher = backend.load(Guide.behind_reasoning("", f"<{number}>", 2, YES), backend.compile(YES))
        masks = np.zeros((1, VOCABULARY.num_words), dtype=np.int32)
        assert not backend.fill([MaskJob(matcher, 0)], masks)
    for cached in (backend._ids_within, backend._with_byte, backend._banned):
        info = cached.cache_info()
        assert info.maxsize is not None and 0 < info.currsize <= info.maxsize
    assert backend._ids_within.cache_info().misses >= 100

"""What a step of one guide may take: a guide that wants more ends with an error that says so, and no other."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from inflight.core.request.guide import Guide, GuideType
from inflight.errors import InvalidArgument
from inflight.guided import llguidance_backend
from inflight.guided.backend import GuideBackend, MaskJob, make_backend
from inflight.guided.llguidance_backend import LLMatcher
from tests.guided.factories import has_bit, tiny_backend, tiny_vocabulary

WIDE_SCHEMA = {
    "anyOf": [
        {"type": "object", "properties": {"kind": {"const": f"k{index}"}}, "required": ["kind"]}
        for index in range(256)
    ]
}
AMBIGUOUS = [
    'root ::= e\ne ::= e "+" e | e "*" e | "(" e ")" | [a-z]+ | e e',
    "root ::= s+\ns ::= [a-z] | [a-z] [a-z] | [a-z] s | s [a-z] | s s",
]
FORCED = [
    Guide(GuideType.REGEX, "x{60000}"),
    Guide(GuideType.EBNF_GRAMMAR, f'root ::= "{"x" * 60000}"'),
    Guide(GuideType.JSON_SCHEMA, json.dumps({"const": "x" * 60000})),
    Guide(
        GuideType.STRUCTURAL_TAG,
        json.dumps(
            {"structures": [{"begin": "x" * 60000, "schema": {}, "end": "y"}], "sequence": {}},
        ),
    ),
]


class Clock:
    """Processor time that passes with every call of a matcher, whatever it does."""

    def __init__(self, call_s: float) -> None:
        self._call_s = call_s
        self._num_readings = 0

    def __call__(self) -> float:
        self._num_readings += 1  # one before a call and one behind it
        return self._num_readings // 2 * self._call_s


@pytest.fixture(autouse=True)
def _no_time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the counts bound a guide here, on any machine."""
    monkeypatch.setattr(llguidance_backend, "thread_time", Clock(0.0))


def allowed_by(mask: np.ndarray) -> list[int]:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(tiny_vocabulary().tokens)]
    return np.flatnonzero(bits).tolist()


def follow(guide: Guide, num_steps: int, backend: GuideBackend) -> int:
    """Go on with tokens at random; returns how many steps there were. Raises what a request would end with."""
    rng = random.Random(0)
    matcher = backend.load(guide, backend.compile(guide))
    masks = np.zeros((1, tiny_vocabulary().num_words), dtype=np.int32)
    for step in range(num_steps):
        for error in backend.fill([MaskJob(matcher, 0)], masks).values():
            raise error
        allowed = allowed_by(masks[0])
        if not allowed:
            return step
        matcher.consume([rng.choice(allowed)])
    return num_steps


@pytest.mark.parametrize("grammar", AMBIGUOUS)
def test_a_grammar_whose_steps_grow_ends_with_an_error(grammar: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llguidance_backend, "_most_items", lambda vocab_size: 500)
    backend = make_backend("llguidance", tiny_vocabulary())
    with pytest.raises(
        InvalidArgument, match=r"guided_decoding_guide .* more work than one request may ask for"
    ):
        follow(Guide(GuideType.EBNF_GRAMMAR, grammar), 400, backend)


def test_a_sequence_may_take_a_bounded_time_at_once_and_for_every_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend, guide = tiny_backend(), Guide(GuideType.REGEX, "[a-z]{1000}")
    letter = tiny_vocabulary().tokens.index(b"a")
    masks = np.zeros((1, tiny_vocabulary().num_words), dtype=np.int32)
    for call_s, is_too_slow in ((0.0025, False), (0.0075, True)):  # two calls a token, which adds 5 ms
        monkeypatch.setattr(llguidance_backend, "thread_time", Clock(call_s))
        matcher = backend.load(guide, backend.compile(guide))
        for step in range(100):
            if failures := backend.fill([MaskJob(matcher, 0)], masks):
                assert is_too_slow and step >= 9, "there are 100 ms beforehand"
                assert "more work than one request may ask for" in str(failures[0])
                break
            matcher = matcher.fork()
            try:
                matcher.consume([letter])
            except InvalidArgument as error:
                assert is_too_slow and step >= 9
                assert "more work than one request may ask for" in str(error)
                break
        else:
            assert not is_too_slow


@pytest.mark.parametrize("num_others", [3, 20])
def test_a_guide_over_its_budget_disturbs_no_other(num_others: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls a token take the others as long as a token adds; nothing is added for the first."""
    monkeypatch.setattr(llguidance_backend, "thread_time", Clock(0.0025))
    backend, guide = tiny_backend(), Guide(GuideType.REGEX, "[a-z]{1000}")
    matchers = [backend.load(guide, backend.compile(guide)) for _ in range(num_others + 1)]
    assert isinstance(matchers[0], LLMatcher)
    matchers[0] = LLMatcher(matchers[0].matcher, token_s=0.0, left_s=0.02)
    letter = tiny_vocabulary().tokens.index(b"a")
    masks = np.zeros((len(matchers), tiny_vocabulary().num_words), dtype=np.int32)
    num_errors = 0
    for _ in range(100):
        errors = backend.fill([MaskJob(matcher, row) for row, matcher in enumerate(matchers)], masks)
        assert set(errors) <= {0}
        assert all(has_bit(mask, letter) for mask in masks[1:])
        for matcher in matchers[1:]:
            matcher.consume([letter])
        if errors:
            num_errors += 1
            continue
        try:
            matchers[0].consume([letter])
        except InvalidArgument as error:
            assert "more work than one request may ask for" in str(error)
            num_errors += 1
    assert num_errors > 80


@pytest.mark.parametrize("guide", FORCED, ids=lambda guide: guide.type.value)
def test_a_text_that_is_forced_is_not_looked_for_ahead(guide: Guide) -> None:
    """Every token that the text begins with may come, and not only the one that the library would choose."""
    backend, tokens = tiny_backend(), tiny_vocabulary().tokens
    matcher = backend.load(guide, backend.compile(guide))
    text = '"' + "x" * 60000 if guide.type is GuideType.JSON_SCHEMA else "x" * 60000
    masks = np.zeros((1, tiny_vocabulary().num_words), dtype=np.int32)
    for place in range(50):
        assert not backend.fill([MaskJob(matcher, 0)], masks)
        expected = {
            token
            for token, spelled in enumerate(tokens)
            if spelled and text.startswith(spelled.decode("latin-1"), place)
        }
        assert set(allowed_by(masks[0])) == expected
        matcher.consume([min(expected)])


@pytest.mark.parametrize(
    "guide",
    [
        Guide(GuideType.JSON_SCHEMA, json.dumps(WIDE_SCHEMA)),
        Guide(GuideType.JSON_SCHEMA, json.dumps({"enum": [f"value {index}" for index in range(1900)]})),
        Guide(
            GuideType.JSON_SCHEMA,
            json.dumps({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(400)}}),
        ),
        Guide(
            GuideType.STRUCTURAL_TAG,
            json.dumps(
                {
                    "structures": [
                        {"begin": f"<f{index}>", "schema": WIDE_SCHEMA["anyOf"][index], "end": "</f>"}
                        for index in range(256)
                    ],
                    "sequence": {},
                }
            ),
        ),
        Guide(GuideType.EBNF_GRAMMAR, 'root ::= e\ne ::= e "+" e | e "*" e | "(" e ")" | [a-z]+ | [0-9]+'),
    ],
    ids=["anyOf", "enum", "properties", "tools", "sums"],
)
def test_large_guides_stay_within_the_counts(guide: Guide) -> None:
    assert follow(guide, 40, tiny_backend()) > 0

"""Budget of one sequence's guide: exceeding it ends that sequence alone, with an error that names the limit."""

from __future__ import annotations

import gc
import json
import random

import numpy as np
import pytest

from inflight.core.request.guide import Guide, GuideKind
from inflight.errors import InvalidArgument
from inflight.guided import budget, llguidance_backend
from inflight.guided.backend import GuideBackend, MaskJob
from inflight.guided.budget import Budget, BudgetedMatcher, try_out, work_time
from inflight.guided.grammars import Grammars, MaskRows
from inflight.guided.make_backend import make_backend
from tests.engine.serving import config_of, serve
from tests.guided.factories import (
    has_bit,
    load,
    make_request,
    tiny_backend,
    tiny_grammars,
    tiny_vocabulary,
)
from tests.models.zoo import Zoo
from tests.tiers import with_all

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
    Guide(GuideKind.REGEX, "x{60000}"),
    Guide(GuideKind.EBNF_GRAMMAR, f'root ::= "{"x" * 60000}"'),
    Guide(GuideKind.JSON_SCHEMA, json.dumps({"const": "x" * 60000})),
    Guide(
        GuideKind.STRUCTURAL_TAG,
        json.dumps(
            {"structures": [{"begin": "x" * 60000, "schema": {}, "end": "y"}], "sequence": {}},
        ),
    ),
]


class Clock:
    """A fake clock of processor time, which advances with every call of a matcher."""

    def __init__(self, call_s: float) -> None:
        self._call_s = call_s
        self._num_readings = 0

    def __call__(self) -> float:
        self._num_readings += 1  # one before a call and one after it
        return self._num_readings // 2 * self._call_s


@pytest.fixture(autouse=True)
def _no_time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the clock, so that only counts of calls bound a guide, on any machine."""
    monkeypatch.setattr(budget, "work_time", Clock(0.0))


def allowed_by(mask: np.ndarray) -> list[int]:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(tiny_vocabulary().tokens)]
    return np.flatnonzero(bits).tolist()


def follow(guide: Guide, num_steps: int, backend: GuideBackend) -> int:
    """Continue with random tokens; return the number of steps.

    Raises the error with which a request would end.
    """
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
def test_a_grammar_with_growing_steps_ends_with_an_error(
    grammar: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llguidance_backend, "_most_items", lambda vocab_size: 500)
    backend = make_backend("llguidance", tiny_vocabulary())
    with pytest.raises(InvalidArgument, match=r"guided_decoding_guide .* more work than one request may use"):
        follow(Guide(GuideKind.EBNF_GRAMMAR, grammar), 400, backend)


LETTERS = Guide(GuideKind.REGEX, "[a-z]{1000}")
LETTER = tiny_vocabulary().tokens.index(b"a")
TOO_MUCH = "guided_decoding_guide cannot be used: its masks take more work than one request may use"


def grammars_with(*guides: Guide, name: str) -> Grammars:
    pytest.importorskip(name, reason="the other library is not installed")
    grammars = tiny_grammars(name=name)
    for guide in guides:
        grammars.add(guide, tiny_backend(name).compile(guide))
    return grammars


def steps_until_over(grammars: Grammars, drafts: tuple[int, ...], num_steps: int) -> int:
    """Return the number of steps, at most `num_steps`, until the budget is exceeded.

    All drafts are rejected.
    """
    matcher = grammars.matcher(LETTERS)
    masks = np.zeros((1 + len(drafts), tiny_vocabulary().num_words), dtype=np.int32)
    for step in range(num_steps):
        if errors := grammars.fill([MaskRows(matcher, 0, drafts)], masks):
            assert str(errors[0]).startswith(TOO_MUCH)
            return step
        assert all(has_bit(mask, LETTER) for mask in masks)
        try:
            matcher.consume([LETTER])
        except InvalidArgument as error:
            assert str(error).startswith(TOO_MUCH)
            return step
    return num_steps


@pytest.mark.parametrize("name", ["llguidance", "xgrammar"])
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_the_budget_is_a_fixed_time_and_a_time_per_token(
    name: str, num_drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step makes a mask and consumes a token, and does both for each draft. The budget is 100 ms and 5 ms
    per token."""
    grammars = grammars_with(LETTERS, name=name)
    num_calls, added_s = 2 * (1 + num_drafts), Budget.of_vocabulary(tiny_vocabulary()).token_s
    for share, expected in ((0.9, 100), (3.0, 100 / (2 * 5))):
        monkeypatch.setattr(budget, "work_time", Clock(share * added_s / num_calls))
        num_steps = steps_until_over(grammars, (LETTER,) * num_drafts, 100)
        assert num_steps == pytest.approx(expected, abs=1)


def test_garbage_collections_do_not_count_as_work(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]

    def pass_time(phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            now_s[0] += 10.0

    monkeypatch.setattr(budget, "thread_time", lambda: now_s[0])
    began_s = work_time()
    gc.callbacks.append(pass_time)
    try:
        gc.collect()
        gc.collect()
    finally:
        gc.callbacks.remove(pass_time)
    now_s[0] += 1.0
    assert now_s[0] >= 21.0
    assert work_time() - began_s == pytest.approx(1.0)


@pytest.mark.parametrize("name", ["llguidance", "xgrammar"])
@pytest.mark.parametrize("num_drafts", [0, 2])
@pytest.mark.parametrize("num_others", [3, 20])
def test_a_guide_over_its_budget_does_not_affect_others(
    name: str, num_drafts: int, num_others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other guides make two calls per token, which take exactly the time that a token adds."""
    monkeypatch.setattr(budget, "work_time", Clock(0.0025))
    grammars = grammars_with(LETTERS, name=name)
    matchers = [grammars.matcher(LETTERS) for _ in range(num_others + 1)]
    matchers[0] = BudgetedMatcher(matchers[0].matcher, Budget(token_s=0.0), left_s=0.03)
    drafts = [(LETTER,) * num_drafts, *[()] * num_others]
    rows = [0, *range(num_drafts + 1, num_drafts + 1 + num_others)]
    masks = np.zeros((rows[-1] + 1, tiny_vocabulary().num_words), dtype=np.int32)
    num_errors = 0
    for _ in range(100):
        asked = [MaskRows(*each) for each in zip(matchers, rows, drafts)]
        errors = grammars.fill(asked, masks)
        assert set(errors) <= {0}
        assert all(has_bit(masks[row], LETTER) for row in rows[1:])
        for matcher in matchers[1:]:
            matcher.consume([LETTER])
        if errors:
            assert str(errors[0]).startswith(TOO_MUCH)
            num_errors += 1
            continue
        try:
            matchers[0].consume([LETTER])
        except InvalidArgument as error:
            assert str(error).startswith(TOO_MUCH)
            num_errors += 1
    assert num_errors > 80


@pytest.mark.parametrize("name", ["llguidance", "xgrammar"])
def test_masks_after_drafts_equal_those_of_single_steps(name: str) -> None:
    """Masks are made up to the first banned draft token; later rows are not changed."""
    guide = Guide(GuideKind.REGEX, "ab(c|d)[0-9]{2}")
    grammars = grammars_with(guide, name=name)
    index = tiny_vocabulary().tokens.index
    drafts = tuple(map(index, (b"ab", b"c", b"x", b"1")))
    one_by_one, masks = (np.full((5, tiny_vocabulary().num_words), 7, dtype=np.int32) for _ in range(2))
    matcher = grammars.matcher(guide)
    for row, token in enumerate(drafts[:3]):
        assert not grammars.fill([MaskRows(matcher, row)], one_by_one)
        if row < 2:
            matcher.consume([token])
    matcher = grammars.matcher(guide)
    for _ in range(2):  # the matcher has not changed
        assert not grammars.fill([MaskRows(matcher, 0, drafts)], masks)
        assert np.array_equal(masks, one_by_one)
    assert (masks[3:] == 7).all()


AMBIGUOUS_ELSEWHERE = [
    *(Guide(GuideKind.EBNF_GRAMMAR, each) for each in AMBIGUOUS),
    Guide(GuideKind.EBNF_GRAMMAR, 'root ::= s\ns ::= "a" | s s | s s s | s s s s'),
    Guide(GuideKind.REGEX, "((a|aa|aaa|aaaa){0,50}){0,50}"),
]
"""Grammars whose steps take ever longer with xgrammar, which has no bounds of its own."""
LARGE = [
    Guide(GuideKind.REGEX, "x{60000}"),
    Guide(GuideKind.REGEX, "((x{50}){50}){20}"),
    Guide(GuideKind.REGEX, "|".join(f"[a-z]*{index}x" for index in range(100))),
]
"""Large guides whose steps take little work."""


def follow_with_drafts(guide: Guide, num_drafts: int, num_tokens: int) -> int:
    """Continue with xgrammar and the allowed letters, as drafts first; return the number of tokens.

    Raises the error with which the request would end.
    """
    grammars = grammars_with(guide, name="xgrammar")
    matcher = grammars.matcher(guide)
    letters = [tiny_vocabulary().tokens.index(each) for each in (b"a", b"x", b"1")]
    masks = np.zeros((1 + num_drafts, tiny_vocabulary().num_words), dtype=np.int32)
    for place in range(num_tokens):
        for error in grammars.fill([MaskRows(matcher, 0, (letters[0],) * num_drafts)], masks).values():
            raise error
        allowed = [each for each in letters if has_bit(masks[0], each)]
        if not allowed:
            return place
        matcher.consume(allowed[:1])
    return num_tokens


@pytest.mark.parametrize("guide", AMBIGUOUS_ELSEWHERE, ids=range(len(AMBIGUOUS_ELSEWHERE)))
@pytest.mark.parametrize("num_drafts", with_all([0, 4], [4]))
def test_xgrammar_ends_a_guide_with_growing_steps(
    guide: Guide, num_drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "work_time", work_time)
    with pytest.raises(InvalidArgument, match=TOO_MUCH):
        follow_with_drafts(guide, num_drafts, 2000)


@pytest.mark.parametrize("guide", LARGE, ids=range(len(LARGE)))
@pytest.mark.parametrize("num_drafts", [0, 4])
def test_xgrammar_follows_large_guides_within_the_budget(guide: Guide, num_drafts: int) -> None:
    assert follow_with_drafts(guide, num_drafts, 60) > 0


@pytest.mark.parametrize("name", ["llguidance", "xgrammar"])
def test_a_guide_is_tried_before_its_request_starts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial has eight tokens with two calls each, so its budget is 100 ms and 40 ms; the last call
    consumes a token."""
    pytest.importorskip(name, reason="the other library is not installed")
    backend = tiny_backend(name)
    compiled = backend.compile(LETTERS)
    for call_s, is_too_slow in ((0.008, False), (0.02, True)):
        monkeypatch.setattr(budget, "work_time", Clock(call_s))
        if is_too_slow:
            with pytest.raises(InvalidArgument, match=TOO_MUCH):
                try_out(backend, tiny_vocabulary(), LETTERS, compiled)
        else:
            try_out(backend, tiny_vocabulary(), LETTERS, compiled)


@pytest.mark.parametrize("name", ["llguidance", "xgrammar"])
def test_other_requests_get_their_tokens_beside_hostile_guides(
    zoo: Zoo, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs with and without prompt lookup."""
    pytest.importorskip(name, reason="the other library is not installed")
    monkeypatch.setattr(budget, "work_time", work_time)
    model, letters = zoo["llama-gqa"], Guide(GuideKind.REGEX, "[a-z]{30}")
    others = [make_request(n, model.prompt(5 + n, n), letters, 40) for n in range(3)]
    hostile = [
        make_request(
            10 + n, (LETTER,) * 9, Guide(GuideKind.EBNF_GRAMMAR, AMBIGUOUS[1]), 240,
            sampling={"logit_bias_ids": (LETTER,), "logit_bias_values": (100.0,)}, **drafts,
        )
        for n, drafts in enumerate(({}, {"prompt_lookup_num_tokens": 4}))
    ]  # fmt: skip
    engine = load(model.folder, 1024, make_grammars=lambda size: tiny_grammars(size, name))
    alone = serve(engine, config_of("no-evict"), others)
    served = serve(
        engine, config_of("no-evict"), [*hostile, *others], may_fail=[each.request_id for each in hostile]
    )
    assert {number: str(error)[: len(TOO_MUCH)] for number, error in served.errors.items()} == {
        each.request_id: TOO_MUCH for each in hostile
    }
    assert [served.tokens(each) for each in others] == [alone.tokens(each) for each in others]


@pytest.mark.parametrize("guide", FORCED, ids=lambda guide: guide.type.value)
def test_forced_text_is_not_computed_ahead(guide: Guide) -> None:
    """Every token that the text begins with is allowed, not only the library's own choice."""
    backend, tokens = tiny_backend(), tiny_vocabulary().tokens
    matcher = backend.load(guide, backend.compile(guide))
    text = '"' + "x" * 60000 if guide.type is GuideKind.JSON_SCHEMA else "x" * 60000
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
        Guide(GuideKind.JSON_SCHEMA, json.dumps(WIDE_SCHEMA)),
        Guide(GuideKind.JSON_SCHEMA, json.dumps({"enum": [f"value {index}" for index in range(1900)]})),
        Guide(
            GuideKind.JSON_SCHEMA,
            json.dumps({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(400)}}),
        ),
        Guide(
            GuideKind.STRUCTURAL_TAG,
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
        Guide(GuideKind.EBNF_GRAMMAR, 'root ::= e\ne ::= e "+" e | e "*" e | "(" e ")" | [a-z]+ | [0-9]+'),
    ],
    ids=["anyOf", "enum", "properties", "tools", "sums"],
)
def test_large_guides_stay_within_the_allowed_number_of_calls(guide: Guide) -> None:
    assert follow(guide, 40, tiny_backend()) > 0

"""Guides that bodies ask for, enforced by both libraries."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from inflight.guided.backend import MaskJob
from inflight.guided.make_backend import make_backend
from inflight.guided.vocabulary import GuideVocabulary
from inflight.openai.errors import ApiError
from inflight.openai.guides import read_guide
from inflight.openai.protocol import CompletionBody
from tests.guided.factories import check_tokens, has_bit

BYTES = GuideVocabulary.of_size(
    512, [b"", b"<s>", b"</s>", *(bytes([each]) for each in range(256))], {0, 1, 2}
)


def ids_of(text: str) -> list[int]:
    return [3 + byte for byte in text.encode()]


@pytest.mark.parametrize("library", ["llguidance", "xgrammar"])
@pytest.mark.parametrize(
    "choice",
    [
        *("a\x01b", "a\x00b", "\x1b[0m", "a\bb", "\f", "\n", "\t\r", "\x7f", "\x85", "\u2028"),
        *("é😀", 'q"\\', "a\\nb", "\\u0041"),
    ],
)
def test_a_choice_may_have_any_characters(library: str, choice: str) -> None:
    if library == "xgrammar":
        pytest.importorskip("xgrammar", reason="the other library is not installed")
    backend = make_backend(library, BYTES)
    guide = read_guide(CompletionBody.model_validate({"prompt": "x", "guided_choice": ["other", choice]}))
    assert guide is not None
    for each in ("other", choice):
        check_tokens(backend, BYTES, guide, ids_of(each), has_ended=True)
    masks = np.zeros((1, BYTES.num_words), dtype=np.int32)
    backend.fill([MaskJob(backend.load(guide, backend.compile(guide)), 0)], masks)
    first = {byte for byte in range(256) if has_bit(masks[0], 3 + byte)}
    assert first == {ord("o"), choice.encode()[0]}


def test_vllms_white_space_options_are_followed() -> None:
    schema = {"type": "array", "items": {"type": "integer"}}
    for fields, spaced, is_allowed in (
        ({"structured_outputs": {"json": schema}}, "[ 1]", True),
        ({"structured_outputs": {"json": schema, "disable_any_whitespace": True}}, "[ 1]", False),
        ({"structured_outputs": {"json": schema, "disable_any_whitespace": True}}, "[1]", True),
        ({"structured_outputs": {"json": schema, "whitespace_pattern": r"\n?"}}, "[ 1]", False),
        ({"structured_outputs": {"json": json.dumps(schema), "whitespace_pattern": r"\n?"}}, "[\n1]", True),
        ({"structured_outputs": {"json_object": True, "disable_any_whitespace": True}}, '{"a":1}', True),
        ({"structured_outputs": {"json_object": True, "disable_any_whitespace": True}}, '{"a": 1}', False),
        ({"structured_outputs": {"regex": "a b", "disable_any_whitespace": True}}, "a b", True),
        ({"structured_outputs": {"choice": ["a b"], "disable_any_whitespace": True}}, "a b", True),
        ({"guided_json": schema, "guided_whitespace_pattern": "[ ]?"}, "[ 1]", True),
        ({"guided_json": schema, "guided_whitespace_pattern": "[ ]?"}, "[  1]", False),
    ):
        guide = read_guide(CompletionBody.model_validate({"prompt": "x", **fields}))
        assert guide is not None
        backend = make_backend("llguidance", BYTES)
        if is_allowed:
            check_tokens(backend, BYTES, guide, ids_of(spaced), has_ended=True)
        else:
            with pytest.raises(AssertionError):
                check_tokens(backend, BYTES, guide, ids_of(spaced), has_ended=True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
            "whitespace_pattern is for json and json_object, got regex$",
        ),
        (
            {"structured_outputs": {"structural_tag": {}, "disable_any_whitespace": True}},
            "disable_any_whitespace is for json and json_object, got structural_tag$",
        ),
        (
            {"structured_outputs": {"json": {"x-guidance": {}}, "disable_any_whitespace": True}},
            "and the x-guidance of its schema both define the allowed white space",
        ),
        (
            {"guided_json": {"x-guidance": {}}, "guided_whitespace_pattern": " "},
            "the x-guidance of its schema",
        ),
        ({"guided_whitespace_pattern": " "}, "is for guided_json, which is missing"),
        ({"structured_outputs": {"json": "{", "whitespace_pattern": " "}}, "must have a JSON schema"),
    ],
)
def test_white_space_options_are_refused_without_json(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError, match=message):
        read_guide(CompletionBody.model_validate({"prompt": "x", **fields}))


@pytest.mark.parametrize("library", ["llguidance", "xgrammar"])
@pytest.mark.parametrize("count", [2000, 2500])
def test_a_choice_may_have_thousands_of_texts(library: str, count: int) -> None:
    if library == "xgrammar":
        pytest.importorskip("xgrammar", reason="the other library is not installed")
    backend = make_backend(library, BYTES)
    choices = [f"{number} is a choice" for number in range(count)]
    guide = read_guide(CompletionBody.model_validate({"prompt": "x", "guided_choice": choices}))
    assert guide is not None
    for each in (choices[0], choices[999], choices[1000], choices[-1]):
        check_tokens(backend, BYTES, guide, ids_of(each), has_ended=True)


def test_rules_of_a_choice_are_short_for_any_number_of_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inflight.core.request.guide._MAX_ALTERNATIVES", 10)
    choices = [str(number) for number in range(101)]
    guide = read_guide(CompletionBody.model_validate({"prompt": "x", "guided_choice": choices}))
    assert guide is not None
    rules = guide.text.split("\n")
    assert max(rule.count(" | ") for rule in rules) == 9 and len(rules) == 1 + 11 + 2
    assert rules[0] == "root ::= part11 | part12"

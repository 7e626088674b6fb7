"""Guides that bodies ask for, by both libraries that follow them."""

from __future__ import annotations

import numpy as np
import pytest

from inflight.guided.backend import MaskJob, make_backend
from inflight.guided.vocabulary import GuideVocabulary
from inflight.openai import guides
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


@pytest.mark.parametrize("library", ["llguidance", "xgrammar"])
@pytest.mark.parametrize("count", [2000, 2500])
def test_a_choice_may_be_of_thousands(library: str, count: int) -> None:
    if library == "xgrammar":
        pytest.importorskip("xgrammar", reason="the other library is not installed")
    backend = make_backend(library, BYTES)
    choices = [f"{number} is a choice" for number in range(count)]
    guide = read_guide(CompletionBody.model_validate({"prompt": "x", "guided_choice": choices}))
    assert guide is not None
    for each in (choices[0], choices[999], choices[1000], choices[-1]):
        check_tokens(backend, BYTES, guide, ids_of(each), has_ended=True)


def test_rules_of_a_choice_are_short_however_many_texts_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guides, "_MOST_ALTERNATIVES", 10)
    choices = [str(number) for number in range(101)]
    guide = read_guide(CompletionBody.model_validate({"prompt": "x", "guided_choice": choices}))
    assert guide is not None
    rules = guide.text.split("\n")
    assert max(rule.count(" | ") for rule in rules) == 9 and len(rules) == 1 + 11 + 2
    assert rules[0] == "root ::= part11 | part12"

"""Unique items of arrays: tokens that complete several items, drafts, long and deeply nested arrays."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import numpy as np
import pytest

from inflight.core.request.guide import Guide, GuideKind
from inflight.errors import InvalidArgument
from inflight.guided import budget
from inflight.guided.budget import try_out
from inflight.guided.grammars import Grammars, MaskRows
from inflight.guided.make_backend import make_backend
from inflight.guided.schemas import distinct
from inflight.guided.schemas.distinct import ItemWatch, Places
from inflight.guided.vocabulary import GuideVocabulary
from tests.guided.factories import grammars_of, has_bit

_BYTES = [bytes([each]) for each in range(128)]
_PIECES = [b'"}', b'"},', b"]}", b"]]", b" }", b'"}]}', b'x"}']
VOCABULARY = GuideVocabulary.of_size(
    len(_BYTES) + len(_PIECES), [*_BYTES, *_PIECES], set(range(32)) - {9, 10, 13}
)
TEXTS: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
LISTS: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}}},
    "required": ["a"],
}


@pytest.fixture(autouse=True)
def _no_time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the clock, so that no budget is exceeded on a slow machine."""
    monkeypatch.setattr(budget, "work_time", lambda: 0.0)


def grammars() -> Grammars:
    return grammars_of(make_backend("llguidance", VOCABULARY), VOCABULARY)


def guide(items: dict[str, Any]) -> Guide:
    return Guide(GuideKind.JSON_SCHEMA, json.dumps({"type": "array", "uniqueItems": True, "items": items}))


def token(text: bytes) -> int:
    return VOCABULARY.tokens.index(text)


@pytest.mark.parametrize(
    ("items", "text", "banned"),
    [
        (TEXTS, b'[{"a":"x"},{"a":"x', [b'"}', b'"},']),
        (TEXTS, b'[{"a":"x"},{"a":"', [b'x"}']),
        (TEXTS, b'[{ "a":"x"},{"a" : "x', [b'"}', b'"},']),
        (LISTS, b'[{"a":[[1]]},{"a":[[1]', [b"]}"]),
        (LISTS, b'[{"a":[[1]]},{ "a":[[1]', [b"]}"]),
    ],
)
def test_a_token_that_completes_an_equal_item_and_more_is_banned(
    items: dict[str, Any], text: bytes, banned: list[bytes]
) -> None:
    followed = grammars()
    matcher, masks = followed.matcher(guide(items)), np.zeros((1, VOCABULARY.num_words), dtype=np.int32)
    matcher.consume(list(text))
    assert not followed.fill([MaskRows(matcher, 0)], masks)
    assert not any(has_bit(masks[0], token(each)) for each in banned)
    assert has_bit(masks[0], token(banned[0][:1]))


def test_a_draft_that_completes_an_equal_item_is_rejected() -> None:
    """The mask does not ban the token, whose leading space makes it another spelling of the item."""
    followed = grammars()
    matcher, masks = followed.matcher(guide(TEXTS)), np.full((4, VOCABULARY.num_words), -1, dtype=np.int32)
    matcher.consume(list(b'[{"a":"x"},{"a":"x'))
    quote, end = token(b'"'), token(b" }")
    assert not followed.fill([MaskRows(matcher, 0, (quote, end, end))], masks)
    assert has_bit(masks[0], quote) and not has_bit(masks[1], end) and has_bit(masks[1], token(b","))
    assert (masks[2:] == -1).all()
    matcher.consume(list(b'y" }]'))


def test_drafts_into_a_dead_end_are_rejected_after_the_last_choice() -> None:
    followed = grammars()
    items = {"type": ["boolean", "null"], "not": {"const": []}}  # without `not` the arrays would be listed
    matcher = followed.matcher(guide(items))
    masks = np.full((5, VOCABULARY.num_words), -1, dtype=np.int32)
    matcher.consume(list(b"[true,"))
    assert not followed.fill([MaskRows(matcher, 0, tuple(b"true"))], masks)
    assert not has_bit(masks[0], token(b"t")) and has_bit(masks[0], token(b"f"))
    assert (masks[1:] == -1).all()
    matcher.consume(list(b"null"))


def test_items_of_rejected_drafts_are_allowed() -> None:
    followed = grammars()
    matcher, masks = (
        followed.matcher(guide({"type": "string"})),
        np.zeros((9, VOCABULARY.num_words), dtype=np.int32),
    )
    matcher.consume(list(b'["x"'))
    assert not followed.fill([MaskRows(matcher, 0, tuple(b',"y","z'))], masks)
    forked = matcher.fork()
    for each in (matcher, forked):
        each.consume(list(b',"y","z","w"]'))
    with pytest.raises(InvalidArgument, match="must equal an earlier one"):
        followed.matcher(guide({"type": "string"})).consume(list(b'["x","y","x"'))


def test_a_keyword_that_is_spelled_by_an_escape_counts() -> None:
    text = r'{"type": "array", "items": {"type": "integer"}, "unique\u0049tems": true}'
    matcher = grammars().matcher(Guide(GuideKind.JSON_SCHEMA, text))
    with pytest.raises(InvalidArgument, match="must equal an earlier one"):
        matcher.consume(list(b"[1,1]"))


def test_a_guide_whose_trial_reaches_a_dead_end_is_accepted() -> None:
    tokens = [b"[", b'"', b"a", b","]
    vocabulary = GuideVocabulary.of_size(len(tokens), tokens, ())
    backend, only = make_backend("llguidance", vocabulary), guide({"type": "string", "pattern": "^a$"})
    try_out(backend, vocabulary, only, backend.compile(only))


def test_memory_grows_only_with_the_text() -> None:
    """Count memory that the module has allocated and not freed; each item takes a few hundred bytes."""
    watch = ItemWatch(Places('{"uniqueItems": true}'))
    tracemalloc.start()
    try:
        watch.read(b"[")
        for number in range(2000):
            watch.read(b"%d," % number)
        snapshot = tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()
    traces = snapshot.filter_traces([tracemalloc.Filter(True, distinct.__file__)]).traces
    assert 0 < sum(trace.size for trace in traces) < 5e6


def test_properties_outside_the_schema_share_a_place() -> None:
    schema = {"properties": {"a": {}}, "additionalProperties": {"uniqueItems": True}}
    root = Places(json.dumps(schema)).root
    assert root.property("b") is root.property("c") and root.property("b").is_distinct
    assert not root.property("a").is_distinct


def test_a_text_that_is_nested_too_deeply_ends_with_an_error() -> None:
    schema = {
        "$ref": "#/$defs/a",
        "$defs": {"a": {"type": "array", "uniqueItems": True, "items": {"$ref": "#/$defs/a"}}},
    }
    followed = grammars()
    matcher = followed.matcher(Guide(GuideKind.JSON_SCHEMA, json.dumps(schema)))
    masks = np.zeros((1, VOCABULARY.num_words), dtype=np.int32)
    deep = list(b"[" * 3000 + b"]" * 3000)
    with pytest.raises(InvalidArgument, match="nested too deeply"):
        for begin in range(0, len(deep), 10):
            matcher.consume(deep[begin : begin + 10])
            followed.fill([MaskRows(matcher, 0)], masks)

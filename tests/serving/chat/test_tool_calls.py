"""Parsing of tool calls, whole and in pieces, compared with calls written by json.dumps."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.errors import InvalidArgument
from inflight.serving.chat.special_markers import needs_special_tokens
from inflight.serving.chat.tool_calls import tool_call_stream
from inflight.serving.chat.tool_deltas import ChatDelta
from inflight.serving.chat.tool_format_table import TOOL_CALL_PARSERS, TOOL_FORMATS
from inflight.serving.chat.tool_guides import forced_prefix
from inflight.text.tokenizer import Tokenizer
from tests.serving.chat.answers import Answer, joined, read, tools_of, write_calls
from tests.text import tiny_tokenizers
from tests.tiers import examples

JSON_PARSERS = tuple(name for name, form in TOOL_FORMATS.items() if form.has_json)
WEATHER = {"city": "Zürich", "days": 3, "nested": {"a": [1, {"b": "}"}]}}


@pytest.mark.parametrize("parser", TOOL_CALL_PARSERS)
def test_calls_of_every_style_are_parsed(parser: str) -> None:
    calls = [("weather", WEATHER), ("time", {}), ("weather", {"city": 'a "b" \\ {'})]
    answer = read(parser, [write_calls(parser, calls)], tools=tools_of(calls))
    assert answer == Answer("", tuple(calls))


def test_a_text_without_calls_is_content_unchanged() -> None:
    for text in (
        "",
        " \n",
        "Hello.\n",
        " <tool_cal",
        "[TOOL_CALLS",
        "{",
        '{"name": "f"',
        "a {} b",
        "\n\n{} ",
    ):
        for parser in ("", *TOOL_CALL_PARSERS):
            assert read(parser, [text]) == Answer(text, ()), (parser, text)


@pytest.mark.parametrize(
    ("parser", "text", "content", "calls"),
    [
        # Content around calls, and white space between them.
        ("hermes", 'See.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n', "See.", ["f"]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n Done. ', "Done. ", ["f"]),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", ["f"]),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", ["f"]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", ["f"]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}, "id": "}"}</tool_call>', "", ["f"]),
        # A missing or incomplete end.
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}\n</tool', "", ["f"]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}} and on', "and on", ["f"]),
        # Texts without calls.
        ("hermes", "<tool_call>\nsearch()\n</tool_call>", "<tool_call>\nsearch()\n</tool_call>", []),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
        ("hermes", '<tool_call> <tool_call>{"name": "f"}</tool_call>', "<tool_call>", ["f"]),
        ("hermes", '{"name": "f", "arguments": {}}', '{"name": "f", "arguments": {}}', []),
        # Llama 3.
        ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {}}', "", ["f"]),
        ("llama3_json", 'Sure: <|python_tag|>{"name": "f", "parameters": {}}', "Sure:", ["f"]),
        ("llama3_json", '{"type": "function", "name": "f", "parameters": {}}', "", ["f"]),
        ("llama3_json", '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"x": ";"}}', "", [*"fg"]),
        ("llama3_json", '{"name": "f", "parameters": {}}\n {"name": "g", "parameters": {}}\n', "", [*"fg"]),
        ("llama3_json", '{"name": "f", "parameters": {}};\n{"name": "g", "parameters": {}} ;', ";", [*"fg"]),
        ("llama3_json", '{"name": "f", "parameters": {}}\n{"a": 1}', '{"a": 1}', ["f"]),
        ("llama3_json", '{"name": "f", "parameters": {}}; and now', "; and now", ["f"]),
        ("llama3_json", '{"name": "Ada", "born": 1815}', '{"name": "Ada", "born": 1815}', []),
        ("llama3_json", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
        ("llama3_json", 'So {"name": "f", "parameters": {}}', 'So {"name": "f", "parameters": {}}', []),
        # Mistral, old and new.
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "a1"}]', "", ["f"]),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{"b": 2}', "", ["f", "g"]),
        ("mistral", 'Wait. [TOOL_CALLS]f[CALL_ID]abc[ARGS]{"a": 1}', "Wait.", ["f"]),
        ("mistral", "[TOOL_CALLS] [1, 2]", "[TOOL_CALLS] [1, 2]", []),
        ("mistral", "[TOOL_CALLS] f and g", "[TOOL_CALLS] f and g", []),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}, 1]', ", 1]", ["f"]),
        ("json", '[{"name": "f", "arguments": {}}]', "", ["f"]),
        ("json", "[1]", "[1]", []),
    ],
)  # fmt: skip
def test_examples_of_each_style_are_parsed(parser: str, text: str, content: str, calls: list[str]) -> None:
    answer = read(parser, [text])
    assert (answer.content, [name for name, _ in answer.calls]) == (content, calls)
    assert read(parser, list(text)) == answer


@pytest.mark.parametrize("parser", JSON_PARSERS)
def test_the_rest_of_a_cut_forced_call_is_dropped(parser: str) -> None:
    calls = [("f", {"a": 1}), ("g", {"b": "}"})]
    text = write_calls(parser, calls).removeprefix(forced_prefix(parser))
    first = len(write_calls(parser, calls[:1]).removeprefix(forced_prefix(parser)).rstrip("]"))
    for end in range(first, len(text) + 1):
        content, found = joined(parser, [text[:end]], forced=True)
        assert content == "" and found[0]["arguments"] == '{"a": 1}', text[:end]
        assert without_ids(joined(parser, list(text[:end]), forced=True)) == without_ids(("", found))


def test_arguments_are_streamed() -> None:
    stream = tool_call_stream("hermes")
    deltas = [
        stream.add(part) for part in ("<tool_call>", '{"name": "f", ', '"arguments": {"a"', ": 1", "}}")
    ]
    assert [[(c.name, c.arguments) for c in delta.tool_calls] for delta in deltas] == [
        [], [], [("f", '{"a"')], [("", ": 1")], [("", "}")],
    ]  # fmt: skip


def test_a_cut_call_has_its_arguments_so_far() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": "b'
    content, calls = joined("hermes", [text])
    assert (content, [(c["name"], c["arguments"]) for c in calls]) == ("", [("f", '{"a": "b')])


def test_ids_of_calls_have_the_form_that_the_style_needs() -> None:
    for parser in TOOL_CALL_PARSERS:
        _, calls = joined(parser, [write_calls(parser, [("f", {}), ("g", {})])])
        ids = [call["id"] for call in calls]
        assert len(set(ids)) == 2
        pattern = {"mistral": "[A-Za-z0-9]{9}", "kimi_k2": r"functions\.[fg]:[01]"}.get(
            parser, "call_[0-9a-f]{24}"
        )
        assert all(re.fullmatch(pattern, each) for each in ids)


def test_an_unknown_parser_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"'llama4'.*llama3_json, hermes, mistral, json"):
        tool_call_stream("llama4")


def test_markers_may_be_special_tokens() -> None:
    """Mistral's marker is a special token, so it is missing in a text without special tokens."""
    plain = tiny_tokenizers.tokenizer("byte_level")
    file = json.loads(tiny_tokenizers.backend("byte_level").to_str())
    for token in ("[TOOL_CALLS]", "</think>"):
        file["added_tokens"].append(
            {**file["added_tokens"][0], "id": 1000, "content": token, "special": True}
        )
        tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(file)))
        assert needs_special_tokens(tokenizer, "mistral", "")
        assert not needs_special_tokens(tokenizer, "hermes", "")
        assert needs_special_tokens(tokenizer, "hermes", "think") is (token == "</think>")
        assert not needs_special_tokens(plain, "mistral", "think")


KEYS = st.from_regex("[a-z_]{1,5}", fullmatch=True)  # in some formats keys are names
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(KEYS, VALUES, max_size=3)
CALLS = st.lists(
    st.tuples(st.from_regex("[a-z_][a-z_.-]{0,7}", fullmatch=True), ARGUMENTS),
    min_size=1,
    max_size=3,
)  # fmt: skip


@given(st.sampled_from(TOOL_CALL_PARSERS), CALLS, st.sampled_from([None, 1]), st.data())
@settings(max_examples=60, deadline=None)
def test_written_calls_are_parsed_in_any_pieces(
    parser: str, calls: list[tuple[str, dict[str, Any]]], indent: int | None, data: st.DataObject
) -> None:
    text = write_calls(parser, calls, indent)
    assert read(parser, cut(text, data), tools=tools_of(calls)) == Answer("", tuple(calls))


ANY_KEYS = st.dictionaries(
    st.text(max_size=4), VALUES | st.dictionaries(st.text(max_size=4), VALUES), max_size=3
)


@given(st.sampled_from(JSON_PARSERS), ANY_KEYS, st.sampled_from([None, 1]), st.data())
@settings(max_examples=60, deadline=None)
def test_json_arguments_may_have_any_keys(
    parser: str, arguments: dict[str, Any], indent: int | None, data: st.DataObject
) -> None:
    calls = [("f", arguments), ("g", arguments)]
    assert read(parser, cut(write_calls(parser, calls, indent), data)) == Answer("", tuple(calls))


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "[ARGS]", "[CALL_ID]", "[", "]", "{", "}",
    ",", ";", " ", "\n", '"', "\\", ":", "a", "name", '{"name": "f", ', '"arguments": {', '"parameters": ',
    '"x": 1}', "<", '{"name": "f", "arguments": {"a": "}"}}', '{"name": "g", "parameters": {}}', '"id": "7", ',
    "null", "é", "f{}", "[f(a=1", "f(", ")]", "<function=f>", "<parameter=a>", "</parameter>", "</function>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", '<|"|>', "<|tool_call>", "<tool_calls>",
    "</tool_calls>", "call:f{",
]  # fmt: skip


@given(
    st.sampled_from(TOOL_CALL_PARSERS),
    st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join),
    st.booleans(),
    st.data(),
)
@settings(max_examples=examples(fast=100, all=250), deadline=None)
def test_calls_do_not_depend_on_how_the_text_is_divided(
    parser: str, text: str, forced: bool, data: st.DataObject
) -> None:
    whole = joined(parser, [text], forced)
    assert without_ids(joined(parser, cut(text, data), forced)) == without_ids(whole)
    assert without_ids(joined(parser, list(text), forced)) == without_ids(whole)
    content, calls = whole
    if not calls:
        assert content == text
    # Every character of the content and of a call's arguments is in the text, in the same order.
    assert is_subsequence(content, text)
    for call in calls:
        assert call["arguments"] in text or json.loads(call["arguments"]) is not None


def cut(text: str, data: st.DataObject) -> list[str]:
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)])]


def without_ids(answer: tuple[str, Sequence[dict[str, str]]]) -> Any:
    return answer[0], [(call["name"], call["arguments"]) for call in answer[1]]


def is_subsequence(part: str, text: str) -> bool:
    rest = iter(text)
    return all(character in rest for character in part)


@given(st.sampled_from(TOOL_CALL_PARSERS), CALLS, st.integers(0, 400), st.booleans())
@settings(max_examples=examples(fast=60, all=150), deadline=None)
def test_a_cut_call_leaves_no_content(
    parser: str, calls: list[tuple[str, dict[str, Any]]], length: int, forced: bool
) -> None:
    """Cut anywhere: a call that has not begun is dropped, except for a single character."""
    text = write_calls(parser, calls)
    if forced:
        text = text.removeprefix(forced_prefix(parser))
    stream = tool_call_stream(parser, forced)
    deltas = [stream.add(text[:length]), stream.finish(is_cut=True)]
    assert len("".join(delta.content for delta in deltas)) <= 1


@pytest.mark.parametrize("parser", TOOL_CALL_PARSERS)
def test_calls_cut_at_every_character_leave_no_content(parser: str) -> None:
    text = write_calls(parser, [("a", {}), ("f", {"k": "v"})])
    for length in range(len(text) + 1):
        stream = tool_call_stream(parser)
        deltas = [stream.add(text[:length]), stream.finish(is_cut=True)]
        assert len("".join(delta.content for delta in deltas)) <= 1, text[:length]


@pytest.mark.parametrize(
    ("parser", "text", "content"),
    [
        ("hermes", 'See. <tool_call>\n{"name": "f", "arg', "See."),
        ("hermes", "See. <tool_", "See."),
        ("hermes", "1 <", "1 <"),
        ("hermes", "<tool_call>\nsearch()", "<tool_call>\nsearch()"),
        ("mistral", "[TOOL_CALLS]weath", ""),
        ("mistral", 'a [TOOL_CALLS] [{"na', "a"),
        ("llama3_json", '{"name": "f", "parameters"', ""),
        ("llama3_json", '{"na', ""),
        ("llama3_json", '{"name": "Ada", "bo', '{"name": "Ada", "bo'),
        ("llama3_json", '{"nation', '{"nation'),
        ("llama3_json", "{", "{"),
        ("json", '[{"name": "f"', ""),
        ("json", '[{"title": "f"', '[{"title": "f"'),
    ],
)
def test_an_incomplete_call_that_is_cut_is_content(parser: str, text: str, content: str) -> None:
    stream = tool_call_stream(parser)
    deltas = [stream.add(text), stream.finish(is_cut=True)]
    assert "".join(delta.content for delta in deltas).rstrip() == content
    assert not any(delta.tool_calls for delta in deltas)


@given(st.sampled_from(TOOL_CALL_PARSERS), CALLS, st.data())
@settings(max_examples=60, deadline=None)
def test_a_delta_has_one_entry_for_each_call(
    parser: str, calls: list[tuple[str, dict[str, Any]]], data: st.DataObject
) -> None:
    """Clients join several entries of a chunk with one index in different ways, and lose some."""
    stream = tool_call_stream(parser, tools=tools_of(calls))
    deltas = [*map(stream.add, cut(write_calls(parser, calls), data)), stream.finish()]
    for delta in (*deltas, ChatDelta.joined(deltas)):
        indices = [call.index for call in delta.tool_calls]
        assert len(set(indices)) == len(indices)
    whole = ChatDelta.joined(deltas).tool_calls
    assert [(call.name, json.loads(call.arguments)) for call in whole] == calls

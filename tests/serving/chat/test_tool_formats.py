"""Every format's calls: rendered by a template, detected, and parsed back in any pieces."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.serving.chat.template import ChatTemplate
from inflight.serving.chat.template_environment import compile_template, render_bounded
from inflight.serving.chat.template_files import TemplateFiles
from inflight.serving.chat.tool_format_table import TOOL_CALL_PARSERS, TOOL_FORMATS
from inflight.serving.chat.tool_formats import ArgumentStyle
from inflight.serving.chat.tool_values import read_bare_keys, read_python, read_tagged
from tests.serving.chat.answers import Answer, Call, joined, read, tools_of, with_bare_keys, write_calls
from tests.serving.chat.tool_templates import TOOL_TEMPLATES
from tests.tiers import examples

CALLS: list[Call] = [
    (
        "get_weather",
        {
            "city": 'Zürich "old" town, {a: [1, 2)}',
            "note": "two\nlines, </tool> and 'marks' \\ <|end|>",
            "days": 3,
            "exact": 1.5,
            "again": True,
            "none": None,
            "class": {"a": [1, {"b": "}"}], "c": {}},
        },
    ),
    ("time", {}),
    ("get_weather", {"city": "123", "days": -1}),
]


def rendered(parser: str, calls: list[Call], in_python: Callable[[Any], str] = repr) -> str:
    """Render calls by a template's part. Values in Python's syntax and with bare keys are written here."""
    source = TOOL_TEMPLATES[parser].replace("v | python", "python(v)")
    source = source.replace("c.arguments | bare(", "bare(c.arguments, ")
    return render_bounded(
        compile_template(source),
        {
            "calls": [{"name": name, "arguments": values} for name, values in calls],
            "ids": [f"functions.{name}:{index}" for index, (name, _) in enumerate(calls)],
            "python": in_python,
            "bare": with_bare_keys,
        },
    )


def test_there_are_thirty_formats_with_a_template_each() -> None:
    assert set(TOOL_TEMPLATES) == set(TOOL_CALL_PARSERS) and len(TOOL_CALL_PARSERS) >= 30


@pytest.mark.parametrize("parser", TOOL_CALL_PARSERS)
def test_a_rendered_call_is_parsed_back(parser: str) -> None:
    text = rendered(parser, CALLS)
    wanted = Answer("", tuple(CALLS))
    assert read(parser, [text], tools=tools_of(CALLS)) == wanted
    assert read(parser, list(text), tools=tools_of(CALLS)) == wanted


@pytest.mark.parametrize("parser", TOOL_CALL_PARSERS)
def test_a_template_is_detected_by_its_calls(parser: str) -> None:
    part = TOOL_TEMPLATES[parser]
    part = part.replace("v | python", "v | tojson")
    if TOOL_FORMATS[parser].arguments is ArgumentStyle.BARE_KEYS:
        quote = TOOL_FORMATS[parser].quote
        begin = part.index("{{ c.arguments | bare(")
        end = part.index("}}", begin) + 2
        bare = "{" + f"pr0be_key:{quote}{{{{ c.arguments.pr0be_key }}}}{quote}" + "}"
        part = part[:begin] + bare + part[end:]
    source = (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}"
        "{% if m.tool_calls %}{% set calls = m.tool_calls | map(attribute='function') | list %}"
        "{% set ids = m.tool_calls | map(attribute='id') | list %}PART{% endif %}"
        "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    ).replace("PART", part)
    template = ChatTemplate(TemplateFiles({"default": source}, {}, "test"))
    assert template.style == parser


@pytest.mark.parametrize("parser", TOOL_CALL_PARSERS)
def test_content_around_calls_is_kept(parser: str) -> None:
    text = write_calls(parser, CALLS[:2])
    before = "See [1] {a}.\n" if TOOL_FORMATS[parser].needs_marker else ""
    for pieces in ([before + text + "\nDone."], list(before + text + "\nDone.")):
        answer = read(parser, pieces, tools=tools_of(CALLS))
        assert answer == Answer(before.strip() + "Done.", tuple(CALLS[:2]))


@pytest.mark.parametrize("parser", TOOL_CALL_PARSERS)
@given(st.integers(0, 600))
@settings(max_examples=examples(fast=15, all=60), deadline=None)
def test_an_unfinished_call_gives_the_same_in_any_pieces(parser: str, length: int) -> None:
    text = write_calls(parser, CALLS)[:length]

    def parts(pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
        content, calls = joined(parser, pieces, tools=tools_of(CALLS))
        return content, [(call["name"], call["arguments"]) for call in calls]

    assert parts([text]) == parts(list(text))


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("pythonic", "[see (a)]"),
        ("pythonic", "[f(1)]"),
        ("lfm2", "<|tool_call_start|>[f(a=g())]<|tool_call_end|>"),
        ("olmo3", "<function_calls>f(**a)</function_calls>"),
        ("gemma4", "<|tool_call>call:f{a:b}<tool_call|>"),
        ("glm45", "<tool_call>f and g</tool_call>"),
        ("qwen3_coder", "<tool_call>\nsearch()\n</tool_call>"),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.f{}"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜> none"),
    ],
)
def test_a_text_that_is_no_call_is_content(parser: str, text: str) -> None:
    assert read(parser, [text]) == read(parser, list(text)) == Answer(text, ())


def test_values_between_tags_have_the_types_of_the_schema() -> None:
    cases: list[tuple[str, dict[str, Any] | None, Any]] = [
        ("12", {"type": "string"}, "12"),
        ("12", {"type": "integer"}, 12),
        ("12", {"type": "number"}, 12),
        ("True", {"type": "boolean"}, True),
        ("null", {"type": ["string", "null"]}, None),
        ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("x", {"type": "integer"}, "x"),
        ("2", {"enum": ["1", "2"]}, "2"),
        ('{"a": 1}', None, {"a": 1}),
        ("text", None, "text"),
        ("NaN", {"type": "number"}, "NaN"),
    ]
    for text, schema, value in cases:
        assert json.dumps(read_tagged(text, schema)) == json.dumps(value), (text, schema)


def test_bare_keys_may_have_values_as_the_template_of_gemma_writes_them() -> None:
    text = '{a:None,b:[True,false],c:<|"|>None<|"|>,d:{e:1.5}}'
    wanted = {"a": None, "b": [True, False], "c": "None", "d": {"e": 1.5}}
    assert read_bare_keys(text, '<|"|>') == wanted
    assert read_bare_keys("{a:Nothing}", '<|"|>') is None


def test_python_calls_may_have_json_names_keywords_and_line_ends() -> None:
    assert read_python('class=true, b=None, c="a = 1\nd")') == {"class": True, "b": None, "c": "a = 1\nd"}
    for text in ("1)", "a=b)", "a=1", "**a)", "a={1: 2})"):
        assert read_python(text) is None

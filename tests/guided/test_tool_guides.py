"""Enforced tool calls: random models' texts under the guides are parsed, and valid by jsonschema."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from inflight.core.request.guide import Guide, GuideKind
from inflight.core.request.stop import FinishReason
from inflight.errors import InvalidArgument
from inflight.guided.backend import GuideBackend
from inflight.serving.chat.argument_fields import is_writable
from inflight.serving.chat.reasoning import reasoning_stream
from inflight.serving.chat.tool_format_table import TOOL_CALL_PARSERS, TOOL_FORMATS
from inflight.serving.chat.tool_guides import forced_parser, forced_prefix, tool_guide
from tests.engine.serving import config_of, serve
from tests.guided.at_random import make_schema
from tests.guided.factories import (
    check_tokens,
    load,
    make_request,
    text_of,
    tiny_backend,
    tiny_grammars,
    tiny_vocabulary,
)
from tests.models.zoo import Zoo
from tests.serving.chat.answers import Answer, Call, read, write_calls
from tests.serving.chat.test_tool_formats import rendered
from tests.tiers import with_all

# The tiny vocabulary has ASCII only.
JSON_PARSERS = tuple(name for name, form in TOOL_FORMATS.items() if form.has_json and form.begin.isascii())

NESTED = {
    "type": "object",
    "properties": {"point": {"$ref": "#/$defs/Point"}},
    "required": ["point"],
    "additionalProperties": False,
    "$defs": {
        "Point": {
            "type": "object",
            "properties": {"x": {"enum": [1, 2]}, "of": {"$ref": "#/$defs/Kind", "description": "which"}},
            "required": ["x", "of"],
            "additionalProperties": False,
        },
        "Kind": {"enum": ["a", "b"], "title": "Kind"},
    },
}


def make_tools(seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    schemas = [NESTED, None]
    while len(schemas) < 4:
        schema = make_schema(rng, 2)
        # xgrammar's strings with a maxLength have no escapes, and may have tabs in them.
        if schema.get("type") == "object" and "maxLength" not in json.dumps(schema):
            schemas.append(schema)
    rng.shuffle(schemas)
    return [
        {"type": "function", "function": {"name": f"tool_{index}", **({"parameters": each} if each else {})}}
        for index, each in enumerate(schemas)
    ]


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def check(tools: list[dict[str, Any]], answer: Answer, only: str = "", at_most: int = 1000) -> None:
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
    assert answer.content == ""
    assert 1 <= len(answer.calls) <= at_most
    for name, arguments in answer.calls:
        assert not only or name == only
        schema = {"maxProperties": 0} if schemas[name] is None else schemas[name]
        jsonschema.Draft202012Validator(schema).validate(arguments)


@pytest.mark.parametrize("name", ["llguidance", "xgrammar"])
def test_enforced_calls_of_a_random_model_are_valid(zoo: Zoo, name: str) -> None:
    pytest.importorskip("xgrammar", reason="the other library is not installed")
    model = zoo["llama-gqa"]
    cases: dict[int, tuple[str, Any, bool, list[dict[str, Any]]]] = {}
    for number in range(24):
        parser = TOOL_CALL_PARSERS[number % 4]
        choice = "required" if number % 3 else named("tool_2")
        cases[number] = (parser, choice, number % 2 == 0, make_tools(number))
    guides = {
        n: tool_guide(tools, choice, parser, many) for n, (parser, choice, many, tools) in cases.items()
    }
    requests = [
        make_request(n, model.prompt(4, n), guide, num_tokens=240, sampling={"temperature": 0.7})
        for n, guide in guides.items()
    ]
    engine = load(model.folder, 2048, 40, make_grammars=lambda size: tiny_grammars(size, name))
    served = serve(engine, config_of("no-evict"), requests, per_iteration=8)
    num_ended = 0
    for n, (parser, choice, many, tools) in cases.items():
        has_ended = served.result(n).finish_reasons[0] is FinishReason.END_ID
        guide = guides[n]
        assert guide is not None
        if (
            name == "llguidance"
        ):  # which allows forced texts only in long tokens, so it cannot check the other library's
            check_tokens(tiny_backend("xgrammar"), tiny_vocabulary(), guide, served.tokens(n), has_ended)
        if has_ended:
            num_ended += 1
            text = text_of(tiny_vocabulary(), served.tokens(n))
            only = "tool_2" if choice != "required" else ""
            answer = read(parser, [text], forced=True)
            check(tools, answer, only, 1000 if many and not only else 1)
            assert read(parser, list(forced_prefix(parser) + text)) == answer
    assert num_ended > 12


def longest_tokens(text: str) -> list[int]:
    """Return a text's ids, longest tokens first, the only ones that llguidance allows for forced texts."""
    tokens = {token: index for index, token in enumerate(tiny_vocabulary().tokens) if token and index > 2}
    ids: list[int] = []
    left = text.encode()
    while left:
        size = max(size for size in range(1, 7) if left[:size] in tokens)
        ids.append(tokens[left[:size]])
        left = left[size:]
    return ids


def allows(backend: GuideBackend, guide: Guide, text: str) -> bool:
    """Whether a guide allows a text and its end there."""
    ids = longest_tokens(text)
    try:
        check_tokens(backend, tiny_vocabulary(), guide, ids, has_ended=True)
    except (AssertionError, InvalidArgument):
        return False
    return True


@pytest.mark.parametrize("name", ["llguidance", "xgrammar"])
@pytest.mark.parametrize("parser", with_all(JSON_PARSERS, TOOL_CALL_PARSERS[:4]))
def test_a_tool_guide_allows_exactly_the_calls_of_its_tools(name: str, parser: str) -> None:
    if name == "xgrammar":
        pytest.importorskip("xgrammar", reason="the other library is not installed")
    backend = tiny_backend(name)
    tools = make_tools(7)
    point = next(t["function"]["name"] for t in tools if t["function"].get("parameters") is NESTED)
    call = (point, {"point": {"x": 1, "of": "b"}})
    form = TOOL_FORMATS[parser]
    ends_after_call = bool(form.reasoning_parser)  # by the end of its only call, which is a token of its own
    several = (call,) if ends_after_call else (call, call)

    def text(*calls: tuple[str, dict[str, Any]]) -> str:
        written = write_calls(parser, calls).removeprefix(forced_prefix(parser))
        return written.removesuffix(form.end) if ends_after_call else written

    required = tool_guide(tools, "required", parser)
    one = tool_guide(tools, "required", parser, parallel=False)
    only = tool_guide(tools, named(point), parser)
    behind = tool_guide(tools, "required", parser, starts_inside_reasoning=True)
    assert required and one and only and behind
    for guide in (required, one, only):
        assert allows(backend, guide, text(call))
        assert not allows(backend, guide, "Hello.")
        assert not allows(backend, guide, text((point, {"point": {"x": 3, "of": "b"}})))
        assert not allows(backend, guide, text(("unknown", {})))
        assert not allows(backend, guide, "hm </think>\n" + text(call))
    assert allows(backend, required, text(call, call)) != ends_after_call
    assert not allows(backend, one, text(call, call))
    assert not allows(backend, only, text(call, call))
    thought = "Is it <tool_call>? [1] </thin </think>\n\n" + text(*several)
    assert allows(backend, behind, thought)
    assert not allows(backend, behind, thought + " </think>")
    assert not allows(backend, behind, "No end of this." + text(call))
    stream = reasoning_stream("think", starts_inside=True)
    reasoning, content = stream.add(thought)
    assert (reasoning, read(parser, [content], forced=True).calls) == (
        "Is it <tool_call>? [1] </thin",
        several,
    )


WRITTEN_PARSERS = tuple(
    name for name, form in TOOL_FORMATS.items() if is_writable(form) and form.begin.isascii()
)
TRIP = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "a city"},
        "days": {"type": "integer", "minimum": 1},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/Tag"}, "maxItems": 2},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "kind": {"enum": [1, None]},
    },
    "required": ["days"],
    "$defs": {"Tag": {"enum": ["a", "b]"]}},
}


def trips() -> list[dict[str, Any]]:
    functions = [
        {"name": "trip", "parameters": TRIP},
        {"name": "now"},
        {"name": "all", "parameters": {**TRIP, "required": list(TRIP["properties"])}},
        {"name": "any", "parameters": {**TRIP, "required": []}},
    ]
    return [{"type": "function", "function": each} for each in functions]


@pytest.mark.parametrize("name", ["llguidance", "xgrammar"])
@pytest.mark.parametrize("parser", WRITTEN_PARSERS)
def test_arguments_that_are_not_json_are_forced_as_templates_write_them(name: str, parser: str) -> None:
    if name == "xgrammar":
        pytest.importorskip("xgrammar", reason="the other library is not installed")
    backend, tools = tiny_backend(name), trips()

    def text(*calls: Call) -> str:
        return rendered(parser, list(calls), json.dumps).removeprefix(forced_prefix(parser)).rstrip()

    assert forced_parser(parser, tools) == parser
    required = tool_guide(tools, "required", parser)
    only = tool_guide(tools, named("trip"), parser)
    assert required and only
    valid: list[Call] = [
        ("trip", {"days": 3}),
        ("trip", {"city": "x (y) </b>", "days": 12}),
        ("trip", {"days": 3, "tags": ["b]", "a"], "note": "two, lines"}),
        ("trip", {"city": "12", "days": 1, "tags": [], "note": None, "kind": None}),
        ("now", {}),
        ("all", {"city": "", "days": 1, "tags": [], "note": "", "kind": 1}),
        ("any", {}),
        ("any", {"kind": 1}),
    ]
    for call in valid:
        assert allows(backend, required, text(call)), call
        assert read(parser, [text(call)], forced=True, tools=tools).calls == (call,)
        assert allows(backend, only, text(call)) is (call[0] == "trip")
    assert allows(backend, required, text(*valid[:3]))
    assert not allows(backend, only, text(valid[0], valid[0]))
    invalid: list[Call] = [
        ("trip", {}),
        ("trip", {"days": 0}),
        ("trip", {"days": "3 days"}),
        ("trip", {"days": 3, "tags": ["c"]}),
        ("trip", {"days": 3, "other": 1}),
        ("all", {"days": 1}),
        ("unknown", {}),
    ]
    for call in invalid:
        assert not allows(backend, required, text(call)), call


@pytest.mark.parametrize("parser", WRITTEN_PARSERS)
def test_calls_of_a_random_model_that_are_not_json_are_valid(zoo: Zoo, parser: str) -> None:
    model = zoo["llama-gqa"]
    numbers = {name: each for name, each in TRIP["properties"].items() if name not in ("city", "note")}
    short = {"type": "object", "properties": numbers, "required": ["kind"], "$defs": TRIP["$defs"]}
    tools = [{"type": "function", "function": {"name": "trip", "parameters": short}}, *trips()[1:2]]
    guide = tool_guide(tools, "required", parser)
    requests = [
        make_request(n, model.prompt(4, n), guide, num_tokens=250, sampling={"temperature": 0.7})
        for n in range(1, 5)
    ]
    engine = load(model.folder, 2048, 40, make_grammars=lambda size: tiny_grammars(size, "llguidance"))
    served = serve(engine, config_of("no-evict"), requests, per_iteration=8)
    for request in requests:
        result = served.result(request.request_id)
        if result.finish_reasons[0] is FinishReason.END_ID:
            text = text_of(tiny_vocabulary(), served.tokens(request.request_id))
            check(tools, read(parser, [text], forced=True, tools=tools))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "a+"},
        {"type": "string", "maxLength": 3},
        {"enum": ["1", 1]},
        {"enum": ["a", "b"]},
        {"$ref": "#/$defs/Name"},
        {"oneOf": [{"type": "string"}, {"type": "integer"}]},
        {"type": ["string", "integer"], "minimum": 3},
    ],
)
def test_schemas_that_tags_cannot_express_are_forced_in_json(schema: dict[str, Any]) -> None:
    parameters = {"type": "object", "properties": {"a": schema}, "$defs": {"Name": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    assert forced_parser("qwen3_coder", tools) == "json" and forced_parser("lfm2", tools) == "lfm2"
    for broken in ({"minProperties": 1}, {"required": ["b"]}, {"properties": {"a b": {}}}):
        tools = [{"type": "function", "function": {"name": "f", "parameters": {**parameters, **broken}}}]
        assert forced_parser("lfm2", tools) == "json"
    for parser in ("gemma4", ""):
        assert forced_parser(parser, []) == "json"


@pytest.mark.parametrize(
    ("guide", "field"),
    [
        ({"structures": [{"begin": "a", "schema": {}, "end": ""}], "sequence": {"first": "x"}}, "first"),
        ({"structures": [{"begin": "a", "schema": {}, "end": ""}], "sequence": {"only_one": 1}}, "only_one"),
        ({"structures": [{"begin": "a", "schema": {}, "end": ""}], "sequence": {"end": None}}, "None"),
        (
            {"structures": [{"begin": "a", "schema": {}, "end": ""}], "sequence": {}, "triggers": ["a"]},
            "both",
        ),
        ({"structures": [], "sequence": {}}, "at least one"),
    ],
)
def test_sequences_of_another_shape_are_refused(guide: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument, match=field):
        tiny_backend().compile(Guide(GuideKind.STRUCTURAL_TAG, json.dumps(guide)))

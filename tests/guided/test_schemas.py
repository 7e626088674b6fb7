"""JSON schemas of pydantic, zod and people: the texts that their guides allow, and refusals."""

from __future__ import annotations

import json
from datetime import date
from enum import Enum
from typing import Annotated, Any, Literal
from uuid import UUID

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel, Field, TypeAdapter

from inflight.core.request.guide import Guide, GuideKind
from inflight.errors import InvalidArgument
from inflight.guided.backend import GuideBackend, MaskJob, Matcher
from inflight.guided.make_backend import make_backend
from inflight.guided.schemas import matching, overlap
from inflight.serving.chat.tool_guides import tool_guide
from tests.guided.schemas_at_random import BYTES, follows, write


@pytest.fixture(scope="module")
def backend() -> GuideBackend:
    return make_backend("llguidance", BYTES)


def compiled(backend: GuideBackend, schema: Any) -> Matcher:
    guide = Guide(GuideKind.JSON_SCHEMA, json.dumps(schema))
    return backend.load(guide, backend.compile(guide))


def text_of(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def allowed(backend: GuideBackend, schema: Any, *values: Any) -> list[Any]:
    """Return the values that a guide allows."""
    matcher = compiled(backend, schema)
    return [value for value in values if follows(matcher, text_of(value))]


def refusal_of(backend: GuideBackend, schema: Any) -> str:
    with pytest.raises(InvalidArgument) as found:
        compiled(backend, schema)
    return str(found.value).removeprefix("guided_decoding_guide cannot be used: ")


@pytest.mark.parametrize(
    "keywords",
    [
        {"type": "object", "propertyNames": {"type": "string"}},
        {"type": "object", "propertyNames": {}, "unevaluatedProperties": True},
        {"type": "object", "minContains": 0, "x-order": 3, "nullable": True, "deprecated": True},
        *(
            {"format": name}
            for name in ("password", "path", "base64", "jwt", "cuid", "date-time-local", "ipvanyaddress")
        ),
        {"uniqueItems": False, "unevaluatedItems": True, "contentSchema": {"type": "integer"}},
        {"contains": {"type": "integer"}, "minContains": 0, "$comment": "c", "examples": [{"not": {}}]},
        {"if": {"contains": {}}, "example": {"$ref": "#/nowhere"}, "x-guide": {"format": 3}},
    ],
)
def test_keywords_without_an_effect_are_accepted(backend: GuideBackend, keywords: dict[str, Any]) -> None:
    value: Any = {"a": "b"} if keywords.get("type") == "object" else "any text"
    assert allowed(backend, keywords, value, [1, 1], 3)[0] == value


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        (
            "date",
            ["2024-02-29", "2000-02-29", "1999-12-31"],
            ["2023-02-29", "1900-02-29", "2024-04-31", "0000-01-01"],
        ),
        (
            "date-time",
            ["2024-02-29T23:59:59Z", "2023-01-01T00:00:00.5+02:00"],
            ["2023-02-29T00:00:00Z", "2023-01-01"],
        ),
        ("time", ["12:00:00Z"], ["24:00:00Z", "12:00:00", "12:00:61Z"]),
        ("duration", ["P1DT2H", "P4W", "PT5M"], ["P", "PT", "P1D2H", "1D"]),
        ("email", ["a.b@example.com"], [".a@b.c", "a..b@c.d", "a@-b.c", "a"]),
        ("hostname", ["a-b.example.com", "localhost"], ["-a.b", "a..b", "a_b", ""]),
        ("ipv4", ["192.168.0.1"], ["256.0.0.1", "1.2.3", "01.2.3.4"]),
        (
            "ipv6",
            ["::1", "1:2:3:4:5:6:7:8", "::ffff:1.2.3.4", "fe80::1"],
            ["1:2:3", "1::2::3", ":1", "12345::"],
        ),
        ("uuid", ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567e89b12d3a456426614174000"]),
        ("uri", ["https://a.b/c?d=e#f", "mailto:a@b.c", "urn:x:y"], ["/a", "a b", "http://a\\b"]),
        ("uri-reference", ["/a/b?c", "../x", "#f", "http://a"], ["a b", "\\"]),
        ("regex", ["^a+b*$", r"(?:\d{2}|[a-z])?", ""], ["(a", "a**", "[", "a)"]),
        ("json-pointer", ["", "/a/~1b"], ["a", "/~2"]),
    ],
)
def test_known_formats_allow_exactly_the_valid_texts(
    backend: GuideBackend, name: str, right: list[str], wrong: list[str]
) -> None:
    for schema in ({"type": "string", "format": name}, {"format": name}):
        assert allowed(backend, schema, *right, *wrong) == right
    assert allowed(backend, {"format": name}, 3, [None]) == [3, [None]]


@pytest.mark.parametrize(
    ("draft", "schema", "right", "wrong"),
    [
        ("draft-03", {"type": "integer", "divisibleBy": 50, "minimum": 1, "maximum": 99}, [50], [13, 23, 21]),
        ("draft-03", {"disallow": ["string", "null"]}, [1, []], ["a", None]),
        ("draft-03", {"extends": {"minimum": 3}, "type": "integer"}, [3], [2]),
        ("draft-03", {"properties": {"a": {"required": True}}}, [{"a": 1}], [{}, {"b": 1}]),
        (
            "draft-03",
            {"type": ["integer", {"properties": {"a": {"type": "null"}}, "type": "object"}]},
            [1],
            [{"a": 1}],
        ),
        ("draft-04", {"minimum": 3, "exclusiveMinimum": True, "type": "integer"}, [4], [3]),
        (
            "draft-04",
            {"items": [{"type": "null"}], "additionalItems": False},
            [[None], []],
            [[1], [None, None]],
        ),
        ("draft-06", {"const": 3, "if": False}, [3], [4]),
        (
            "draft-07",
            {"dependencies": {"a": ["b"], "c": {"required": ["d"]}}},
            [{"b": 1}],
            [{"a": 1}, {"c": 1}],
        ),
        (
            "draft-07",
            {"definitions": {"a": {"type": "null"}}, "$ref": "#/definitions/a", "const": 1},
            [None],
            [1],
        ),
        ("", {"divisibleBy": 2, "type": "integer"}, [2], [3]),
        ("", {"definitions": {"a": {"type": "null"}}, "$ref": "#/definitions/a", "const": None}, [None], [1]),
    ],
)
def test_keywords_of_every_json_schema_version_are_followed(
    backend: GuideBackend, draft: str, schema: dict[str, Any], right: list[Any], wrong: list[Any]
) -> None:
    named = {"$schema": f"http://json-schema.org/{draft}/schema#"} if draft else {}
    assert allowed(backend, {**named, **schema}, *right, *wrong) == right


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (
            {"oneOf": [{"required": ["a"]}, {"required": ["b"]}], "type": "object"},
            [{"a": 1}, {"b": 1}],
            [{"a": 1, "b": 1}, {}],
        ),
        ({"oneOf": [{"type": "string"}, {"enum": ["a", 1]}]}, ["b", 1], ["a"]),
        (
            {"oneOf": [{"items": {"type": kind}, "type": "array"} for kind in ("string", "null")]},
            [["a"], [None, None]],
            [[], ["a", None]],
        ),
        ({"oneOf": [{"type": ["string", "null"]}, {"type": ["null", "boolean"]}]}, ["a", True], [None]),
        (
            {
                "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
                "$defs": {
                    "cat": {"properties": {"kind": {"const": "cat"}}, "required": ["kind"], "type": "object"},
                    "dog": {
                        "properties": {"kind": {"enum": ["dog"]}},
                        "required": ["kind"],
                        "type": "object",
                    },
                },
            },
            [{"kind": "cat"}, {"kind": "dog"}],
            [{"kind": "cow"}],
        ),
        (
            {"oneOf": [{"maximum": 3, "type": "integer"}, {"exclusiveMinimum": 3, "type": "integer"}]},
            [3, 4],
            ["a"],
        ),
        ({"not": {"enum": ["a", "ab", 1, None]}}, ["abc", "", 2, True], ["a", "ab", 1, None]),
        ({"type": "object", "not": {"required": ["a"]}}, [{}, {"b": 1}], [{"a": 1}]),
        (
            {"if": {"properties": {"k": {"const": 1}}, "required": ["k"]}, "then": {"required": ["z"]}},
            [{"k": 1, "z": 2}, {"k": 2}, {}],
            [{"k": 1}],
        ),
        (
            {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True},
            [["b", "a"], []],
            [["a", "a"]],
        ),
        ({"type": "array", "uniqueItems": True, "maxItems": 1}, [[1]], [[1, 1]]),
        (
            {
                "properties": {"a": {"$ref": "#/$defs/a"}},
                "$defs": {"a": {"type": "array", "uniqueItems": True}},
            },
            [{"a": ["x", "xy", 1, 12, [1], {"b": 1}, True], "b": [1, 1]}, {"a": [[1, 1]]}],
            [{"a": ["x", "x"]}, {"a": [12, 12.0]}, {"a": [{"b": 1, "c": 2}, 3, {"c": 2, "b": 1}]}],
        ),
        (
            {"type": "array", "uniqueItems": True, "items": {"enum": [f"v{n}" for n in range(20)]}},
            [["v3", "v1", "v19"], []],
            [["v3", "v1", "v3"]],
        ),
        (
            {"type": "array", "contains": {"const": 7}, "items": {"type": "integer"}},
            [[7], [7, 1, 7]],
            [[], [1]],
        ),
        (
            {"type": "array", "contains": {"const": 7}, "minContains": 2, "maxContains": 2},
            [[7, 7], [7, 7, 1]],
            [[7], [7, 7, 7], [7, 1]],
        ),
        ({"contains": {"const": 7}, "maxContains": 0}, [7, {}], [[7], [], [1]]),
        (
            {
                "oneOf": [
                    {
                        "type": "object",
                        "properties": {name: {"type": "string"}},
                        "additionalProperties": False,
                    }
                    for name in ("cmd", "ps", "sh")
                ]
            },
            [{"cmd": "a"}, {"ps": "a"}],
            [{}, {"cmd": "a", "ps": "b"}],
        ),
        (
            {"oneOf": [{"properties": {"type": {"const": name}, "x": {}}} for name in ("http", "ipmi")]},
            [{"type": "http"}, {"type": "ipmi", "x": 1}],
            [{}, {"x": 1}, []],
        ),
        (
            {"oneOf": [{"required": ["path"]}, {"not": {"required": ["path"]}, "properties": {"path": {}}}]},
            [{"path": 1}, {}],
            [],
        ),
        ({"type": "object", "propertyNames": {"enum": ["a", "b"]}}, [{"a": 1, "b": 2}, {}], [{"c": 1}]),
        ({"type": "object", "propertyNames": {"pattern": "^x-"}}, [{"x-a": 1}], [{"a": 1}]),
        (
            {
                "type": "object",
                "properties": {"a": {}, "b": {}},
                "minProperties": 1,
                "additionalProperties": False,
            },
            [{"a": 1}, {"b": 1}],
            [{}],
        ),
        (
            {"allOf": [{"properties": {"a": {}}}], "properties": {"b": {}}, "unevaluatedProperties": False},
            [{"b": 1}],
            [{"c": 1}],
        ),
        (
            {"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 3},
            [{"a": 1, "b": 1, "c": 1}],
            [{"a": 1, "b": 1}, {"a": 1, "c": 1}],
        ),
        (
            {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2},
            [{"a": 1, "b": 1}, {"b": 1, "d": 1}],
            [{"a": 1}, {"d": 1}],
        ),
        (
            {"properties": {"a": {}, "a1": {}}, "propertyNames": {"pattern": r"^\w$"}, "type": "object"},
            [{"a": 1}, {"b": 1}],
            [{"a1": 1}],
        ),
        ({"oneOf": [{"enum": ["ab"]}, {"pattern": "^(a+)+$", "type": "string"}]}, ["ab", "aa"], ["b"]),
        (
            {"not": {"const": "x" * 1000}},
            ["x" * 999, "x" * 1001, "x" * 500 + "y" * 500, "", "y"],
            ["x" * 1000],
        ),
        (
            {"not": {"enum": ["x" * 500 + "a", "x" * 500 + "bc", "x"]}},
            ["x" * 500, "x" * 500 + "b", "x" * 500 + "bcd", "xx", "", "y"],
            ["x" * 500 + "a", "x" * 500 + "bc", "x"],
        ),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, [-5, 2**53], [0.5, 2**64]),
    ],
)
def test_unsupported_keywords_are_rewritten_in_supported_ones(
    backend: GuideBackend, schema: dict[str, Any], right: list[Any], wrong: list[Any]
) -> None:
    assert allowed(backend, schema, *right, *wrong) == right
    validator = Draft202012Validator(schema)
    assert [each for each in [*right, *wrong] if validator.is_valid(each)] == right or "maximum" in schema


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        (
            r"^(?!\.)(?!.*\.\.)[a-z.]*[a-z]@[a-z]+$",
            ["a.b@c"],
            [".a@c", "a..b@c"],
        ),  # zod's pattern of an address
        (r"^(?=.{1,5}$)[a-z]+(\.[a-z]+)*$", ["ab.cd"], ["abcd.ef"]),
        ("^(?!con|nul)[a-z]+$", ["co", "context"[:2] + "p"], ["con", "conx", "nul"]),
        ("[[a]]", ["a]", "[]"], ["a"]),
        ("^[a&&b]$", ["a", "&"], ["c"]),
        (r"^\w\W$", ["a-"], ["aé", "é-"]),
        (r"^[\w.-]+$", ["a.b-c"], ["a b"]),
        ("^a|b$", ["ax", "xb"], ["xax"]),
        (r"^\u0041\/\x42$", ["A/B"], ["a/b"]),
        (r"^(?<year>\d{4})$", ["2024"], ["x"]),
    ],
)
def test_patterns_are_read_as_ecma_and_python_do(
    backend: GuideBackend, pattern: str, right: list[str], wrong: list[str]
) -> None:
    assert allowed(backend, {"type": "string", "pattern": pattern}, *right, *wrong) == right


def test_a_property_cannot_come_twice_even_escaped(backend: GuideBackend) -> None:
    schema = {"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "boolean"}}
    matcher = compiled(backend, schema)
    assert follows(matcher, '{"a":1,"b":true}')
    for again in ('"a":true', '"\\u0061":true'):
        assert not follows(matcher, '{"a":1,' + again + "}")


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (
            {"properties": {"a/b": {"pattern": "^x(?=y)"}}},
            r'at #/properties/a~1b: pattern "\^x\(\?=y\)" has a look-ahead',
        ),
        ({"items": {"pattern": "(?<!a)b"}}, "at #/items: .*negative look-behind"),
        ({"pattern": r"(a)\1"}, "back reference"),
        ({"pattern": r"\bfoo"}, "word boundary"),
        ({"items": {"pattern": "(a"}}, "at #/items: .*is not a regular expression"),
        (
            {"properties": {"m": {"propertyNames": {"not": {}, "minLength": 1}}}},
            "at #/properties/m/propertyNames",
        ),
        (
            {"oneOf": [{"type": "string"}, {"pattern": "a", "type": "string"}]},
            "at #/oneOf/1: #/oneOf/0 may hold too, for a",
        ),
        ({"oneOf": [{"type": "null"}, {"type": "null"}]}, "oneOf has no value"),
        ({"contains": {"type": "null"}, "prefixItems": [{}]}, "contains beside prefixItems"),
        ({"contains": {"type": "null"}, "minContains": 21}, "contains beside .* or for more than 20 items"),
        (
            {"contains": {"type": "null"}, "minContains": 2**53},
            "contains beside .* or for more than 20 items",
        ),
        ({"contains": {"pattern": "a"}, "maxContains": 1}, "at #/contains: maxContains cannot be followed"),
        ({"not": {"pattern": "a"}}, "at #/not: the opposite of this schema cannot be followed"),
        ({"if": {"multipleOf": 3}, "then": False}, "at #/if: if cannot be followed"),
        ({"$ref": "other.json"}, r'\$ref "other.json" points to nothing in this schema'),
        ({"$ref": "#/$defs/a"}, "there is no"),
        ({"type": "object", "minProperties": 2}, "minProperties 2: several"),
        (
            {"type": "object", "properties": {"a": {}}, "minProperties": 3},
            "at #: minProperties 3: several properties that are not named",
        ),
        (
            {"type": "object", "properties": {"a": {}}, "additionalProperties": False, "minProperties": 3},
            "at #: the schema is false",
        ),
        ({"items": {"propertyNames": {"minLength": 2.5}}}, "at #/items/propertyNames: minLength is 2.5"),
        ({"items": {"propertyNames": {"minLength": 2**40}}}, "at #/items/propertyNames: minLength is"),
        (
            {"unevaluatedProperties": False, "allOf": [{"properties": 3}]},
            "at #/allOf/0: properties is 3, expected an object",
        ),
        ({"items": {"pattern": "a{99999999999999999999}"}}, "at #/items: .* is not a regular expression"),
        ({"not": {"enum": ["x" * size for size in range(300)]}}, "is nested too deeply"),
        (
            {"not": {"$ref": "#/$defs/a"}, "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}] * 9}}},
            "at #/not: the opposite of this schema cannot be followed",
        ),
        (
            {
                "unevaluatedProperties": False,
                "$ref": "#/$defs/a",
                "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}},
            },
            "a recursive \\$ref",
        ),
        ({"minimum": "3"}, 'minimum is "3", expected a number'),
        ({"maxLength": -1}, "maxLength is -1, expected an integer of at least 0"),
        ({"properties": []}, r"properties is \[\], expected an object"),
        ({"required": "a"}, 'required is "a", expected an array of texts'),
        ({"enum": []}, r"enum is \[\], expected an array of values"),
        ({"type": "str"}, 'type is "str", expected one or several of null'),
        ({"items": 3}, "at #/items: the schema is 3, expected an object or a boolean"),
        ({"allOf": [{"type": "null"}, {"type": "string"}]}, r"no text fits it, .* \(llguidance: "),
        (
            {"patternProperties": {"a": True, "ab": {"type": "null"}}},
            "two patternProperties may match one name",
        ),
        ({"const": "\u0001"}, r"control character U\+0001"),
        (
            {"x-guidance": {"whitespace_pattern": "[a ]"}},
            "whitespace_pattern is .*expected a regular expression of white space",
        ),
        (False, "the schema is false"),
    ],
)
def test_unsupported_keywords_are_refused_by_their_path(
    backend: GuideBackend, schema: Any, words: str
) -> None:
    refusal = refusal_of(backend, schema)
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(refusal)


@pytest.mark.parametrize("number", [10**400, -(10**400)])
@pytest.mark.parametrize(
    "keyword",
    [
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "const"),
        *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains"),
    ],
)
def test_numbers_outside_float_precision_are_refused_by_their_path(
    backend: GuideBackend, keyword: str, number: int
) -> None:
    inner = {keyword: number, **({"contains": {}} if keyword == "minContains" else {})}
    schema = {"properties": {"m": inner}}
    excludes_nothing = keyword in (
        ("maximum", "exclusiveMaximum") if number > 0 else ("minimum", "exclusiveMinimum")
    )
    if excludes_nothing:
        assert allowed(backend, schema, {"m": 3}) == [{"m": 3}]
    else:
        assert f"at #/properties/m: {keyword} " in refusal_of(backend, schema).replace(" has ", " ")
    for around in ({"oneOf": [inner, {"type": "null"}]}, {"propertyNames": inner}, {"not": inner}):
        guide = Guide(GuideKind.JSON_SCHEMA, json.dumps(around))
        try:
            backend.compile(guide)
        except InvalidArgument as error:
            assert "cannot be used: at #/" in str(error)


@pytest.mark.parametrize("dialect", ["", "draft-06/schema", "draft-07/schema", "draft/2020-12/schema"])
def test_id_does_not_change_the_base_uri_in_later_drafts(backend: GuideBackend, dialect: str) -> None:
    schema: dict[str, Any] = {
        "definitions": {"x": {"type": "null"}},
        "properties": {"a": {"id": "thing", "allOf": [{"$ref": "#/definitions/x"}]}},
    }
    if dialect:
        schema["$schema"] = f"http://json-schema.org/{dialect}#"
    assert allowed(backend, schema, {"a": None}, {"a": 1}) == [{"a": None}]


@pytest.mark.parametrize("dialect", ["draft-03", "draft-04"])
def test_id_is_the_base_uri_in_drafts_3_and_4(backend: GuideBackend, dialect: str) -> None:
    inner = {"id": "http://a/thing", "definitions": {"x": {"type": "null"}}}
    schema: dict[str, Any] = {
        "$schema": f"http://json-schema.org/{dialect}/schema#",
        "definitions": {"x": {"type": "integer"}},
        "properties": {
            "a": {**inner, "items": {"$ref": "#/definitions/x"}},
            "$id": {"$ref": "http://a/thing"},
        },
    }
    assert allowed(backend, schema, {"a": [None]}, {"a": [1]}) == [{"a": [None]}]


def test_values_of_an_enum_must_match_its_format(backend: GuideBackend) -> None:
    dates: dict[str, Any] = {"enum": ["2023-02-29", "2024-02-29"], "format": "date"}
    schema: dict[str, Any] = {"type": "array", "uniqueItems": True, "items": dates}
    assert allowed(backend, schema, ["2024-02-29"], ["2023-02-29"]) == [["2024-02-29"]]
    assert allowed(backend, dates, "2024-02-29", "2023-02-29") == ["2024-02-29"]
    schema = {"type": "object", "propertyNames": dates}
    assert allowed(backend, schema, {"2024-02-29": 1}, {"2023-02-29": 1}) == [{"2024-02-29": 1}]


def test_patterns_of_clients_take_no_exponential_time(backend: GuideBackend) -> None:
    text = "a" * 60 + "b"  # Python's engine takes 2^60 steps for it
    option = {"type": "string", "pattern": "^(a+)+$"}
    assert allowed(backend, {"oneOf": [{"enum": [text]}, option]}, text, "aa") == [text, "aa"]
    schema = {"type": "object", "properties": {text: {}}, "propertyNames": {"pattern": "^(a+)+$"}}
    assert allowed(backend, schema, {"aa": 1}, {text: 1}) == [{"aa": 1}]


def test_a_pattern_that_exceeds_the_limits_is_refused(
    backend: GuideBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matching, "_MAX_FUEL", 1)
    schema = {"properties": {"abc": {}}, "propertyNames": {"pattern": "^(a|ab)(c|bcd)(d*)$"}}
    assert "at #/propertyNames: propertyNames is too complex" in refusal_of(backend, schema)


def test_many_alternatives_that_a_property_distinguishes_are_followed(backend: GuideBackend) -> None:
    def alternatives(count: int) -> dict[str, Any]:
        return {
            "oneOf": [
                {"type": "object", "properties": {"kind": {"const": f"k{index}"}}, "required": ["kind"]}
                for index in range(count)
            ]
        }

    right, wrong = {"kind": "k119"}, {"kind": "k120"}
    assert allowed(backend, alternatives(120), right, wrong) == [right]


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"$ref": "#/$defs/d0"}},
        {"oneOf": [{"type": "string"}, {"type": "null", "$ref": "#/$defs/d0"}]},
        {"unevaluatedProperties": False, "$ref": "#/$defs/d0"},
        {
            "oneOf": [
                {"properties": {"k": {"const": i}}, "required": ["k"], "type": "object"} for i in range(40)
            ]
        },
    ],
    ids=["not", "oneOf", "unevaluatedProperties", "alternatives"],
)
def test_all_comparisons_of_a_schema_share_one_limit(
    backend: GuideBackend, schema: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    chain: dict[str, Any] = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(5)}
    schema = {**schema, "$defs": {**chain, "d5": {"type": "null"}}}
    compiled(backend, schema)
    monkeypatch.setattr(overlap, "_MAX_STEPS", 5)
    assert "the schema has too many alternatives to compare: " in refusal_of(backend, schema)


def test_a_refusal_names_the_tool(backend: GuideBackend) -> None:
    def tool(name: str, schema: dict[str, Any]) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name, "parameters": schema}}

    for schema, words in (
        ({"properties": {"m": {"uniqueItems": True}}}, "at the tool bad, #/properties/m: uniqueItems"),
        (
            {"patternProperties": {"a": True, "ab": {"type": "null"}}},
            "at the tool bad, #: two patternProperties",
        ),
    ):
        guide = tool_guide([tool("good", {}), tool("bad", schema)], "required", "hermes")
        assert guide is not None
        with pytest.raises(InvalidArgument, match=words):
            backend.compile(guide)


@pytest.mark.parametrize(
    ("options", "right", "wrong"),
    [
        ({}, ["[1,2]", "[ 1,\n  2]", "[" + " " * 20 + "1]"], ["[" + " " * 21 + "1]", "[" + "\n" * 30 + "]"]),
        ({"whitespace_flexible": False}, ["[1,2]"], ["[1, 2]", "[\n]"]),
        ({"whitespace_pattern": "[ ]{0,2}"}, ["[1,2]", "[  1 ]"], ["[   1]", "[\n]"]),
        ({"whitespace_pattern": r"(?: |\n\t*)?"}, ["[ 1,\n\t\t\t2]"], ["[  1]"]),
        ({"whitespace_pattern": r"[ \n]*"}, ["[" + " " * 99 + "]"], ["[\t]"]),
        ({"whitespace_pattern": ""}, ["[1]"], ["[ 1]"]),
    ],
)
def test_white_space_is_bounded(
    backend: GuideBackend, options: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    matcher = compiled(backend, {"type": "array", **({"x-guidance": options} if options else {})})
    assert [text for text in [*right, *wrong] if follows(matcher, text)] == right


def test_white_space_is_bounded_without_a_schema_too(backend: GuideBackend) -> None:
    guide = Guide(GuideKind.JSON)
    matcher = backend.load(guide, backend.compile(guide))
    assert follows(matcher, '{"a": [1]}')
    assert not follows(matcher, "{" + " " * 21 + "}")


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Leaf(BaseModel):
    kind: Literal["leaf"]
    born: date
    number: UUID


class Tree(BaseModel):
    kind: Literal["tree"]
    children: list[Annotated[Tree | Leaf, Field(discriminator="kind")]]
    colors: set[Color] = set()
    counts: dict[Color, Annotated[int, Field(ge=0)]] = {}
    names: dict[Annotated[str, Field(pattern="^[a-z]+$")], str] = {}
    price: Annotated[float, Field(gt=0, lt=10)] | None = None


ZOD = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {
        "site": {"type": "string", "format": "uri"},
        "token": {"type": "string", "format": "cuid2", "pattern": "^[0-9a-z]+$"},
        "took": {
            "type": "string",
            "format": "duration",
            "pattern": r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?"
            r"(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$",
        },
        "scores": {
            "type": "object",
            "propertyNames": {"type": "string", "enum": ["a", "b"]},
            "additionalProperties": {
                "type": "integer",
                "minimum": -9007199254740991,
                "maximum": 9007199254740991,
            },
            "required": ["a", "b"],
        },
        "pair": {
            "type": "array",
            "prefixItems": [{"type": "null"}, {"type": "boolean"}],
            "items": {"type": "string"},
        },
        "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    },
    "required": ["site", "token", "took", "scores", "pair", "next"],
    "additionalProperties": False,
}


def test_unique_items_allow_only_different_items(backend: GuideBackend) -> None:
    """A string may not end where it would equal an earlier one; if it cannot go on either, there is an error."""
    matcher = compiled(backend, {"type": "array", "uniqueItems": True, "items": {"pattern": "^a{1,2}$"}})
    masks = np.zeros((1, BYTES.num_words), dtype=np.int32)
    matcher.consume(list(b'["a","a'))
    assert not backend.fill([MaskJob(matcher, 0)], masks)
    assert np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little")).tolist() == [ord("a")]
    other = matcher.fork()
    matcher.consume(list(b'a",'))
    matcher.rollback(3)
    assert not backend.fill([MaskJob(matcher, 0)], masks)
    assert np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little")).tolist() == [ord("a")]
    other.consume(list(b'a","aa'))
    errors = backend.fill([MaskJob(other, 0)], masks)
    assert "where an array item must equal an earlier one, but uniqueItems is true" in str(errors[0])
    assert errors[0].names == ("guided_decoding_guide",)
    with pytest.raises(InvalidArgument, match="uniqueItems"):
        other.consume(list(b'"'))


@pytest.mark.parametrize("schema", [TypeAdapter(Tree).json_schema(), ZOD], ids=["pydantic", "zod"])
def test_schemas_made_by_pydantic_and_zod_are_followed(backend: GuideBackend, schema: dict[str, Any]) -> None:
    matcher = compiled(backend, schema)
    validator = Draft202012Validator(schema)
    written = [write(backend, matcher, np.random.default_rng(seed), most=1500) for seed in range(8)]
    texts = [text for text in written if text is not None]
    assert texts
    for text in texts:
        validator.validate(json.loads(text))

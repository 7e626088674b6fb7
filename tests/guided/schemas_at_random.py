"""Random JSON schemas of all dialects, values that nearly match them, and random texts that guides allow."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
from jsonschema import (
    Draft3Validator,
    Draft4Validator,
    Draft6Validator,
    Draft7Validator,
    Draft201909Validator,
    Draft202012Validator,
)

from inflight.errors import InvalidArgument
from inflight.guided.backend import GuideBackend, MaskJob, Matcher
from inflight.guided.llguidance_backend import LLMatcher
from inflight.guided.vocabulary import GuideVocabulary

BYTES = GuideVocabulary.of_size(256, [bytes([each]) for each in range(256)], ())
VALIDATORS = [
    (Draft202012Validator, ""),
    (Draft202012Validator, "https://json-schema.org/draft/2020-12/schema"),
    (Draft201909Validator, "https://json-schema.org/draft/2019-09/schema"),
    (Draft7Validator, "http://json-schema.org/draft-07/schema#"),
    (Draft6Validator, "http://json-schema.org/draft-06/schema#"),
    (Draft4Validator, "http://json-schema.org/draft-04/schema#"),
    (Draft3Validator, "http://json-schema.org/draft-03/schema#"),
]
_NAMES = ["a", "b", "kind", "é", "x-y", 'q"', "n\nn"]
_TEXTS = ["", "a", "ab", "b", "kind", "2023-02-29", "2024-02-29", "é", "-", "1", "a\nb", "A", "_", "aa.b"]
_PATTERNS = [
    *(
        "^a",
        "b$",
        "^[a-c]+$",
        "^x-",
        "a|b",
        "^a|b$",
        r"^\d{1,3}$",
        r"^\w+$",
        r"\W",
        r"^\S$",
        "[^a]",
        ".",
        "^.{2,3}$",
    ),
    *(
        "[[a]]",
        "[a&&b]",
        "^[+-]?a$",
        r"\u0061",
        "(^a$)|(^b$)",
        "^(?!a)[a-z]*$",
        "^(?=.{2,3}$)[ab.]+$",
        "^$",
        "a{,2}",
    ),
    *(r"\bx", r"(a)\1", "^(?!.*aa)[ab]*$", "^(?:kind|a)$", r"^[\w.-]+$", "{a}", "^[^\\]]$"),
]
_FORMATS = [
    "date",
    "ipv4",
    "ipv6",
    "uuid",
    "date-time",
    "email",
    "password",
    "path",
    "uri",
    "jwt",
    "regex",
    "duration",
]
_KINDS = ["null", "boolean", "integer", "number", "string", "array", "object"]


def make_schema(rng: random.Random, depth: int = 3) -> Any:
    """Make a schema with up to four groups of keywords, which are often unrelated."""
    if rng.random() < 0.05:
        return rng.random() < 0.8
    schema: dict[str, Any] = {}
    kinds = [*_KINDS, "object", "object", "array"] if depth else _KINDS[:5]
    kind = rng.choice(kinds)
    if rng.random() < 0.8:
        schema["type"] = kind if rng.random() < 0.8 else rng.sample(_KINDS, 2)
    for _ in range(rng.randint(0, 2)):
        _add_simple(rng, schema, kind if rng.random() < 0.9 else rng.choice(kinds), depth - 1)
    if depth and rng.random() < 0.5:
        schema |= rng.choice(_COMBINATIONS)(rng, lambda: make_schema(rng, depth - 1))
    if rng.random() < 0.3:
        schema |= rng.choice(_ASKING_NOTHING)
    items = list(schema.items())
    rng.shuffle(items)
    return dict(items)


_ASKING_NOTHING: list[dict[str, Any]] = [
    {"title": "T"},
    {"x-ui": {"type": "string"}},
    {"uniqueItems": False},
    {"deprecated": True},
    {"unevaluatedProperties": True},
    {"default": 1},
    {"propertyNames": {"type": "string"}},
    {"minContains": 0},
]


def _add_simple(rng: random.Random, schema: dict[str, Any], kind: str, depth: int) -> None:
    if rng.random() < 0.2:
        values = [make_value(rng, 1) for _ in range(rng.randint(1, 4))]
        schema |= {"enum": values} if rng.random() < 0.7 else {"const": values[0]}
        return
    if kind == "object":
        schema["properties"] = {
            name: make_schema(rng, depth) for name in rng.sample(_NAMES, rng.randint(1, 3))
        }
        if rng.random() < 0.6:
            schema["required"] = rng.sample(_NAMES, rng.randint(1, 2))
    if kind in _SIMPLE:
        schema |= rng.choice(_SIMPLE[kind])(rng, lambda: make_schema(rng, depth))


def _bounds(rng: random.Random, low: str, high: str, most: int) -> dict[str, Any]:
    least = rng.randint(0, most)
    bounds = {low: least, high: least + rng.randint(0, 3)}
    return {key: value for key, value in bounds.items() if rng.random() < 0.6}


Maker = Callable[[random.Random, Callable[[], Any]], dict[str, Any]]
_NUMBERS: list[Maker] = [
    lambda rng, inner: _bounds(rng, "minimum", "maximum", 20),
    lambda rng, inner: {"minimum": rng.randint(-20, 20), "exclusiveMinimum": True},
    lambda rng, inner: {"exclusiveMinimum": rng.randint(-20, 20)},
    lambda rng, inner: {"exclusiveMaximum": rng.randint(-20, 20) + 0.5},
    lambda rng, inner: {"multipleOf": rng.choice([2, 3, 0.25])},
    lambda rng, inner: {"divisibleBy": 7},
    lambda rng, inner: {"minimum": -(2**60), "maximum": 2**63},
]
_SIMPLE: dict[str, list[Maker]] = {
    "integer": _NUMBERS,
    "number": _NUMBERS,
    "string": [
        lambda rng, inner: _bounds(rng, "minLength", "maxLength", 3),
        lambda rng, inner: {"pattern": rng.choice(_PATTERNS)},
        lambda rng, inner: {"format": rng.choice(_FORMATS)},
        lambda rng, inner: {"format": "date", "pattern": "-29$"},
    ],
    "array": [
        lambda rng, inner: {"items": inner()},
        lambda rng, inner: {"items": [inner(), inner()], "additionalItems": inner()},
        lambda rng, inner: _bounds(rng, "minItems", "maxItems", 2),
        lambda rng, inner: {"prefixItems": [inner()], "items": inner()},
        lambda rng, inner: {"uniqueItems": True, "items": {"enum": rng.sample(["a", 1, None, 2.5, True], 3)}},
        lambda rng, inner: {"items": {"type": "boolean"}, "uniqueItems": True},
        lambda rng, inner: {"uniqueItems": True, "maxItems": 1},
        lambda rng, inner: {"contains": True, "minContains": rng.randint(0, 2)},
        lambda rng, inner: {"unevaluatedItems": rng.random() < 0.5},
    ],
    "object": [
        lambda rng, inner: {"additionalProperties": False},
        lambda rng, inner: {"additionalProperties": inner()},
        lambda rng, inner: {"unevaluatedProperties": False},
        lambda rng, inner: {"patternProperties": {rng.choice(_PATTERNS): inner()}},
        lambda rng, inner: _bounds(rng, "minProperties", "maxProperties", 2),
        lambda rng, inner: {"propertyNames": rng.choice([{"pattern": "^[a-c]"}, {"enum": ["a", "kind"]}])},
        lambda rng, inner: {"propertyNames": {"maxLength": 2}},
        lambda rng, inner: {"dependencies": {"a": ["b"], "kind": inner()}},
        lambda rng, inner: {"dependentRequired": {"a": ["kind"]}},
    ],
}
_TAGGED: list[dict[str, Any]] = [
    {"properties": {"kind": {"const": name}}, "required": ["kind"]} for name in ("a", "b")
]
_COMBINATIONS: list[Maker] = [
    lambda rng, inner: {"anyOf": [inner(), inner()]},
    lambda rng, inner: {"allOf": [inner(), inner()]},
    lambda rng, inner: {"oneOf": [inner(), inner(), inner()]},
    lambda rng, inner: {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    lambda rng, inner: {"oneOf": [_with(inner(), each) for each in _TAGGED]},
    lambda rng, inner: {"oneOf": [{"type": "string"}, {"enum": ["a", 1]}, {"type": ["null", "integer"]}]},
    lambda rng, inner: {"not": inner()},
    lambda rng, inner: {"not": {"required": ["a"]}},
    lambda rng, inner: {"not": {"enum": [1, "a", None]}},
    lambda rng, inner: {"not": {"type": rng.sample(_KINDS, 2)}},
    lambda rng, inner: {"not": {"minLength": 2, "type": "string"}},
    lambda rng, inner: {"if": _TAGGED[0], "then": {"required": ["b"]}, "else": inner()},
    lambda rng, inner: {"if": inner(), "then": inner()},
    lambda rng, inner: {"$ref": "#/definitions/d", "definitions": {"d": inner()}},
    lambda rng, inner: {"anyOf": [{"$ref": "#", "description": "again"}, inner()]},
    lambda rng, inner: {"extends": inner()},
    lambda rng, inner: {"disallow": ["string", "null"]},
]


def _with(schema: Any, tagged: dict[str, Any]) -> dict[str, Any]:
    """Add a tag to a schema."""
    return {**(schema if isinstance(schema, dict) else {}), **tagged}


def make_value(rng: random.Random, depth: int = 2) -> Any:
    """Make a value that may be valid by some of the schemas."""
    kind = rng.choice(
        [
            "null",
            "flag",
            "integer",
            "number",
            "text",
            "text",
            *(["list", "object", "object"] if depth else []),
        ]
    )
    if kind == "list":
        return [make_value(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    if kind == "object":
        return {name: make_value(rng, depth - 1) for name in rng.sample(_NAMES, rng.randint(0, 3))}
    choices: dict[str, list[Any]] = {
        "null": [None],
        "flag": [True, False],
        "integer": [0, 1, 2, 7, -6, 21, 100],
        "number": [0.5, 1.0, -2.25, 3.7],
        "text": _TEXTS,
    }
    return rng.choice(choices[kind])


def make_text(rng: random.Random) -> str:
    """Write a value as JSON, sometimes with another spelling or a repeated name."""
    value = make_value(rng)
    text = json.dumps(
        value, ensure_ascii=rng.random() < 0.2, separators=rng.choice([(",", ":"), (", ", ": ")])
    )
    if isinstance(value, dict) and value and rng.random() < 0.3:
        again = json.dumps(next(iter(value)))[1:-1]
        again = f"\\u{ord(again[0]):04x}{again[1:]}" if rng.random() < 0.5 else again
        text = f'{text[:-1]},"{again}":{json.dumps(make_value(rng, 0))}}}'
    return text


def follows(matcher: Matcher, text: str) -> bool:
    """Whether a guide allows a text as a whole."""
    assert isinstance(matcher, LLMatcher)
    own = matcher.fork()
    try:
        own.consume(list(text.encode()))
    except InvalidArgument:
        return False
    return own.matcher.is_accepting()


_LIKING = np.ones(len(BYTES.tokens) + 1)
_LIKING[128:256] = 0.05
for _byte, _liking in ((b"\\ \t\r\n", 0.05), (b'"', 30), (b"]}", 60), (b"abk012", 4)):
    _LIKING[list(_byte)] = _liking
_LIKING[BYTES.end_id] = 200


def write(backend: GuideBackend, matcher: Matcher, rng: np.random.Generator, most: int = 250) -> str | None:
    """Write a random text that prefers to end; None if it does not end in time, or cannot continue."""
    own = matcher.fork()
    masks = np.zeros((1, BYTES.num_words), dtype=np.int32)
    written = bytearray()
    for _ in range(most):
        errors = backend.fill([MaskJob(own, 0)], masks)
        allowed = np.unpackbits(masks.view(np.uint8).reshape(-1), bitorder="little")[: len(_LIKING)]
        liking = _LIKING * allowed
        if errors or not liking.any():
            return None
        token = int(rng.choice(len(liking), p=liking / liking.sum()))
        if token == BYTES.end_id:
            return written.decode()
        try:
            own.consume((token,))
        except InvalidArgument:
            return None
        written.append(token)
    return None

"""Check whether a value can be valid by two JSON schemas at once, for the translation of `oneOf`.

Schemas count as disjoint only if this is certain. Any thread.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from inflight.errors import InvalidArgument
from inflight.guided.schemas.documents import Document, Node, keywords_of, refused
from inflight.guided.schemas.formats import FORMATS
from inflight.guided.schemas.matching import Matching
from inflight.json_values import is_list, is_object

TYPES = ("null", "boolean", "integer", "fraction", "string", "array", "object")
"""JSON's types; a number is an integer or a fraction."""
_MAX_STEPS = 200_000
"""Maximum number of parts that are examined for one document, in a few seconds. It suffices for the 32,640
pairs of 256 alternatives that differ in one property."""
_DEEPEST = 6
LARGEST = 2**53
"""The largest integer up to which all integers are exact in float64, which llguidance uses."""
_INFINITE = float("inf")


@dataclass(slots=True)
class Facts:
    """Facts about every value that is valid by all of some schemas.

    Attributes:
        types: The possible types.
        values: The possible values; None if they are not listed.
        bounds: Lower and upper bound, by the bounded quantity (value, length, items).
        required: Required properties of an object.
        properties: Schemas of properties, by name.
        closed: Allowed property names; one set per schema that allows no other properties.
        items: Schemas of every item of an array.
        patterns: Expressions that a string must match.
        formats: Known formats that a string must have.
        choices: Lists of alternatives of which at least one must hold.
        words: The keywords of RESTRICTING that are present.
    """

    types: set[str] = field(default_factory=lambda: set(TYPES))
    values: list[Any] | None = None
    bounds: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    required: list[str] = field(default_factory=list[str])
    properties: dict[str, list[Node]] = field(default_factory=dict[str, list[Node]])
    closed: list[set[str]] = field(default_factory=list[set[str]])
    items: list[Node] = field(default_factory=list[Node])
    patterns: list[str] = field(default_factory=list[str])
    formats: list[str] = field(default_factory=list[str])
    choices: list[list[Node]] = field(default_factory=list[list[Node]])
    words: set[str] = field(default_factory=set[str])


_BOUNDS = {
    "minimum": ("value", 0),
    "exclusiveMinimum": ("value", 0),
    "maximum": ("value", 1),
    "exclusiveMaximum": ("value", 1),
    "minLength": ("length", 0),
    "maxLength": ("length", 1),
    "minItems": ("items", 0),
    "maxItems": ("items", 1),
}
RESTRICTING = frozenset(
    [
        "const",
        "enum",
        "allOf",
        "anyOf",
        "oneOf",
        "not",
        "if",
        "$dynamicRef",
        "$recursiveRef",
        "multipleOf",
        "pattern",
    ]
    + [
        "items",
        "prefixItems",
        "contains",
        "uniqueItems",
        "unevaluatedItems",
        "properties",
        "patternProperties",
    ]
    + [
        "additionalProperties",
        "propertyNames",
        "required",
        "minProperties",
        "maxProperties",
        "dependentRequired",
    ]
    + ["dependentSchemas", "unevaluatedProperties", *_BOUNDS]
)
"""Keywords that restrict a value beyond its type, except `$ref`, and `format`, which is often an annotation."""


_ABOUT = {
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), "number"),
    **dict.fromkeys(("minLength", "maxLength", "pattern"), "string"),
    **dict.fromkeys(("minItems", "maxItems", "items", "prefixItems", "contains", "uniqueItems"), "array"),
    **dict.fromkeys(("unevaluatedItems",), "array"),
    **dict.fromkeys(("properties", "patternProperties", "additionalProperties", "propertyNames"), "object"),
    **dict.fromkeys(("required", "minProperties", "maxProperties", "dependentRequired"), "object"),
    **dict.fromkeys(("dependentSchemas", "unevaluatedProperties"), "object"),
}
"""The type to which a keyword applies. Keywords that are not in this table apply to all types."""


def words_about(facts: Facts, kind: str) -> set[str]:
    """Return the keywords that restrict values of a type, except enum, const and allOf."""
    about = "number" if kind in ("integer", "fraction") else kind
    words = facts.words - {"enum", "const", "allOf"}
    return {word for word in words if _ABOUT.get(word, about) == about}


def types_of(kinds: Any) -> set[str]:
    """Return the types of a `type` keyword."""
    named = {str(each) for each in (kinds if is_list(kinds) else [kinds])}
    return {"integer", "fraction"} | (named - {"number"}) if "number" in named else named


def type_of(value: Any) -> str:
    """Return the type of a value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if isinstance(value, int) or value.is_integer() else "fraction"
    return "string" if isinstance(value, str) else "array" if is_list(value) else "object"


class Overlaps:
    """Compares schemas of one document, in a bounded number of steps."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._num_steps = 0
        self._matching = Matching()
        self._known: dict[tuple[tuple[int, str], ...], tuple[tuple[Node, ...], Facts]] = {}

    def facts(self, nodes: Sequence[Node]) -> Facts:
        """Return facts about every value that is valid by all of these schemas."""
        key = tuple((id(node.value), node.path) for node in nodes)
        if key not in self._known:
            facts = Facts()
            self._gather(nodes, facts, 0, set())
            self._known[key] = (tuple(nodes), facts)
        return self._known[key][1]

    def count_step(self, node: Node) -> None:
        """Count one examined part. Raises InvalidArgument if there are too many of them."""
        self._num_steps += 1
        if self._num_steps > _MAX_STEPS:
            raise refused(
                node.path,
                f"the schema has too many alternatives to compare: it takes more than {_MAX_STEPS} steps to find "
                "which values are valid by several parts of it",
            )

    def matches(self, expression: str, text: str) -> bool | None:
        """Return whether a Rust expression matches a part of a text; None if unknown."""
        return self._matching.matches(expression, text)

    def shared_types(self, first: Sequence[Node], second: Sequence[Node]) -> set[str]:
        """Return the types of the values that may be valid by both arguments.

        Each argument is a list of schemas that must all hold.
        """
        return self._shared(first, second, 0)

    def _shared(
        self,
        first: Sequence[Node],
        second: Sequence[Node],
        depth: int,
        chosen: frozenset[str] = frozenset(),
    ) -> set[str]:
        """Implement `shared_types`. `chosen` has the paths of alternatives that are already assumed to hold."""
        self.count_step(second[-1])
        a, b = self.facts(first), self.facts(second)
        shared = a.types & b.types
        if depth > _DEEPEST:
            return shared
        shared = {each for each in shared if not self._is_disjoint(a, b, each, depth)}
        for one, nodes, other in ((a, first, second), (b, second, first)):
            for choice in one.choices:
                if not shared or not choice or choice[0].path in chosen:
                    continue
                found: set[str] = set()
                for option in choice:
                    found |= self._shared([*nodes, option], other, depth + 1, chosen | {choice[0].path})
                shared &= found
        return shared

    def _is_disjoint(self, a: Facts, b: Facts, kind: str, depth: int) -> bool:
        for one, other in ((a, b), (b, a)):
            if one.values is not None and all(
                self.excludes(other, value) for value in one.values if type_of(value) == kind
            ):
                return True
        measured = {"integer": "value", "fraction": "value", "string": "length", "array": "items"}.get(
            kind, ""
        )
        if measured:
            low_a, high_a = a.bounds.get(measured, (-_INFINITE, _INFINITE))
            low_b, high_b = b.bounds.get(measured, (-_INFINITE, _INFINITE))
            if max(low_a, low_b) > min(high_a, high_b):
                return True
        if kind == "array":
            is_filled = max(facts.bounds.get("items", (0, 0))[0] for facts in (a, b)) >= 1
            return bool(is_filled and a.items and b.items and not self._shared(a.items, b.items, depth + 1))
        if kind == "object":
            return any(
                self._is_disjoint_by(a, b, name, depth) for name in dict.fromkeys([*a.required, *b.required])
            )
        return False

    def _is_disjoint_by(self, a: Facts, b: Facts, name: str, depth: int) -> bool:
        if any(name not in names for facts in (a, b) for names in facts.closed):
            return True
        first, second = a.properties.get(name), b.properties.get(name)
        return bool(first and second and not self._shared(first, second, depth + 1))

    def excludes(self, facts: Facts, value: Any, depth: int = 0) -> bool:
        """Return whether a value is certainly invalid by these facts."""
        kind = type_of(value)
        if kind not in facts.types:
            return True
        if facts.values is not None and not any(is_same(value, each) for each in facts.values):
            return True
        measured = {"integer": "value", "fraction": "value", "string": "length", "array": "items"}.get(kind)
        if measured:
            low, high = facts.bounds.get(measured, (-_INFINITE, _INFINITE))
            size = value if measured == "value" else len(value)
            if not low <= size <= high:
                return True
        if kind == "string" and not all(
            self._matching.may_match(pattern, value) for pattern in facts.patterns
        ):
            return True
        if kind == "object":
            if any(name not in value for name in facts.required):
                return True
            if any(name not in names for names in facts.closed for name in value):
                return True
            if depth < _DEEPEST:
                return any(
                    self.excludes(self.facts(nodes), value[name], depth + 1)
                    for name, nodes in facts.properties.items()
                    if name in value
                )
        return False

    def _gather(self, nodes: Iterable[Node], facts: Facts, depth: int, seen: set[tuple[str, str]]) -> None:
        """Add to `facts` the facts of schemas that must all hold.

        `seen` has the targets of references whose facts were already added.
        """
        for node in nodes:
            self.count_step(node)
            if node.value is False:
                facts.types.clear()
            if not is_object(node.value) or depth > _DEEPEST * 3:
                facts.words |= {"…"} if is_object(node.value) else set()
                continue
            words = keywords_of(node)
            if "$ref" in words:
                self._gather_target(node, words["$ref"], facts, depth, seen)
            self._note(node, words, facts)
            if is_list(all_of := words.get("allOf")):
                parts = [node.inside(each, "allOf", index) for index, each in enumerate(all_of)]
                self._gather(parts, facts, depth + 1, seen)
            for keyword in ("anyOf", "oneOf"):
                if is_list(options := words.get(keyword)):
                    facts.choices.append(
                        [node.inside(each, keyword, index) for index, each in enumerate(options)]
                    )

    def _gather_target(
        self, node: Node, reference: Any, facts: Facts, depth: int, seen: set[tuple[str, str]]
    ) -> None:
        try:
            target = self._document.target(node, "$ref", reference)
        except InvalidArgument:  # the error is reported when the schema is translated
            facts.words.add("$ref")
            return
        if target.place not in seen:
            seen.add(target.place)
            self._gather([target], facts, depth + 1, seen)

    def _note(self, node: Node, words: Mapping[str, Any], facts: Facts) -> None:
        facts.words |= words.keys() & RESTRICTING
        if "type" in words:
            facts.types &= types_of(words["type"])
        values = [words["const"]] if "const" in words else words.get("enum")
        if is_list(values):
            given = values
            facts.values = [
                each for each in given if facts.values is None or any(is_same(each, v) for v in facts.values)
            ]
            facts.types &= {type_of(each) for each in facts.values}
        for keyword, (measured, side) in _BOUNDS.items():
            bound = words.get(keyword)
            if isinstance(bound, int | float) and not isinstance(bound, bool):
                if keyword.startswith("exclusive") and abs(bound) <= LARGEST:
                    bound = math.nextafter(bound, -_INFINITE if side else _INFINITE)
                low, high = facts.bounds.get(measured, (-_INFINITE, _INFINITE))
                facts.bounds[measured] = (max(low, bound), high) if side == 0 else (low, min(high, bound))
        if isinstance(pattern := words.get("pattern"), str):
            facts.patterns.append(pattern)
        if isinstance(form := words.get("format"), str) and form in FORMATS:
            facts.formats.append(form)
        if is_list(required := words.get("required")):
            facts.required += [str(each) for each in required]
        properties = words.get("properties", {})
        if is_object(properties):
            for name, each in properties.items():
                facts.properties.setdefault(name, []).append(node.inside(each, "properties", name))
            if words.get("additionalProperties") is False and not words.get("patternProperties"):
                facts.closed.append(set(properties))
        if "items" in words and "prefixItems" not in words:
            facts.items.append(node.inside(words["items"], "items"))


def is_same(first: Any, second: Any) -> bool:
    """Return whether two values are equal as JSON values: 1 equals 1.0 but not true."""
    if isinstance(first, bool) or isinstance(second, bool) or first is None or second is None:
        return first is second
    if is_list(first) and is_list(second):
        return len(first) == len(second) and all(map(is_same, first, second))
    if is_object(first) and is_object(second):
        return first.keys() == second.keys() and all(is_same(first[key], second[key]) for key in first)
    return (type(first) in (int, float) and type(second) in (int, float) and first == second) or (
        isinstance(first, str) and first == second
    )


def distinct_key(value: Any) -> str:
    """Return a text that is the same for two values if and only if they are equal as JSON values."""
    return json.dumps(_without_spellings(value), sort_keys=True)


def _without_spellings(value: Any) -> Any:
    if is_list(value):
        return [_without_spellings(each) for each in value]
    if is_object(value):
        return {key: _without_spellings(each) for key, each in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def key_of(value: Any) -> str:
    """Return a text that differs for different values."""
    return json.dumps(value, sort_keys=True)

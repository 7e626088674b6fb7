"""Translate oneOf, not and if for llguidance, which supports only allOf and anyOf."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from inflight.guided.schemas.documents import Node, keywords_of, refused
from inflight.guided.schemas.overlap import RESTRICTING, TYPES, Facts, is_same, type_of, types_of, words_about
from inflight.guided.schemas.patterns import other_than
from inflight.guided.schemas.schema_writer import SchemaWriter, Written
from inflight.json_values import is_list, is_object

IN_PLACE = frozenset(
    ["$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "not", "if", "dependentSchemas"]
)
"""Keywords that apply other schemas to the same value."""
BARE_VALUES: tuple[tuple[str, Any], ...] = (("null", None), ("boolean", True), ("boolean", False))
_KINDS = ("null", "boolean", "number", "string", "array", "object")
_DEEPEST = 12


def other_kinds(kinds: Iterable[str]) -> list[str]:
    """Return all values of the `type` keyword except these. If integer is excluded, number is excluded, too."""
    named = set(kinds)
    named |= {"number"} if {"integer", "fraction"} & named else set()
    return [kind for kind in _KINDS if kind not in named]


def write_choices(writer: SchemaWriter, node: Node, words: Mapping[str, Any], parts: list[Written]) -> None:
    """Append the translations of allOf, anyOf, oneOf, not and if to `parts`."""
    if "allOf" in words:
        parts += [writer.write(each) for each in writer.parts(node, words, "allOf")]
    if "anyOf" in words:
        parts.append(_any_of([writer.write(each) for each in writer.parts(node, words, "anyOf")]))
    if "oneOf" in words:
        parts.append(_one_of(writer, node, writer.parts(node, words, "oneOf")))
    if "not" in words:
        inner = node.inside(words["not"], "not")
        opposite = negated(writer, inner)
        if opposite is None:
            raise refused(
                inner.path,
                "the opposite of this schema cannot be followed: describe the allowed values instead",
            )
        parts.append(opposite)
    if "if" in words and {"then", "else"} & words.keys():
        condition = node.inside(words["if"], "if")
        opposite = negated(writer, condition)
        if opposite is None:
            raise refused(
                condition.path, "if cannot be followed for this schema: describe the cases with anyOf instead"
            )
        then = writer.write(node.inside(words.get("then", True), "then"))
        otherwise = writer.write(node.inside(words.get("else", True), "else"))
        parts.append(_any_of([_all_of([writer.write(condition), then]), _all_of([opposite, otherwise])]))


def _any_of(options: list[Written]) -> Written:
    if any(each is True or each == {} for each in options):
        return True
    left = [each for each in options if each is not False]
    return {"anyOf": left} if len(left) > 1 else left[0] if left else False


def _all_of(parts: list[Written]) -> Written:
    if False in parts:
        return False
    left = [each for each in parts if each is not True and each != {}]
    return {"allOf": left} if len(left) > 1 else left[0] if left else True


# -------------------------------------------------------------------- not


def negated(writer: SchemaWriter, node: Node, depth: int = 0, may_leave_out: bool = False) -> Written | None:
    """Return a schema of the values that are invalid by `node`; None if it cannot be written.

    The returned schema may exclude some of these values. Some keywords have no negation that can be written: with
    `may_leave_out`, values that violate no other keywords are excluded.
    """
    if isinstance(node.value, bool):
        return not node.value
    writer.overlaps.count_step(node)
    if not is_object(node.value) or depth > _DEEPEST:
        return None
    words = keywords_of(node)
    options: list[Written] = []
    for keyword, value in words.items():
        found = _negated_word(writer, node, words, keyword, value, depth, may_leave_out)
        if found is None and not may_leave_out:
            return None
        options += found or []
    return _any_of(options)


def _negated_word(
    writer: SchemaWriter,
    node: Node,
    words: Mapping[str, Any],
    keyword: str,
    value: Any,
    depth: int,
    may_leave_out: bool,
) -> list[Written] | None:
    """Return schemas of the values that are invalid by one keyword; None if they cannot be written."""
    match keyword:
        case "type":
            kinds = other_kinds(value if is_list(value) else [value])
            return [{"type": kinds}] if kinds else []
        case "const" | "enum":
            # Raises InvalidArgument for values that no generated text can have.
            writer.write(Node({keyword: value}, node.path, node.base, node.draft))
            return [values_but(value if keyword == "enum" else [value])]
        case "required" if is_list(value):
            return [{"type": "object", "properties": {name: False}} for name in value]
        case "properties" if is_object(value):
            return _negated_properties(writer, node, value, depth, may_leave_out)
        case "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum":
            opposite = {"type": "number", _OPPOSITE_BOUNDS[keyword]: writer.number(node, words, keyword)}
            return [writer.write(Node(opposite, node.path, node.base, 0))]
        case "minLength" | "minItems":
            count = writer.count(node, words, keyword) or 0
            kind = "string" if keyword == "minLength" else "array"
            return [{"type": kind, keyword.replace("min", "max"): count - 1}] if count else []
        case "maxLength" | "maxItems":
            count = writer.count(node, words, keyword) or 0
            kind = "string" if keyword == "maxLength" else "array"
            return [{"type": kind, keyword.replace("max", "min"): count + 1}]
        case "minProperties" if value == 1:
            return [{"type": "object", "additionalProperties": False}]
        case "maxProperties" if value == 0:
            return [{"type": "object", "minProperties": 1}]
        case "anyOf" | "oneOf":
            inner = _negated_parts(writer, node, words, keyword, depth, may_leave_out)
            return None if None in inner else [_all_of(cast(list[Any], inner))]
        case "allOf":
            inner = _negated_parts(writer, node, words, keyword, depth, may_leave_out)
            known = [each for each in inner if each is not None]
            return None if len(known) < len(inner) and not may_leave_out else known
        case "not":
            return [writer.write(node.inside(value, "not"))]
        case "$ref":
            return _negated_target(writer, writer.document.target(node, keyword, value), depth, may_leave_out)
        case _ if keyword in RESTRICTING:
            return None
        case _:
            return []


_OPPOSITE_BOUNDS = {
    "minimum": "exclusiveMaximum",
    "maximum": "exclusiveMinimum",
    "exclusiveMinimum": "maximum",
    "exclusiveMaximum": "minimum",
}


def _negated_target(
    writer: SchemaWriter, target: Node, depth: int, may_leave_out: bool
) -> list[Written] | None:
    """Return the negation of a reference's target; None if it cannot be written, or refers to itself."""
    if target.place in writer.negating:
        return None
    writer.negating.add(target.place)
    opposite = negated(writer, target, depth + 1, may_leave_out)
    writer.negating.remove(target.place)
    return None if opposite is None else [opposite]


def _negated_parts(
    writer: SchemaWriter, node: Node, words: Mapping[str, Any], keyword: str, depth: int, may_leave_out: bool
) -> list[Written | None]:
    parts = writer.parts(node, words, keyword)
    return [negated(writer, each, depth + 1, may_leave_out) for each in parts]


def _negated_properties(
    writer: SchemaWriter, node: Node, properties: Mapping[str, Any], depth: int, may_leave_out: bool
) -> list[Written] | None:
    options: list[Written] = []
    for name, each in properties.items():
        opposite = negated(writer, node.inside(each, "properties", name), depth + 1, may_leave_out)
        if opposite is None and not may_leave_out:
            return None
        if opposite is not None and opposite is not False:
            options.append({"type": "object", "required": [name], "properties": {name: opposite}})
    return options


def values_but(values: list[Any]) -> Written:
    """Return a schema of all values except these.

    If there is an array or object among `values`, the schema excludes all arrays or all objects.
    """
    kinds = other_kinds(type_of(value) for value in values)
    options: list[Written] = [{"type": kinds}] if kinds else []
    texts = [value for value in values if isinstance(value, str)]
    if texts:
        options.append({"type": "string", "pattern": other_than(texts)})
    flags = {value for value in values if isinstance(value, bool)}
    if len(flags) == 1:
        options.append({"const": not flags.pop()})
    numbers = sorted({float(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool)})
    if numbers:
        edges: list[float | None] = [None, *numbers, None]
        for low, high in itertools.pairwise(edges):
            bounds = {"exclusiveMinimum": low, "exclusiveMaximum": high}
            options.append({"type": "number", **{k: v for k, v in bounds.items() if v is not None}})
    return _any_of(options)


# -------------------------------------------------------------------- oneOf


@dataclass(slots=True)
class _Option:
    """An alternative of oneOf, and the values to exclude from it.

    Attributes:
        node: The alternative.
        facts: The facts about its values.
        kinds: Types that another alternative has too.
        values: Values that another alternative has too.
        names: Properties that another alternative requires, and that are therefore forbidden in this one.
        is_filled: Whether to exclude empty arrays, the only arrays that another alternative has too.
        opposites: Schemas that exclude the values of other alternatives if the attributes above cannot.
    """

    node: Node
    facts: Facts
    kinds: set[str] = field(default_factory=set[str])
    values: list[Any] = field(default_factory=list[Any])
    names: list[str] = field(default_factory=list[str])
    is_filled: bool = False
    opposites: list[Written] = field(default_factory=list[Any])


def _one_of(writer: SchemaWriter, node: Node, given: list[Node]) -> Written:
    """Translate oneOf to anyOf, after excluding from each alternative the values of other alternatives."""
    around = replace(
        node, value={k: v for k, v in node.value.items() if k not in ("oneOf", "anyOf", "not", "if")}
    )
    options = [_Option(each, writer.overlaps.facts([each])) for each in given]
    for index, one in enumerate(options):
        for other in options[:index]:
            shared = writer.overlaps.shared_types([around, other.node], [around, one.node])
            for kind in sorted(shared):
                if not (
                    _part_values(writer, other, one, kind)
                    or _part_arrays(writer, other, one, kind)
                    or _part_objects(other, one, kind)
                    or _part_untyped(other, one, kind)
                    or _part_by_opposites(writer, other, one, kind)
                ):
                    raise refused(
                        one.node.path,
                        f"{other.node.path} may hold too, for {_ARTICLES[kind]}, and a text of both would not be "
                        "valid by oneOf: use anyOf, or tell them apart, such as by a property that both "
                        "require, with another const in each",
                    )
    written = _any_of([_written_option(writer, each) for each in options])
    if written is False:
        raise refused(node.path, "oneOf has no value that is valid by exactly one of its schemas")
    return written


_ARTICLES = {
    "null": "null",
    "boolean": "a boolean",
    "integer": "an integer",
    "fraction": "a number",
    "string": "a string",
    "array": "an array",
    "object": "an object",
}


def _part_values(writer: SchemaWriter, first: _Option, second: _Option, kind: str) -> bool:
    """Separate alternatives of simple values; return whether that is possible."""
    if words_about(first.facts, kind) or words_about(second.facts, kind):
        return False
    for one, other in ((first, second), (second, first)):
        if one.facts.values is not None:
            common = [
                value
                for value in one.facts.values
                if type_of(value) == kind and not writer.overlaps.excludes(other.facts, value)
            ]
            for option in (first, second):
                option.values += [v for v in common if not any(is_same(v, known) for known in option.values)]
            return True
    first.kinds.add(kind)
    second.kinds.add(kind)
    return True


def _part_arrays(writer: SchemaWriter, first: _Option, second: _Option, kind: str) -> bool:
    """Make two alternatives of arrays disjoint if their items have no common type; return whether that is so.

    Only the empty array would then fit both, so both are limited to arrays with items.
    """
    items, others = first.facts.items, second.facts.items
    if kind != "array" or not items or not others or writer.overlaps.shared_types(items, others):
        return False
    first.is_filled = second.is_filled = True
    return True


def _part_objects(first: _Option, second: _Option, kind: str) -> bool:
    """Separate alternatives that require different properties, by excluding the other's properties."""
    if kind != "object":
        return False
    for one, other in ((first, second), (second, first)):
        telling = [name for name in other.facts.required if name not in one.facts.required]
        telling.sort(key=lambda name: name in one.facts.properties)
        if telling:
            one.names += [] if any(name in one.names for name in telling) else telling[:1]
        elif words_about(other.facts, kind) <= {"required"}:
            one.kinds.add("object")  # the other alternative's object keywords apply to all of its objects
        else:
            return False
    return True


def _part_untyped(first: _Option, second: _Option, kind: str) -> bool:
    """Separate untyped alternatives about objects, by excluding other types."""
    is_untyped = kind != "object" and first.facts.types == second.facts.types == set(TYPES)
    if is_untyped and all(each.facts.words & {"required", "properties"} for each in (first, second)):
        first.kinds.add(kind)
        second.kinds.add(kind)
        return True
    return False


_MAX_OPPOSITES = 12


def _part_by_opposites(writer: SchemaWriter, first: _Option, second: _Option, kind: str) -> bool:
    """Exclude each alternative's values from the other, if the negation of an alternative can be written."""
    found = [_outside(writer, one, other) for one, other in ((first, second), (second, first))]
    if not all(_leaves(each, kind) for each in found):
        return False
    for option, opposite in zip((first, second), found):
        if opposite is not None and opposite not in option.opposites:
            option.opposites.append(opposite)
    return max(len(first.opposites), len(second.opposites)) <= _MAX_OPPOSITES


def _leaves(opposite: Written | None, kind: str) -> bool:
    """Return whether a schema may allow values of a type."""
    if opposite is None or isinstance(opposite, bool):
        return opposite is True
    options = cast("list[Written]", opposite.get("anyOf", [opposite]))
    return any(
        "type" not in each or kind in types_of(each["type"]) for each in options if not isinstance(each, bool)
    )


def _outside(writer: SchemaWriter, option: _Option, other: _Option) -> Written | None:
    """Return a schema for the values of `option` that are not values of `other`.

    If possible, the schema requires a property that `other` forbids.
    """
    own = [name for name in option.facts.properties if any(name not in names for names in other.facts.closed)]
    if own:
        return _any_of([{"type": "object", "required": [name]} for name in own])
    return negated(writer, other.node, may_leave_out=True)


def _written_option(writer: SchemaWriter, option: _Option) -> Written:
    parts = [writer.write(option.node)]
    if option.facts.types <= option.kinds:
        return False
    if option.kinds:
        if len(option.kinds & {"integer", "fraction"}) == 1 and {"integer", "fraction"} <= option.facts.types:
            raise refused(
                option.node.path,
                "another alternative of oneOf has all integers too, and numbers without them cannot be followed",
            )
        kinds = other_kinds(option.kinds)
        parts.append({"type": kinds} if kinds else False)
    if option.values:
        parts.append(values_but(option.values))
    if option.is_filled:
        parts.append({"minItems": 1})
    parts += option.opposites
    if option.names:
        parts.append({"properties": dict.fromkeys(option.names, False)})
    return _all_of(parts)

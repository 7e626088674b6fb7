"""Translate the keywords about objects for llguidance."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from typing import Any

from inflight.guided.schemas import choices
from inflight.guided.schemas.documents import Node, keywords_of, refused, shown
from inflight.guided.schemas.formats import FORMATS
from inflight.guided.schemas.schema_writer import SchemaWriter, Written
from inflight.json_values import is_list, is_object

_MAX_OPTIONS = 100
_MAX_DEPENDENCIES = 8
_LONGEST_NAME = 2**31
"""The maximum count in Rust's regular expressions."""
_MAPS = ("properties", "patternProperties", "dependentRequired", "dependentSchemas")


def write_objects(
    writer: SchemaWriter, node: Node, words: Mapping[str, Any], written: dict[str, Any], parts: list[Written]
) -> None:
    """Write the keywords about objects into `written`, and append further schemas that must hold to `parts`."""
    _check_maps(node, words)
    required = words.get("required", [])
    if not is_list(required) or not all(isinstance(each, str) for each in required):
        raise refused(node.path, f"required is {shown(required)}, expected an array of texts")
    if "properties" in words:
        written["properties"] = {
            name: writer.write(node.inside(each, "properties", name))
            for name, each in words["properties"].items()
        }
    if required:
        written["required"] = list(dict.fromkeys(required))
    if "patternProperties" in words:
        written["patternProperties"] = _patterns(writer, node, words["patternProperties"])
    if "additionalProperties" in words:
        written["additionalProperties"] = writer.write(
            node.inside(words["additionalProperties"], "additionalProperties")
        )
    if "propertyNames" in words:
        _write_names(writer, node, words, written)
    _write_dependencies(writer, node, words, written, parts)
    if words.get("unevaluatedProperties", True) not in (True, {}):
        _write_unevaluated(writer, node, words, parts)
    _write_sizes(writer, node, words, written, parts)


def _check_maps(node: Node, words: Mapping[str, Any]) -> None:
    for keyword in _MAPS:
        if not isinstance(words.get(keyword, {}), dict):
            raise refused(node.path, f"{keyword} is {shown(words[keyword])}, expected an object")


def _patterns(writer: SchemaWriter, node: Node, given: Mapping[str, Any]) -> dict[str, Written]:
    """Return the schemas of patternProperties by Rust expressions for the names.

    Equal schemas share one expression, because llguidance forbids overlapping expressions.
    """
    groups: list[tuple[list[str], Written]] = []
    for expression, each in given.items():
        pattern = writer.pattern(node, expression, "patternProperties")
        schema = writer.write(node.inside(each, "patternProperties", expression))
        same = next((patterns for patterns, other in groups if other == schema), None)
        if same is None:
            groups.append(([pattern], schema))
        else:
            same.append(pattern)
    written = {
        "|".join(f"(?:{each})" for each in patterns) if len(patterns) > 1 else patterns[0]: schema
        for patterns, schema in groups
    }
    if any(map(_is_of_ascii, given)):
        # In some validators \w includes letters of all scripts, so names on which validators disagree are
        # excluded.
        written.setdefault(r"[^\x00-\x7f]", False)
    return written


def _is_of_ascii(expression: str) -> bool:
    """Return whether an expression for whole names matches only ASCII names in ECMA 262, but more elsewhere."""
    outside = re.sub(r"\[(?!\^)(?:[^\]\\]|\\[^WDS])*\]", "w", expression)
    is_whole = re.fullmatch(r"\^[^|^\[.]*\$", outside) is not None
    return is_whole and bool(re.search(r"\\[wd]", expression)) and not re.search(r"\\[WDS.]", outside)


def _write_names(writer: SchemaWriter, node: Node, words: Mapping[str, Any], written: dict[str, Any]) -> None:
    """Translate `propertyNames`: names become `properties`, an expression becomes one of `patternProperties`."""
    names = node.inside(words["propertyNames"], "propertyNames")
    facts = writer.overlaps.facts([names])
    properties: dict[str, Any] = dict(written.get("properties", {}))
    additional: Written = written.get("additionalProperties", True)
    if "string" not in facts.types or names.value is False:
        written["properties"] = dict.fromkeys(properties, False)
        written["additionalProperties"] = False
        written.pop("patternProperties", None)
        return
    # Only one expression for names is supported, so a format beside a pattern is ignored as an annotation.
    forms = [] if facts.patterns else list(dict.fromkeys(facts.formats))
    if not facts.words and not forms:
        return
    writer.write(names)  # raises for invalid parts
    if "patternProperties" in written:
        raise refused(node.path, "propertyNames beside patternProperties cannot be followed: use one of them")
    listed = writer.listed(names)
    if listed is not None:
        allowed = [each for each in listed if isinstance(each, str)]
        written["properties"] = {
            **{name: each if name in allowed else False for name, each in properties.items()},
            **{name: additional for name in allowed if name not in properties},
        }
        written["additionalProperties"] = False
        return
    length = ""
    if facts.words & {"minLength", "maxLength"}:
        low, high = facts.bounds["length"]
        if low > _LONGEST_NAME:
            raise refused(
                names.path, f"minLength is {low}, expected at most {_LONGEST_NAME} in propertyNames"
            )
        highest = str(int(high)) if high <= _LONGEST_NAME else ""
        length = f"^(?s:.){{{int(max(0, low))},{highest}}}$"
    rules = [
        *(rule for each in facts.patterns for rule in writer.patterns(names, each, "pattern")),
        *(FORMATS[form] for form in forms),
        *filter(None, [length]),
    ]
    if facts.words - {"pattern", "minLength", "maxLength"} or len(rules) != 1:
        raise refused(
            names.path,
            "propertyNames can be followed if it has one of enum, pattern, format and length",
        )
    matched = {name: writer.overlaps.matches(rules[0], name) for name in properties}
    if None in matched.values():
        raise refused(
            names.path,
            "propertyNames is too complex to tell which of properties it allows: write a simpler pattern",
        )
    written["properties"] = {name: each if matched[name] else False for name, each in properties.items()}
    written["patternProperties"] = {rules[0]: additional}
    written["additionalProperties"] = False


def _write_dependencies(
    writer: SchemaWriter, node: Node, words: Mapping[str, Any], written: dict[str, Any], parts: list[Written]
) -> None:
    required: list[str] = written.get("required", [])
    kinds = {"type": written["type"]} if "type" in written else {}
    options: list[Written] = []
    for name, others in words.get("dependentRequired", {}).items():
        if not is_list(others) or not all(isinstance(each, str) for each in others):
            raise refused(node.path, f"dependentRequired has {shown(others)}, expected an array of texts")
        if name in required:
            required += [each for each in others if each not in required]
        elif others:
            needed = {**kinds, "required": list(dict.fromkeys([name, *others]))}
            options.append({"anyOf": [{**kinds, "properties": {name: False}}, needed]})
    for name, each in words.get("dependentSchemas", {}).items():
        schema = writer.write(node.inside(each, "dependentSchemas", name))
        if name in required:
            parts.append(schema)
        elif schema is False:
            parts.append({**kinds, "properties": {name: False}})
        elif schema is not True:
            present = {"allOf": [{**kinds, "required": [name]}, schema]}
            options.append({"anyOf": [{**kinds, "properties": {name: False}}, present]})
    if len(options) > _MAX_DEPENDENCIES:
        raise refused(
            node.path,
            f"there are {len(options)} properties that others depend on, expected at most {_MAX_DEPENDENCIES}",
        )
    parts += options


def _write_unevaluated(
    writer: SchemaWriter, node: Node, words: Mapping[str, Any], parts: list[Written]
) -> None:
    names: dict[str, bool] = {}
    patterns: dict[str, bool] = {}
    if _gather_evaluated(writer, node, names, patterns, {node.place}):
        return
    other = writer.write(node.inside(words["unevaluatedProperties"], "unevaluatedProperties"))
    part: dict[str, Any] = {"properties": names, "additionalProperties": other}
    if patterns:
        part["patternProperties"] = patterns
    parts.append(part)


def _gather_evaluated(
    writer: SchemaWriter,
    node: Node,
    names: dict[str, bool],
    patterns: dict[str, bool],
    seen: set[tuple[str, str]],
    is_asker: bool = True,
) -> bool:
    """Collect the properties that a schema evaluates; return whether it evaluates all properties.

    Args:
        seen: Parts that have been visited, or are being visited.
        is_asker: Whether this is the schema that has unevaluatedProperties.
    """
    if not is_object(node.value):
        return False
    writer.overlaps.count_step(node)
    words = keywords_of(node)
    _check_maps(node, words)
    knows_all = "additionalProperties" in words or (not is_asker and "unevaluatedProperties" in words)
    for name in words.get("properties", {}):
        names[name] = True
    for expression in words.get("patternProperties", {}):
        patterns[writer.pattern(node, expression, "patternProperties")] = True
    inner = writer.parts(node, words, "allOf") if "allOf" in words else []
    if "$ref" in words:
        inner.append(writer.document.target(node, "$ref", words["$ref"]))
    for each in inner:
        if each.place not in seen:
            seen.add(each.place)
            knows_all = _gather_evaluated(writer, each, names, patterns, seen, is_asker=False) or knows_all
    if other := (choices.IN_PLACE - {"allOf", "$ref", "not"}) & words.keys():
        raise refused(
            node.path,
            f"unevaluatedProperties beside {sorted(other)[0]} cannot be followed: use additionalProperties",
        )
    return knows_all


def _write_sizes(
    writer: SchemaWriter, node: Node, words: Mapping[str, Any], written: dict[str, Any], parts: list[Written]
) -> None:
    """Translate limits of the number of properties. llguidance counts only properties without own schema."""
    least = writer.count(node, words, "minProperties") or 0
    most = writer.count(node, words, "maxProperties")
    required: list[str] = written.get("required", [])
    properties: dict[str, Written] = written.get("properties", {})
    optional = [name for name, each in properties.items() if name not in required and each is not False]
    is_closed = written.get("additionalProperties") is False and not written.get("patternProperties")
    if most is not None and is_closed and len(optional) + len(required) <= most:
        most = None
    missing = max(0, least - len(required))
    if not missing and most is None:
        return
    if most is not None and most < max(least, len(required)):
        parts.append(_no_objects(written))
        return
    sizes = {
        **({"minProperties": len(required) + missing} if missing else {}),
        **({"maxProperties": most} if most is not None else {}),
    }
    if not optional:
        if missing > 1:
            raise refused(node.path, f"minProperties {least}: {_MORE_THAN_ONE}")
        written.update(sizes)
        return
    kinds = {"type": written["type"]} if "type" in written else {}
    options: list[Written] = []
    highest = missing if most is None else min(most - len(required), len(optional))
    for size in range(missing, highest + 1):
        if sum(math.comb(len(optional), each) for each in range(missing, size + 1)) > _MAX_OPTIONS:
            raise refused(
                node.path,
                f"minProperties or maxProperties beside {len(optional)} properties cannot be followed",
            )
        for names in itertools.combinations(optional, size):
            option: dict[str, Any] = {**kinds, "required": [*required, *names]}
            if most is not None:
                option["properties"] = dict.fromkeys(option["required"], True)
                option["additionalProperties"] = False
            options.append(option)
    named = max(0, missing - 1)
    # The alternative without named properties.
    if not is_closed and math.comb(len(optional), named) <= _MAX_OPTIONS:
        for names in itertools.combinations(optional, named):
            absent = dict.fromkeys((name for name in optional if name not in names), False)
            options.append({**kinds, "required": [*required, *names], "properties": absent, **sizes})
    if not options and not is_closed:
        raise refused(node.path, f"minProperties {least}: {_MORE_THAN_ONE}")
    parts.append({"anyOf": options} if options else _no_objects(written))


def _no_objects(written: Mapping[str, Any]) -> Written:
    return False if written.get("type") == "object" else {"type": choices.other_kinds({"object"})}


_MORE_THAN_ONE = (
    "several properties that are not named in properties cannot be asked for, as one of them may come twice"
)

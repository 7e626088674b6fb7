"""Translate a JSON schema to one that llguidance enforces exactly; see the package's docstring."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from typing import Any

from inflight.errors import InvalidArgument, Name
from inflight.guided.schemas import choices, objects
from inflight.guided.schemas.documents import Document, Node, keywords_of, refused, shown
from inflight.guided.schemas.formats import FORMATS
from inflight.guided.schemas.overlap import LARGEST, is_same, key_of, types_of
from inflight.guided.schemas.schema_writer import SchemaWriter, Written
from inflight.guided.schemas.spaces import KEYWORD, read_spaces
from inflight.json_values import is_list, is_object

_KINDS = ("null", "boolean", "integer", "number", "string", "array", "object")
_ESCAPES = 'nrbtf\\"'
"""Allowed escapes in strings. \\u is excluded, because it would allow a second spelling of a property's
name."""
_MAX_ORDERS = 400
_MAX_CONTAINED = 20


def followed_schema(text: str, path: str = "#", is_watched: bool = False) -> str:
    """Translate a JSON schema to one that llguidance enforces exactly.

    Args:
        text: The schema as JSON text.
        path: The name of the schema's root in errors.
        is_watched: Whether an `ItemWatch` enforces uniqueItems.

    Raises:
        InvalidArgument: The text is not a JSON schema or has an unsupported part. The message has the part's
            path.
    """
    try:
        schema = json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise refused(path, "the schema is nested too deeply") from None
    except ValueError as error:
        raise InvalidArgument(
            Name("guided_decoding_guide"), f" must be a JSON schema, got {text[:80]!r}: {error}"
        ) from None
    spaces = read_spaces(schema, path)
    writer = None
    try:
        writer = Writer(Document(schema, path), is_watched)
        written = writer.write(writer.document.root)
    except RecursionError:
        raise refused(path, "the schema is nested too deeply") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        place = path if writer is None else writer.latest.path
        raise refused(place, "a keyword has an invalid value") from None
    if written is False:
        raise refused(path, "the schema is false: no value is valid by it")
    options = {**spaces.options(), "json_allowed_escapes": _ESCAPES}
    whole = {KEYWORD: options, "$defs": writer.definitions, **({} if written is True else written)}
    return json.dumps(whole)


def _no_constant(name: str) -> Any:
    raise ValueError(f"it has {name}, which is not JSON")


class Writer(SchemaWriter):
    """Translates one document, keyword by keyword."""

    def __init__(self, document: Document, is_watched: bool) -> None:
        super().__init__(document)
        self._is_watched = is_watched
        self._names: dict[tuple[str, str], str] = {}
        self._open: set[str] = set()  # definitions that are being written

    def write(self, node: Node) -> Written:
        """Return the translation of a schema."""
        self.latest = node
        if isinstance(node.value, bool):
            return node.value
        if not is_object(node.value):
            raise refused(node.path, f"the schema is {shown(node.value)}, expected an object or a boolean")
        words = keywords_of(node)
        written: dict[str, Any] = {}
        parts: list[Written] = []
        kinds = self._kinds(node, words)
        if kinds is not None:
            written["type"] = kinds if len(kinds) != 1 else kinds[0]
        types = types_of(kinds) if kinds is not None else types_of(list(_KINDS))
        self._write_values(node, words, written)
        if types & {"integer", "fraction"}:
            self._write_numbers(node, words, written)
        if "string" in types:
            self._write_strings(node, words, written, parts)
        if "array" in types:
            self._write_arrays(node, words, written, parts)
        if "object" in types:
            objects.write_objects(self, node, words, written, parts)
        choices.write_choices(self, node, words, parts)
        reference = self._reference(node, words)
        if isinstance(reference, bool):
            parts.append(reference)
        return _assembled(node, written, parts, {} if isinstance(reference, bool) else reference)

    def _kinds(self, node: Node, words: Mapping[str, Any]) -> list[str] | None:
        if "type" not in words:
            return None
        value = words["type"]
        kinds = value if is_list(value) else [value]
        if not kinds or any(each not in _KINDS for each in kinds):
            raise refused(
                node.path, f"type is {shown(value)}, expected one or several of {', '.join(_KINDS)}"
            )
        return list(dict.fromkeys(kinds))

    def _reference(self, node: Node, words: Mapping[str, Any]) -> dict[str, str] | bool:
        """Translate `$ref` or one of its dynamic forms to a reference to a definition of the written schema.

        Returns a boolean instead if the target is one; True if there is no reference.
        """
        found = [keyword for keyword in ("$ref", "$dynamicRef", "$recursiveRef") if keyword in words]
        if not found:
            return True
        if len(found) > 1:
            raise refused(
                node.path, f"{found[0]} and {found[1]} are used together, expected only one of them"
            )
        target = self.document.target(node, found[0], words[found[0]])
        key = target.place
        if key not in self._names:
            name = self._names[key] = f"s{len(self._names)}"
            self._open.add(name)
            self.definitions[name] = self.write(target)
            self._open.remove(name)
        name = self._names[key]
        if name not in self._open and isinstance(done := self.definitions[name], bool):
            return done
        return {"$ref": f"#/$defs/{self._names[key]}"}

    def _write_values(self, node: Node, words: Mapping[str, Any], written: dict[str, Any]) -> None:
        if "const" in words:
            _check_value(node, words["const"], "const")
            written["const"] = words["const"]
        if "enum" in words:
            values = words["enum"]
            if not is_list(values) or not values:
                raise refused(node.path, f"enum is {shown(values)}, expected an array of values")
            for value in values:
                _check_value(node, value, "enum")
            written["enum"] = values

    def _write_numbers(self, node: Node, words: Mapping[str, Any], written: dict[str, Any]) -> None:
        for keyword in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
            bound = self.number(node, words, keyword)
            if bound is None:
                continue
            is_low = "Min" in keyword or keyword == "minimum"
            if (bound if is_low else -bound) > LARGEST:
                raise refused(
                    node.path, f"{keyword} is {shown(bound)}, expected at most {LARGEST} in magnitude"
                )
            written[keyword] = max(bound, -LARGEST) if is_low else min(bound, LARGEST)
        factor = self.number(node, words, "multipleOf")
        if factor is not None:
            if not 0 < factor <= LARGEST:
                raise refused(
                    node.path,
                    f"multipleOf is {shown(factor)}, expected a number above 0 and at most {LARGEST}",
                )
            written["multipleOf"] = factor

    def _write_strings(
        self, node: Node, words: Mapping[str, Any], written: dict[str, Any], parts: list[Written]
    ) -> None:
        for keyword in ("minLength", "maxLength"):
            length = self.count(node, words, keyword)
            if length is not None:
                written[keyword] = length
        patterns = self.patterns(node, words["pattern"], "pattern") if "pattern" in words else []
        form = words.get("format")
        if isinstance(form, str) and form in FORMATS:
            patterns.append(FORMATS[form])
        kinds = {"type": written["type"]} if "type" in written else {}
        for index, each in enumerate(patterns):
            if index:
                parts.append({**kinds, "pattern": each})
            else:
                written["pattern"] = each

    # ---------------------------------------------------------------- arrays

    def _write_arrays(
        self, node: Node, words: Mapping[str, Any], written: dict[str, Any], parts: list[Written]
    ) -> None:
        least, most = self.count(node, words, "minItems"), self.count(node, words, "maxItems")
        contained = self._contained(node, words)
        if contained is not None:
            least = max(least or 0, contained[0])
            if words["contains"] in (True, {}) or contained[0] > contained[1]:
                most = min(most if most is not None else LARGEST, contained[1])
            else:
                self._write_contained(node, words, contained, parts)
        if words.get("uniqueItems", False) is not False and (most is None or most > 1):
            if words["uniqueItems"] is not True:
                raise refused(
                    node.path, f"uniqueItems is {shown(words['uniqueItems'])}, expected true or false"
                )
            unique = self._unique(node, words, least or 0, most)
            if unique is not None:
                parts.append(unique)
                return
        if least:
            written["minItems"] = least
        if most is not None and most < LARGEST:
            written["maxItems"] = most
        if "prefixItems" in words:
            written["prefixItems"] = [self.write(each) for each in self.parts(node, words, "prefixItems")]
        if "items" in words:
            written["items"] = self.write(node.inside(words["items"], "items"))
        elif words.get("unevaluatedItems", True) not in (True, {}):
            other = choices.IN_PLACE & words.keys()
            if other:
                raise refused(
                    node.path, f"unevaluatedItems beside {sorted(other)[0]} cannot be followed: use items"
                )
            written["items"] = self.write(node.inside(words["unevaluatedItems"], "unevaluatedItems"))

    def _contained(self, node: Node, words: Mapping[str, Any]) -> tuple[int, int] | None:
        """Return (least, most) items that `contains` requires; None if it requires none."""
        if "contains" not in words:
            return None
        least, most = self.count(node, words, "minContains"), self.count(node, words, "maxContains")
        least = 1 if least is None else least
        if least == 0 and most is None:
            return None
        return least, LARGEST if most is None else most

    def _write_contained(
        self, node: Node, words: Mapping[str, Any], counts: tuple[int, int], parts: list[Written]
    ) -> None:
        """Translate `contains` so that the required items come first in the array, which a grammar can express."""
        least, most = counts
        if {"prefixItems", "unevaluatedItems"} & words.keys() or least > _MAX_CONTAINED:
            raise refused(
                node.path,
                f"contains beside prefixItems or unevaluatedItems, or for more than {_MAX_CONTAINED} items, "
                "cannot be followed: use only prefixItems",
            )
        inner = node.inside(words["contains"], "contains")
        part: dict[str, Any] = {"prefixItems": [self.write(inner)] * least}
        if most < LARGEST:
            opposite = choices.negated(self, inner)
            if opposite is None:
                raise refused(inner.path, "maxContains cannot be followed for this schema")
            part["items"] = opposite
        parts.append(part)

    def _unique(self, node: Node, words: Mapping[str, Any], least: int, most: int | None) -> Written | None:
        """Return a schema of arrays with unique items, in any order or in the order of the enum.

        Returns None if an ItemWatch enforces uniqueItems.
        """
        values = self.listed(node.inside(words["items"], "items")) if "items" in words else None
        if values is None or {"prefixItems", "contains"} & words.keys():
            if self._is_watched:
                return None
            raise refused(
                node.path,
                "uniqueItems is true, and that no two items are equal is followed only where items is an enum "
                "or boolean, or maxItems is 1: leave it out, and check the answer",
            )
        sizes = range(least, min(len(values), len(values) if most is None else most) + 1)
        if sum(math.perm(len(values), size) for size in sizes) <= _MAX_ORDERS:
            arrays = [list(each) for size in sizes for each in itertools.permutations(values, size)]
        elif sum(math.comb(len(values), size) for size in sizes) <= _MAX_ORDERS:
            arrays = [list(each) for size in sizes for each in itertools.combinations(values, size)]
        elif self._is_watched:
            return None
        else:
            raise refused(
                node.path,
                f"uniqueItems is true for an enum of {len(values)} values, which makes more than {_MAX_ORDERS} "
                "arrays: lower maxItems, or leave it out and check the answer",
            )
        others = [kind for kind in _KINDS if kind != "array"]
        return {"anyOf": [*([{"enum": arrays}] if arrays else []), {"type": others}]}

    def listed(self, node: Node) -> list[Any] | None:
        """Return the distinct values that a schema allows; None if it does not list them."""
        facts = self.overlaps.facts([node])
        if facts.words - {"enum", "const"}:
            return None
        values = facts.values
        if values is None and facts.types and facts.types <= {"boolean", "null"}:
            values = [value for kind, value in choices.BARE_VALUES if kind in facts.types]
        if values is None:
            return None
        distinct: dict[str, Any] = {}
        for value in values:
            _check_value(node, value, "enum")
            if self.overlaps.excludes(facts, value) or not self._has_formats(value, facts.formats):
                continue
            if not any(is_same(value, v) for v in distinct.values()):
                distinct[key_of(value)] = value
        return list(distinct.values())

    def _has_formats(self, value: Any, formats: list[str]) -> bool:
        """Return whether a value certainly has these formats. A value that is not a string has every format."""
        return not isinstance(value, str) or all(self.overlaps.matches(FORMATS[f], value) for f in formats)


def _check_value(node: Node, value: Any, keyword: str) -> None:
    """Raise InvalidArgument if a value, or a value nested in it, cannot occur in generated text."""
    if is_list(value):
        for each in value:
            _check_value(node, each, keyword)
    elif is_object(value):
        for each in value.values():
            _check_value(node, each, keyword)
    elif isinstance(value, str):
        wrong = next(
            (char for char in value if (ord(char) < 32 and char not in "\n\r\t\b\f") or char == "\x7f"), ""
        )
        if wrong or any(0xD800 <= ord(char) < 0xE000 for char in value):
            what = f"the control character U+{ord(wrong):04X}" if wrong else "half a character"
            raise refused(node.path, f"{keyword} has a text with {what}, which cannot be followed")
    elif isinstance(value, int | float) and not isinstance(value, bool) and abs(value) > LARGEST:
        raise refused(node.path, f"{keyword} has {shown(value)}, expected at most {LARGEST} in magnitude")


def _assembled(
    node: Node, written: dict[str, Any], parts: list[Written], reference: dict[str, str]
) -> Written:
    """Combine the translated parts to one schema.

    Properties are in the order in which they are first mentioned.
    """
    parts = [each for each in parts if each is not True and each != {}]
    if False in parts:
        return False
    combined: dict[str, Any] = dict(reference)
    if len(parts) == 1 and is_object(parts[0]) and parts[0].keys() == {"anyOf"}:
        combined["anyOf"] = parts[0]["anyOf"]
    elif parts:
        combined["allOf"] = parts
    if not written and not combined:
        return True
    order = [
        each for each in node.value if each in ("properties", "$ref", "allOf", "anyOf", "oneOf", "extends")
    ]
    return {**written, **combined} if not order or order[0] == "properties" else {**combined, **written}

"""A JSON schema as a document: the dialect of its parts, the targets of references, and paths.

`keywords_of` converts the keywords of every draft to the keywords of 2020-12. Any thread.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast
from urllib.parse import unquote, urldefrag, urljoin

from inflight.errors import InvalidArgument, Name
from inflight.json_values import is_list, is_object

_DRAFTS = {
    "http://json-schema.org/draft-03/schema": 3,
    "http://json-schema.org/draft-04/schema": 4,
    "http://json-schema.org/draft-06/schema": 6,
    "http://json-schema.org/draft-07/schema": 7,
    "http://json-schema.org/draft/2019-09/schema": 8,
    "http://json-schema.org/draft/2020-12/schema": 9,
}
_ALL = 0
"""The dialect of a schema that names no dialect. Keywords of every draft are accepted, with their meanings."""
_SINCE = {
    **dict.fromkeys(("oneOf", "minProperties", "maxProperties"), 4),
    **dict.fromkeys(("const", "contains", "propertyNames"), 6),
    **dict.fromkeys(("if", "then", "else"), 7),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "minContains", "maxContains"), 8),
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties", "$recursiveRef"), 8),
    **dict.fromkeys(("prefixItems", "$dynamicRef"), 9),
}
"""The first draft that has a keyword. In earlier drafts it is ignored, as an annotation. Keywords of draft 3
that were renamed later are not in this table."""
_UNTIL = {"extends": 3, "disallow": 3, "divisibleBy": 3, "$recursiveRef": 8}
_MAPS = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas", "dependencies")
"""Keywords whose value is an object of schemas."""
_APPLICATORS = frozenset(
    [
        "allOf",
        "anyOf",
        "oneOf",
        "not",
        "if",
        "then",
        "else",
        "items",
        "prefixItems",
        "additionalItems",
        "contains",
    ]
    + ["additionalProperties", "propertyNames", "unevaluatedItems", "unevaluatedProperties", "extends"]
)
"""Keywords whose value is a schema or an array of schemas."""


def refused(path: str, reason: str) -> InvalidArgument:
    """Return the error for a schema that cannot be followed.

    Args:
        path: The schema's path, as a JSON pointer.
        reason: A sentence that begins with the keyword.
    """
    return InvalidArgument(Name("guided_decoding_guide"), f" cannot be used: at {path}: {reason}")


def shown(value: object) -> str:
    """Return a value's text for an error."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:60] + "…"


@dataclass(frozen=True, slots=True)
class Node:
    """A schema inside of a document.

    Attributes:
        value: The schema as written.
        path: The schema's path, as a JSON pointer.
        base: The base URI of the schema's references, without a fragment.
        draft: The dialect: 3, 4, 6, 7, 8 (2019-09) or 9 (2020-12); 0 if none is named.
    """

    value: Any
    path: str
    base: str
    draft: int

    @property
    def place(self) -> tuple[str, str]:
        """The identity of the node among all nodes of its document."""
        return self.path, self.base

    def inside(self, value: Any, *steps: str | int) -> Node:
        """Return a part of this schema."""
        path = self.path + "".join("/" + str(step).replace("~", "~0").replace("/", "~1") for step in steps)
        return _entered(replace(self, value=value, path=path))


def _entered(node: Node, is_root: bool = False) -> Node:
    """Return the node with the base URI and the dialect that its schema declares, if it declares them."""
    if not is_object(node.value):
        return node
    value = node.value
    base, draft = node.base, node.draft
    named = value.get("$schema")
    if isinstance(named, str):
        draft = _DRAFTS.get(named.replace("https:", "http:").rstrip("#"), _ALL)
    if given := _id_of(value, draft, is_root):
        base = urldefrag(urljoin(base, given)).url
    return replace(node, base=base, draft=draft)


def _id_of(schema: Mapping[str, Any], draft: int, is_root: bool) -> str:
    """Return the URI that a schema declares for itself; "" if it declares none.

    The keyword is `id` in drafts 3 and 4, and `$id` later. Without a named dialect, `id` is used at the root
    only, because inside of the schema it is more often a custom keyword.
    """
    if "$ref" in schema and 0 < draft <= 7:
        return ""
    keywords = {_ALL: ("$id", "id") if is_root else ("$id",), 3: ("id",), 4: ("id",)}.get(draft, ("$id",))
    return next((given for each in keywords if isinstance(given := schema.get(each), str)), "")


class Document:
    """A whole schema, with an index of the targets of references."""

    def __init__(self, schema: Any, path: str = "#") -> None:
        self.root = _entered(Node(schema, path, "", _ALL), is_root=True)
        self._targets: dict[str, Node] = {"": self.root}
        self._dynamic: dict[str, list[Node]] = {}
        self._index(self.root)

    def _index(self, node: Node) -> None:
        """Index the URIs and anchors of this schema and all its parts."""
        if is_list(node.value):
            for index, each in enumerate(node.value):
                self._index(node.inside(each, index))
        if not is_object(node.value):
            return
        value = node.value
        self._targets.setdefault(node.base, node)
        if (given := _id_of(value, node.draft, node is self.root)).startswith("#"):
            self._targets.setdefault(node.base + given, node)
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(name := value.get(keyword), str):
                self._targets.setdefault(f"{node.base}#{name}", node)
                if keyword == "$dynamicAnchor":
                    self._dynamic.setdefault(name, []).append(node)
        if value.get("$recursiveAnchor") is True:
            self._dynamic.setdefault("$recursiveAnchor", []).append(node)
        for keyword, each in value.items():
            if keyword in _MAPS and is_object(each):
                for name, inner in each.items():
                    self._index(node.inside(inner, keyword, name))
            elif keyword in _APPLICATORS:
                self._index(node.inside(each, keyword))

    def target(self, node: Node, keyword: str, reference: Any) -> Node:
        """Return the node that a reference points to. Raises InvalidArgument if it is not in this document."""
        if not isinstance(reference, str):
            raise refused(node.path, f"{keyword} is {shown(reference)}, expected a text")
        names = "$recursiveAnchor" if keyword == "$recursiveRef" else reference.partition("#")[2]
        if keyword != "$ref" and len(self._dynamic.get(names, ())) > 1:
            raise refused(node.path, f"{keyword} {shown(reference)} may point to several places; use $ref")
        url, fragment = urldefrag(urljoin(node.base, reference))
        if reference.startswith("#"):
            url, fragment = node.base, reference[1:]
        found = self._targets.get(f"{url}#{fragment}" if fragment and fragment[0] != "/" else url)
        if found is None:
            raise refused(
                node.path,
                f"{keyword} {shown(reference)} points to nothing in this schema, and others are not fetched: "
                "put it under $defs",
            )
        return self._walk(found, fragment, node, keyword) if fragment.startswith("/") else found

    def _walk(self, found: Node, pointer: str, node: Node, keyword: str) -> Node:
        for step in pointer.split("/")[1:]:
            name = unquote(step).replace("~1", "/").replace("~0", "~")
            value: Any = found.value
            if is_list(value) and name.isdigit() and int(name) < len(value):
                found = found.inside(value[int(name)], name)
            elif is_object(value) and name in value:
                found = found.inside(value[name], name)
            else:
                raise refused(
                    node.path, f"{keyword} {shown(node.value[keyword])} points to nothing: there is no {name}"
                )
        return found


def keywords_of(node: Node) -> dict[str, Any]:
    """Return the keywords of an object schema, in order, as those of 2020-12.

    An array of `items` becomes `prefixItems`, `dependencies` becomes the two keywords that replaced it, and
    so on. Keywords that the dialect does not have are left out, because they are annotations.
    """
    given = node.value
    draft = node.draft
    known = {key: value for key, value in given.items() if _is_known(key, draft)}
    if 0 < draft <= 7 and "$ref" in known:
        return {"$ref": known["$ref"]}
    _modernise_arrays(known)
    _modernise_bounds(known)
    _modernise_draft_3(node, known)
    dependencies = known.pop("dependencies", None)
    if dependencies is not None:
        if not is_object(dependencies):
            raise refused(node.path, f"dependencies is {shown(dependencies)}, expected an object")
        for name, each in dependencies.items():
            if isinstance(each, str):
                each = [each]
            keyword = "dependentRequired" if is_list(each) else "dependentSchemas"
            known[keyword] = {**known.get(keyword, {}), name: each}
    return known


def _is_known(keyword: str, draft: int) -> bool:
    if not draft:
        return True
    return _SINCE.get(keyword, 3) <= draft <= _UNTIL.get(keyword, 9)


def _modernise_arrays(known: dict[str, Any]) -> None:
    additional = known.pop("additionalItems", None)
    if is_list(known.get("items")):
        known["prefixItems"] = known.pop("items")
        if additional is not None:
            known["items"] = additional


def _modernise_bounds(known: dict[str, Any]) -> None:
    """Convert draft 4's bounds, whose exclusiveness is a separate boolean."""
    for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(known.get(exclusive), bool):
            is_exclusive = known.pop(exclusive)
            if is_exclusive and bound in known:
                known[exclusive] = known.pop(bound)


def _modernise_draft_3(node: Node, known: dict[str, Any]) -> None:
    # A boolean is read by the schema that has this one as a property.
    if isinstance(known.get("required"), bool):
        del known["required"]
    properties = known.get("properties")
    if is_object(properties) and node.draft in (_ALL, 3):
        marked = [name for name, each in properties.items() if _is_marked_required(each)]
        if marked and isinstance(known.get("required", []), list):
            known["required"] = [*known.get("required", []), *marked]
    if "divisibleBy" in known:
        factor = known.pop("divisibleBy")
        if "multipleOf" in known:
            known["allOf"] = [*known.get("allOf", []), {"multipleOf": factor}]
        else:
            known["multipleOf"] = factor
    extends = known.pop("extends", None)
    if isinstance(extends, dict | list):
        known["allOf"] = [*known.get("allOf", []), *(extends if is_list(extends) else [extends])]
    disallow = known.pop("disallow", None)
    if isinstance(disallow, str | list):
        known["not"] = {"anyOf": [known["not"], {"type": disallow}]} if "not" in known else {"type": disallow}
    kinds = known.get("type")
    if node.draft not in (_ALL, 3):
        return
    if kinds == "any" or (is_list(kinds) and "any" in kinds):
        del known["type"]
    elif is_list(kinds) and any(is_object(each) for each in kinds):
        del known["type"]
        options = [each if is_object(each) else {"type": each} for each in kinds]
        known["allOf"] = [*known.get("allOf", []), {"anyOf": options}]


def _is_marked_required(schema: Any) -> bool:
    return isinstance(schema, Mapping) and cast(Mapping[str, Any], schema).get("required") is True

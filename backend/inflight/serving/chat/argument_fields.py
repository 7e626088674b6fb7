"""How a guide forces arguments that are not one JSON object: each is a field with texts around its value.

Makes fields for arguments between tags and in Python's syntax from a function's schema. Some schemas cannot be
written this way, for example strings between tags with a pattern; then the call is forced in the format `json`.
Any thread.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

from inflight.json_values import is_list, is_object
from inflight.serving.chat.tool_formats import ArgumentStyle, ArgumentTags, ToolFormat

_OF_OBJECT = frozenset(("type", "properties", "required", "additionalProperties", "$defs", "definitions"))
_NOTES = frozenset(("title", "description", "default", "examples", "$schema", "$comment", "deprecated"))
"""Keywords without effect on which values are valid."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_REFERENCE = re.compile(r'"\$ref"\s*:\s*"(?!#/(?:\$defs|definitions)/)')


def argument_fields(form: ToolFormat, schema: Mapping[str, Any], encoded: str) -> list[dict[str, Any]] | None:
    """Return the fields of a guide's structure (`guided/structural_tags.py`) for a function's arguments.

    Args:
        form: A format whose arguments are between tags or in Python's syntax.
        schema: JSON schema of the arguments.
        encoded: The schema as JSON.

    Returns:
        None if this format cannot express the schema.
    """
    properties, required = schema.get("properties", {}), schema.get("required", [])
    is_plain = schema.keys() <= _OF_OBJECT | _NOTES and is_object(properties) and is_list(required)
    if not is_plain or not set(required) <= set(properties) or _REFERENCE.search(encoded):
        return None
    definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    fields: list[dict[str, Any]] = []
    for name, each in cast(dict[str, Any], properties).items():
        if not _NAME.fullmatch(name) or not (is_object(each) or each is True):
            return None
        value = {**definitions, **each} if is_object(each) else {}
        field = _python(name, value) if form.tags is None else _tagged(form.tags, name, value)
        if field is None:
            return None
        fields.append({**field, "is_required": name in required})
    return fields


def _python(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"begin": f"{name}=", "schema": schema, "end": ""}


def _tagged(tags: ArgumentTags, name: str, schema: dict[str, Any]) -> dict[str, Any] | None:
    """Return the field of one argument between tags; None if its value cannot be read back with its type."""
    is_text = is_free_text(schema)
    if not is_text and not _is_never_text(schema):
        return None
    key_end = tags.text_key_end if is_text and tags.text_key_end and _is_only_text(schema) else tags.key_end
    middle = f"\n{tags.value_begin}" if tags.value_begin else ""
    pad = "\n" if tags.pads else ""
    begin = f"\n{tags.key_begin}{name}{key_end}{middle}{pad}"
    if is_text:  # the text ends at the first closing tag
        return {"begin": begin, "end": tags.value_end}
    return {"begin": begin, "schema": schema, "end": f"{pad}{tags.value_end}"}


def is_free_text(schema: Mapping[str, Any]) -> bool:
    """Return whether the schema allows strings without conditions, so that any text between the tags is
    valid."""
    told = {name: value for name, value in schema.items() if name not in _NOTES | {"$defs", "definitions"}}
    if not told:
        return True
    if told.keys() == {"type"}:
        types = told["type"] if is_list(told["type"]) else [told["type"]]
        return "string" in types
    if told.keys() == {"anyOf"} and is_list(told["anyOf"]):
        choices = told["anyOf"]
        if not all(is_object(each) and each.keys() <= {"type"} | _NOTES for each in choices):
            return False
        return any(is_free_text(each) for each in choices)
    return False


def _is_only_text(schema: Mapping[str, Any]) -> bool:
    return schema.get("type") == "string"


def _is_never_text(schema: Mapping[str, Any]) -> bool:
    """Return whether no text is valid, so that the value is written as JSON."""
    if values := schema.get("enum", [schema["const"]] if "const" in schema else None):
        return is_list(values) and not any(isinstance(each, str) for each in values)
    given = schema.get("type")
    types = given if is_list(given) else [given]
    return bool(types) and None not in types and "string" not in types


def is_writable(form: ToolFormat) -> bool:
    """Return whether a guide can force arguments of this format's style."""
    return form.arguments in (ArgumentStyle.TAGS, ArgumentStyle.PYTHON)

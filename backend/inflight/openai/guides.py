"""Convert a body's fields for guided decoding to one guide of the engine. Any thread."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, cast

from inflight.core.request.guide import Guide, GuideKind
from inflight.openai.errors import ApiError, invalid
from inflight.openai.protocol import SamplingBody, StructuredOutputs

_ANY_OBJECT = '{"type": "object"}'
_FORMAT_FIELDS = {
    "text": {"type"},
    "json_object": {"type"},
    "json_schema": {"type", "json_schema"},
    "regex": {"type", "regex", "pattern"},
    "grammar": {"type", "grammar"},
    "structural_tag": {"type", "structures", "triggers", "sequence"},
}
"""Allowed keys of a response_format, by the value of its key `type`."""
_SCHEMA_FIELDS = {"name", "description", "schema", "strict"}
_FORMATS = "text, json_object, json_schema, regex, grammar or structural_tag"


def read_guide(body: SamplingBody) -> Guide | None:
    """Return the guide that a body requests, None if it requests none.

    Raises ApiError if it is invalid or not the only one.
    """
    found: dict[str, Guide] = {}
    given = {
        "guided_json": (GuideKind.JSON_SCHEMA, body.guided_json),
        "guided_regex": (GuideKind.REGEX, body.guided_regex),
        "guided_grammar": (GuideKind.EBNF_GRAMMAR, body.guided_grammar),
    }
    for name, (kind, value) in given.items():
        if value is not None:
            found[name] = Guide(kind, _text(value))
    if body.guided_whitespace_pattern is not None:
        name = "guided_whitespace_pattern"
        if "guided_json" not in found:
            raise invalid(name, f"{name} is for guided_json, which is missing")
        found["guided_json"] = _spaced(
            found["guided_json"], name, {"whitespace_pattern": body.guided_whitespace_pattern}
        )
    if body.guided_choice is not None:
        found["guided_choice"] = _choice("guided_choice", body.guided_choice)
    if body.structured_outputs is not None:
        found["structured_outputs"] = _structured(body.structured_outputs)
    if body.response_format is not None:
        guide = _response_format(body.response_format)
        if guide is not None:
            found["response_format"] = guide
    if len(found) > 1:
        names = " and ".join(found)
        raise ApiError(
            f"{names} were sent together, expected only one of them", 400, next(iter(found)), "invalid_value"
        )
    return next(iter(found.values()), None)


def _structured(asked: StructuredOutputs) -> Guide:
    name = "structured_outputs"
    found: list[Guide] = []
    if asked.json_ is not None:
        found.append(Guide(GuideKind.JSON_SCHEMA, _text(asked.json_)))
    if asked.json_object:
        found.append(Guide(GuideKind.JSON_SCHEMA, _ANY_OBJECT))
    if asked.regex is not None:
        found.append(Guide(GuideKind.REGEX, asked.regex))
    if asked.choice is not None:
        found.append(_choice(name, asked.choice))
    if asked.grammar is not None:
        found.append(Guide(GuideKind.EBNF_GRAMMAR, asked.grammar))
    if asked.structural_tag is not None:
        found.append(Guide(GuideKind.STRUCTURAL_TAG, _text(asked.structural_tag)))
    if len(found) != 1:
        kinds = "json, json_object, regex, choice, grammar and structural_tag"
        raise invalid(name, f"{name} must have exactly one of {kinds}, got {len(found)}")
    guide = found[0]
    spaces: dict[str, Any] = {}
    if asked.whitespace_pattern is not None:
        spaces["whitespace_pattern"] = asked.whitespace_pattern
    # Regular expressions, choices and grammars define their white space themselves.
    if asked.disable_any_whitespace and guide.type not in (GuideKind.REGEX, GuideKind.EBNF_GRAMMAR):
        spaces["whitespace_flexible"] = False
    if spaces and guide.type is not GuideKind.JSON_SCHEMA:
        field = "disable_any_whitespace" if asked.whitespace_pattern is None else "whitespace_pattern"
        raise invalid(name, f"{name}.{field} is for json and json_object, got {_given(asked)}")
    return _spaced(guide, name, spaces) if spaces else guide


def _given(asked: StructuredOutputs) -> str:
    """Return the name of the kind of guide that the body has."""
    named = {"regex": asked.regex, "choice": asked.choice, "grammar": asked.grammar}
    return next((name for name, value in named.items() if value is not None), "structural_tag")


def _spaced(guide: Guide, name: str, spaces: dict[str, Any]) -> Guide:
    """Add rules for white space to the guide of a JSON schema, as the schema's keyword x-guidance."""
    try:
        schema = json.loads(guide.text)
    except ValueError as error:
        raise invalid(name, f"{name} must have a JSON schema, got {_shown(guide.text)}: {error}") from None
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise invalid(name, f"{name} must have a JSON schema that is an object, got {_shown(schema)}")
    if "x-guidance" in schema:
        raise invalid(
            name,
            f"{name} and the x-guidance of its schema both define the allowed white space: send only one",
        )
    return Guide(GuideKind.JSON_SCHEMA, _text({**schema, "x-guidance": spaces}))


def _response_format(asked: dict[str, Any]) -> Guide | None:
    kind = asked.get("type")
    unread = [name for name in asked if name not in _FORMAT_FIELDS.get(str(kind), asked)]
    if unread:
        raise invalid(
            "response_format",
            f"response_format of type {kind} has {_shown(unread[0])}, which would be ignored: it may have "
            f"{' and '.join(sorted(_FORMAT_FIELDS[str(kind)]))}",
        )
    if kind == "text":
        return None
    if kind == "json_object":
        return Guide(GuideKind.JSON_SCHEMA, _ANY_OBJECT)
    if kind == "json_schema":
        given = asked.get("json_schema")
        outer = cast(dict[str, Any], given) if isinstance(given, dict) else {}
        schema: dict[str, Any] | bool | None = outer.get("schema")
        if not isinstance(schema, dict | bool):
            got = f"got {_shown(asked['json_schema'])}" if "json_schema" in asked else "it is missing"
            raise invalid(
                "response_format",
                f"response_format.json_schema must be an object with a schema in schema; {got}",
            )
        unread = [name for name in outer if name not in _SCHEMA_FIELDS]
        if unread:
            raise invalid(
                "response_format",
                f"json_schema has {_shown(unread[0])}, which would be ignored: it may have "
                f"{', '.join(sorted(_SCHEMA_FIELDS))}",
            )
        return Guide(GuideKind.JSON_SCHEMA, _text(schema))
    if kind == "regex":
        return Guide(GuideKind.REGEX, _required(asked, "regex", "pattern"))
    if kind == "grammar":
        return Guide(GuideKind.EBNF_GRAMMAR, _required(asked, "grammar"))
    if kind == "structural_tag":
        tags = {name: value for name, value in asked.items() if name != "type"}
        return Guide(GuideKind.STRUCTURAL_TAG, _text(tags))
    raise invalid("response_format", f"response_format.type must be {_FORMATS}, got {_shown(kind)}")


def _required(asked: dict[str, Any], *names: str) -> str:
    for name in names:
        if isinstance(value := asked.get(name), str) and value:
            return value
    raise invalid(
        "response_format",
        f"response_format of type {asked['type']} must have {names[0]}, a text: it has none",
    )


def _choice(name: str, choices: Sequence[str]) -> Guide:
    """Return a guide that matches exactly these texts."""
    if not choices or not all(choices):
        raise invalid(
            name,
            f"{name} must have texts to choose from, none of them empty, got {_shown(list(choices[:9]))}",
        )
    return Guide.of_choices(choices)


def _text(value: str | dict[str, Any] | bool) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) < 100 else text[:100] + "…"

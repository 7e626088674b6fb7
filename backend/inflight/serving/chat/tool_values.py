"""Conversion of arguments that are not written as JSON: Python calls, bare keys, and texts between tags."""

from __future__ import annotations

import ast
import functools
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, cast

from inflight.serving.chat.held_text import overlap

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schemas of each function's parameters: by the function's name, and by the parameter's."""


class Nesting:
    """Depth of nested brackets at a position in JSON text, or in text with other quotation marks.

    Args:
        depth: The depth at the beginning.
        quotes: The quotation marks. If each is a single character, a backslash in a string escapes the
            character after it.
    """

    def __init__(self, depth: int = 0, quotes: tuple[str, ...] = ('"',)) -> None:
        self._depth = depth
        self._quotes = quotes
        self._quote = ""  # the quotation mark of the string at the position; "": none
        self._is_escaped = False

    def find_end(self, text: str, start: int) -> tuple[int, int]:
        """Scan from `start`, to the end of the outermost bracket.

        Returns:
            The index after that end, or -1 if it does not end; and the number of characters scanned. An
            incomplete quotation mark at the end of the text is not scanned.
        """
        place = start
        if self._is_escaped and place < len(text):
            self._is_escaped = False
            place += 1
        while found := _next_mark(self._quotes, self._quote).search(text, place):
            mark, place = found[0], found.end()
            if mark in self._quotes:
                self._quote = "" if self._quote else mark
            elif mark[0] == "\\":
                self._is_escaped = len(mark) == 1
            elif mark in "{[(":
                self._depth += 1
            else:
                self._depth -= 1
                if self._depth == 0:
                    return place, place
        marks = (self._quote,) if self._quote else self._quotes
        return -1, len(text) - max(overlap(text[place:], mark) for mark in marks)


@functools.cache
def _next_mark(quotes: tuple[str, ...], quote: str) -> re.Pattern[str]:
    """Return a pattern of what changes the nesting next, in a string that `quote` opened or, if "", outside."""
    marks = [re.escape(mark) for mark in ((quote,) if quote else quotes)]
    if not quote:
        marks.append(r"[\[\](){}]")
    elif all(len(each) == 1 for each in quotes):
        marks.append(r"\\.?")
    return re.compile("|".join(marks), re.DOTALL)


def read_python(text: str) -> dict[str, Any] | None:
    """Return the keyword arguments of a Python call, `a=1, b="x")`; None if they are not literal values."""
    try:
        # Any word may be an argument's name, also one that is a keyword in Python.
        named = _STRING_OR_NAME.sub(_with_underscore, text)
        call = cast(ast.Call, ast.parse(f"f({named}", mode="eval").body)
        if not isinstance(cast(Any, call), ast.Call) or call.args:
            return None
        return {_argument(each): _literal(each.value) for each in call.keywords}
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _with_underscore(found: re.Match[str]) -> str:
    if found[1]:
        return f"_{found[1]}"
    text = read_json(found[0]) if found[0][0] == '"' else None  # JSON has escapes that Python does not have
    return found[0].replace("\n", "\\n") if text is None else repr(text)


def _argument(keyword: ast.keyword) -> str:
    if keyword.arg is None:
        raise ValueError("a call with **")
    return keyword.arg.removeprefix("_")


def _literal(node: ast.expr) -> Any:
    """Return the value of an expression; the names of JSON's values are allowed."""
    match node:
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_literal(each) for each in elements]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _literal(value) for key, value in zip(keys, values)}
        case _:
            value = ast.literal_eval(node)
            json.dumps(value)  # raises TypeError for bytes and sets
            return value


def _key(node: ast.expr | None) -> str:
    key = None if node is None else ast.literal_eval(node)
    if not isinstance(key, str):
        raise TypeError(f"{key!r} is not a key")
    return key


def read_bare_keys(text: str, quote: str) -> dict[str, Any] | None:
    """Return the value of an object such as `{key:<|"|>text<|"|>}`; None if it is invalid."""
    parts = text.split(quote)
    for index, part in enumerate(parts):
        parts[index] = json.dumps(part) if index % 2 else _without_bare_words(part)
    found = read_json("".join(parts))
    return cast(dict[str, Any], found) if isinstance(found, dict) else None


def _without_bare_words(text: str) -> str:
    """Return a part outside of texts with quotation marks around keys, and with JSON's names of values."""
    return _PYTHON_NAME.sub(
        lambda found: json.dumps(_PYTHON_NAMES[found[0]]), _BARE_KEY.sub(r'\1"\2":', text)
    )


def read_tagged(text: str, schema: Mapping[str, Any] | None) -> Any:
    """Return the value of a text between tags: of a type that the parameter's schema allows, else a text.

    Without a schema, a text that is JSON is that value.
    """
    types = _types(schema)
    value = _PYTHON_NAMES[text] if text in _PYTHON_NAMES else read_json(text, default=text)
    if isinstance(value, str):
        return text
    is_allowed = not types or _type(value) in types or (type(value) is int and "number" in types)
    return value if is_allowed else text


def _types(schema: Mapping[str, Any] | None) -> set[str]:
    """Return the types that a schema allows; none if it does not say."""
    if not schema:
        return set()
    given: Any = schema.get("type")
    if isinstance(given, str):
        return {given}
    if isinstance(given, list):
        return {str(each) for each in cast(list[Any], given)}
    if isinstance(values := schema.get("enum"), list):
        return {_type(each) for each in cast(list[Any], values)}
    found: set[str] = set()
    for each in cast(Iterable[Any], schema.get("anyOf") or schema.get("oneOf") or ()):
        found |= _types(cast(Mapping[str, Any], each)) if isinstance(each, dict) else set()
    return found


def _type(value: Any) -> str:
    return "null" if value is None else _TYPES.get(cast(type[Any], type(value)), "")


def read_json(text: str, default: Any = None) -> Any:
    """Return the value of a JSON text; `default` if it is invalid."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return default


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def schemas_of(tools: Iterable[Mapping[str, Any]] | None) -> Schemas:
    """Return the schemas of the parameters of OpenAI's tools."""
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools or ():
        match tool:
            case {"function": {"name": str(name), "parameters": {"properties": properties}}} if isinstance(
                properties, dict
            ):
                found[name] = cast(dict[str, Any], properties)
            case _:
                pass
    return found


_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
_PYTHON_NAMES: dict[str, Any] = {"True": True, "False": False, "None": None}
_NAMES: dict[str, Any] = {"true": True, "false": False, "null": None}
_STRING_OR_NAME = re.compile(
    r'"(?:\\.|[^"\\])*"|' + r"'(?:\\.|[^'\\])*'" + r"|\b([A-Za-z_]\w*)(?=\s*=)", re.DOTALL
)
_PYTHON_NAME = re.compile(r"(?<=[:\[,])(?:None|True|False)(?=[,\]}]|\Z)")
_BARE_KEY = re.compile(r"([{,]\s*)([^\s{}\[\],:\"]+)\s*:")

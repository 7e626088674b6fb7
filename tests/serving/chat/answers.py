"""Answers with tool calls: written in each style, and parsed in pieces."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inflight.serving.chat.reasoning import reasoning_stream
from inflight.serving.chat.tool_calls import tool_call_stream
from inflight.serving.chat.tool_deltas import ChatDelta
from inflight.serving.chat.tool_format_table import TOOL_FORMATS
from inflight.serving.chat.tool_formats import ArgumentStyle, ToolFormat

Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Answer:
    """Content, and calls with name and arguments."""

    content: str
    calls: tuple[tuple[str, dict[str, Any]], ...]


def write_calls(parser: str, calls: Sequence[Call], indent: int | None = None) -> str:
    """Return calls as a model writes them in a format."""
    form = TOOL_FORMATS[parser]
    begin = form.begin if form.needs_marker else ""
    if form.has_own_markers or not (form.is_list or form.separator or form.call_begin):
        return "\n".join(
            f"{begin}{form.pads}{_write_call(form, call, indent)}{form.pads}{form.end}" for call in calls
        )
    separator = f"{form.separator} " if form.separator.strip() else "\n"
    texts = separator.join(_write_call(form, call, indent) for call in calls)
    return f"{begin}{f'[{texts}]' if form.is_list else texts}{form.end if form.needs_marker else ''}"


def _write_call(form: ToolFormat, call: Call, indent: int | None) -> str:
    name, values = call
    number = ":0" if form.is_numbered else ""
    match form.arguments:
        case ArgumentStyle.OBJECT:
            keys = {form.name_key: name, form.arguments_key: values}
            return json.dumps(keys, ensure_ascii=False, indent=indent)
        case ArgumentStyle.JSON:
            text = json.dumps(values, ensure_ascii=False, indent=indent)
        case ArgumentStyle.PYTHON:
            text = f"({', '.join(f'{key}={value!r}' for key, value in values.items())})"
        case ArgumentStyle.BARE_KEYS:
            text = with_bare_keys(values, form.quote)
        case ArgumentStyle.TAGS:
            text = "".join(_tagged(form, key, value) for key, value in values.items())
    return f"{form.call_begin}{name}{number}{form.name_end}{text}{form.call_end}"


def _tagged(form: ToolFormat, key: str, value: Any) -> str:
    tags = form.tags
    assert tags is not None
    pad = "\n" if tags.pads else ""
    key_end = tags.text_key_end if isinstance(value, str) and tags.text_key_end else tags.key_end
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"\n{tags.key_begin}{key}{key_end}{tags.value_begin}{pad}{text}{pad}{tags.value_end}\n"


def with_bare_keys(value: Any, quote: str) -> str:
    """Return a value with keys without quotation marks, and texts between `quote`."""
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        pairs = (f"{key}:{with_bare_keys(each, quote)}" for key, each in value.items())
        return f"{{{','.join(pairs)}}}"
    if isinstance(value, list):
        return f"[{','.join(with_bare_keys(each, quote) for each in value)}]"
    return json.dumps(value)


def tools_of(calls: Sequence[Call]) -> list[dict[str, Any]]:
    """Return tools whose schemas have the types of the calls' arguments."""
    properties: dict[str, dict[str, Any]] = {}
    for name, values in calls:
        for key, value in values.items():
            types = properties.setdefault(name, {}).setdefault(key, {"type": []})["type"]
            types.append(_TYPES[type(value)])
    return [
        {"type": "function", "function": {"name": name, "parameters": {"properties": each}}}
        for name, each in properties.items()
    ]


_TYPES = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}


def joined(
    parser: str, parts: Sequence[str], forced: bool = False, tools: Sequence[dict[str, Any]] = ()
) -> tuple[str, list[dict[str, str]]]:
    """Return content and calls, joined from deltas like a client does."""
    stream = tool_call_stream(parser, forced, tools)
    if parser and (before := TOOL_FORMATS[parser].reasoning_parser) and not forced:
        reader = reasoning_stream(before, False)
        parts = [*(reader.add(part)[1] for part in parts), reader.finish()[1]]
    deltas: list[ChatDelta] = [*(stream.add(part) for part in parts), stream.finish()]
    calls: list[dict[str, str]] = []
    for delta in deltas:
        for call in delta.tool_calls:
            if call.id:
                assert (call.index, bool(call.name)) == (len(calls), True)
                calls.append({"id": call.id, "name": call.name, "arguments": ""})
            assert call.index == len(calls) - 1
            calls[call.index]["arguments"] += call.arguments
    return "".join(delta.content for delta in deltas), calls


def read(
    parser: str, parts: Sequence[str], forced: bool = False, tools: Sequence[dict[str, Any]] = ()
) -> Answer:
    """Parse an answer like `joined`, with parsed arguments."""
    content, calls = joined(parser, parts, forced, tools)
    return Answer(content, tuple((call["name"], json.loads(call["arguments"])) for call in calls))

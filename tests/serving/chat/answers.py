"""Answers with tool calls: written in each style, and parsed in pieces."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inflight.serving.chat.tool_calls import ChatDelta, tool_call_stream


@dataclass(frozen=True)
class Answer:
    """Content, and calls with name and arguments."""

    content: str
    calls: tuple[tuple[str, dict[str, Any]], ...]


def write_calls(parser: str, calls: Sequence[tuple[str, dict[str, Any]]], indent: int | None = None) -> str:
    """Return calls as a model with that style writes them."""
    key = "parameters" if parser == "llama3_json" else "arguments"
    objects = [
        json.dumps({"name": name, key: values}, ensure_ascii=False, indent=indent) for name, values in calls
    ]
    if parser == "llama3_json":
        return "; ".join(objects)
    if parser == "hermes":
        return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects)
    return ("[TOOL_CALLS]" if parser == "mistral" else "") + f"[{', '.join(objects)}]"


def joined(parser: str, parts: Sequence[str], forced: bool = False) -> tuple[str, list[dict[str, str]]]:
    """Return content and calls, joined from deltas like a client does."""
    stream = tool_call_stream(parser, forced)
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


def read(parser: str, parts: Sequence[str], forced: bool = False) -> Answer:
    """Parse an answer like `joined`, with parsed arguments."""
    content, calls = joined(parser, parts, forced)
    return Answer(content, tuple((call["name"], json.loads(call["arguments"])) for call in calls))

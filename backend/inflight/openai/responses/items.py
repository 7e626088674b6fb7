"""Conversion of input items to the messages of a chat. Any thread.

Items are JSON objects: messages, function calls, their outputs, and reasoning. A chat has one message of the
assistant for its reasoning, its text and the calls that follow.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any, cast

from inflight.openai.errors import invalid, unsupported

Item = dict[str, Any]
_ROLES = ("user", "system", "developer", "assistant")
_TEXTS = ("input_text", "output_text", "text")
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
_TYPES = ", ".join(_PREFIXES)


def new_item_id(kind: str) -> str:
    """Return a random id for an item of this type."""
    return f"{_PREFIXES[kind]}_{secrets.token_hex(16)}"


def named_items(given: str | Sequence[Item]) -> list[Item]:
    """Return a body's input as items that all have a type, an id and a list of parts as content.

    Raises:
        ApiError: The type of an item is missing or not supported.
    """
    items: Sequence[Item] = [{"role": "user", "content": given}] if isinstance(given, str) else given
    return [_named(item, f"input[{index}]") for index, item in enumerate(items)]


def _named(item: Item, name: str) -> Item:
    kind = item.get("type") or ("message" if "role" in item else None)
    if kind == "item_reference":
        raise unsupported("input", f"{name} is of type item_reference: send the item itself")
    if not isinstance(kind, str) or kind not in _PREFIXES:
        raise invalid("input", f"{name}.type is {_shown(kind)}, expected one of {_TYPES}")
    named = {**item, "type": kind, "id": item.get("id") or new_item_id(kind)}
    if kind == "message":
        named["status"] = item.get("status") or "completed"
        if isinstance(text := item.get("content"), str):
            is_own = item.get("role") == "assistant"
            part: Item = {"type": "output_text", "text": text, "annotations": []}
            named["content"] = [part if is_own else {"type": "input_text", "text": text}]
    return named


def read_messages(items: Sequence[Item], names: Sequence[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return (messages of a chat, for each message the name of the item from which it begins).

    Args:
        items: Items with types, as `named_items` returns them.
        names: Name of each item in the body, such as `input[0]`, for errors.

    Raises:
        ApiError: An item is malformed or not supported.
    """
    messages: list[dict[str, Any]] = []
    places: list[str] = []
    for item, name in zip(items, names, strict=True):
        message = _READERS[item["type"]](item, name)
        last: dict[str, Any] = messages[-1] if messages else {}
        if message["role"] == last.get("role") == "assistant" and _continues(last, message):
            calls = [*last.get("tool_calls", ()), *message.get("tool_calls", ())]
            last.update(message, **({"tool_calls": calls} if calls else {}))
        else:
            messages.append(message)
            places.append(name)
    return messages, places


def _continues(last: dict[str, Any], message: dict[str, Any]) -> bool:
    """Return whether a part of the assistant's turn belongs to the message before: reasoning, text, calls."""
    if message.get("tool_calls"):
        return True
    if last.get("tool_calls") or "content" in last:
        return False
    return "content" in message


def _message(item: Item, name: str) -> dict[str, Any]:
    role = item.get("role")
    if role not in _ROLES:
        raise invalid("input", f"{name}.role is {_shown(role)}, expected one of {', '.join(_ROLES)}")
    return {"role": role, "content": _parts(item.get("content"), f"{name}.content")}


def _function_call(item: Item, name: str) -> dict[str, Any]:
    function = {
        "name": _text_of(item, "name", name),
        "arguments": _arguments(_text_of(item, "arguments", name), f"{name}.arguments"),
    }
    call = {"id": _text_of(item, "call_id", name), "type": "function", "function": function}
    return {"role": "assistant", "tool_calls": [call]}


def _function_call_output(item: Item, name: str) -> dict[str, Any]:
    output = item.get("output")
    content = output if isinstance(output, str) else _parts(output, f"{name}.output")
    return {"role": "tool", "tool_call_id": _text_of(item, "call_id", name), "content": content}


def _reasoning(item: Item, name: str) -> dict[str, Any]:
    """Return a message with the reasoning's text, or the summary if there is no text."""
    key = "content" if item.get("content") else "summary"
    parts: Any = item.get(key) or []
    if not isinstance(parts, list):
        raise invalid("input", f"{name}.{key} is {_shown(parts)}, expected a list of parts")
    texts: list[str] = []
    for index, part in enumerate(cast(list[Any], parts)):
        match part:
            case {"type": "reasoning_text" | "summary_text", "text": str(text)}:
                texts.append(text)
            case _:
                raise invalid(
                    "input",
                    f"{name}.{key}[{index}] is {_shown(part)}, expected a part of type reasoning_text or "
                    "summary_text with text",
                )
    return {"role": "assistant", "reasoning_content": "\n".join(texts)}


_READERS = {
    "message": _message,
    "function_call": _function_call,
    "function_call_output": _function_call_output,
    "reasoning": _reasoning,
}


def _parts(parts: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(parts, list):
        raise invalid("input", f"{name} is {_shown(parts)}, expected a text or a list of parts")
    return [_part(part, f"{name}[{index}]") for index, part in enumerate(cast(list[Any], parts))]


def _part(part: Any, name: str) -> dict[str, Any]:
    match part:
        case {"type": kind, "text": str(text)} if kind in _TEXTS:
            return {"type": "text", "text": text}
        case {"type": kind} if kind in _TEXTS:
            raise invalid("input", f"{name}.text is {_shown(part.get('text'))}, expected a text")
        case {"type": "refusal", "refusal": str(text)}:
            return {"type": "refusal", "refusal": text}
        case {"type": "input_image", **others}:
            return _picture(others, name)
        case {"type": kind}:
            raise unsupported(
                "input",
                f"{name} is of type {_shown(kind)}: this server takes parts of type input_text and input_image",
            )
        case _:
            raise invalid("input", f"{name} is {_shown(part)}, expected an object with type and text")


def _picture(part: dict[str, Any], name: str) -> dict[str, Any]:
    if part.get("file_id") is not None:
        raise unsupported("input", f"{name}.file_id: this server keeps no files; send image_url")
    url = part.get("image_url")
    if not isinstance(url, str):
        raise invalid("input", f"{name}.image_url is {_shown(url)}, expected a URL")
    picture: dict[str, Any] = {"url": url}
    if part.get("detail") is not None:
        picture["detail"] = part["detail"]
    return {"type": "image_url", "image_url": picture}


def _arguments(text: str, name: str) -> str:
    """Return a call's arguments; a call that a limit has cut is refused here, with the item's name."""
    try:
        is_object = isinstance(json.loads(text or "{}"), dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise invalid("input", f"{name} is {_shown(text)}, expected a JSON object as text")
    return text


def _text_of(item: Item, key: str, name: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise invalid("input", f"{name}.{key} is {_shown(value)}, expected a text")
    return value


def _shown(value: Any) -> str:
    return "missing" if value is None else repr(value)[:80]

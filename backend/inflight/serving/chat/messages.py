"""Conversion of clients' messages to the form that a chat template can render, in plain JSON.

Converts contents (text or parts), arguments of tool calls (objects or text) and reasoning to the forms in a
template's MessageForm, and checks messages. Any thread.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

from inflight.errors import InvalidArgument, Name

Message = dict[str, Any]
"""A message in the form that a template can render."""

_NEEDS_CONTENT = frozenset(("system", "developer", "user", "tool"))
_HAS_PICTURES = ("user", "tool")
_DETAILS = ("auto", "low", "high")
_REASONING = ("reasoning_content", "thinking", "reasoning")
_MAX_DEPTH = 64


class EmptyContent(Enum):
    """The content field that a template needs for an assistant message without content, such as a tool call."""

    LEFT_OUT = "left out"
    EMPTY = "empty"
    NULL = "null"

    def field(self, takes_text: bool) -> Message:
        """Return the message's content field, {} if it is left out.

        Args:
            takes_text: Whether contents are texts; otherwise they are lists of parts.
        """
        if self is EmptyContent.LEFT_OUT:
            return {}
        if self is EmptyContent.NULL:
            return {"content": None}
        return {"content": "" if takes_text else []}


@dataclass(frozen=True, slots=True)
class MessageForm:
    """The form that messages must have for one template.

    Attributes:
        takes_text: Whether a content may be a text. Otherwise a text is converted to a list of one part.
        takes_parts: Whether a content may be a list of parts. Otherwise the parts' texts are joined with
            line ends.
        takes_pictures: Whether a list of parts may have pictures, {"type": "image"}.
        arguments_as_text: Whether arguments of tool calls are JSON texts; otherwise they are objects.
        takes_developer: Whether the template renders the role developer, OpenAI's newer name of system.
            Otherwise developer messages become system messages.
        empty_content: Content field of an assistant message without content.
    """

    takes_text: bool = True
    takes_parts: bool = False
    takes_pictures: bool = False
    arguments_as_text: bool = False
    takes_developer: bool = False
    empty_content: EmptyContent = EmptyContent.LEFT_OUT


@dataclass(frozen=True, slots=True)
class PictureUrl:
    """The place of a picture in a body's messages.

    Attributes:
        url: The URL, as the client sent it.
        name: The path of the URL in the body, for errors.
    """

    url: str
    name: Name


def plain_messages(messages: Sequence[Mapping[str, Any]], form: MessageForm) -> list[Message]:
    """Return copies of messages in a template's form. Fields that are None are left out.

    If the form takes pictures, {"type": "image"} stands for each part of type image_url.

    Raises:
        InvalidArgument: A message is malformed or not supported; the error names the field.
    """
    if not messages:
        raise InvalidArgument(Name("messages"), " is empty, expected at least one message")
    return [_message(each, f"messages[{index}]", form) for index, each in enumerate(messages)]


def picture_urls(messages: Sequence[Mapping[str, Any]]) -> list[PictureUrl]:
    """Return the pictures of messages that `plain_messages` has converted, in order.

    Raises:
        InvalidArgument: A picture has no URL, or its detail is unknown; the error names the field.
    """
    found: list[PictureUrl] = []
    for index, message in enumerate(messages):
        content = message.get("content")
        for place, part in enumerate(cast(list[Any], content) if isinstance(content, list) else ()):
            match part:
                case {"type": "image_url", **others}:
                    name = f"messages[{index}].content[{place}].image_url"
                    found.append(_picture_url(others.get("image_url"), name))
                case _:
                    pass
    return found


def _picture_url(given: Any, name: str) -> PictureUrl:
    match given:
        case {"url": str(url), **others}:
            detail = others.get("detail")
            if detail not in (None, *_DETAILS):
                raise InvalidArgument(
                    Name(f"{name}.detail"), f" is {repr(detail)[:80]}, expected one of {', '.join(_DETAILS)}"
                )
            return PictureUrl(url, Name(f"{name}.url"))
        case str(url):
            return PictureUrl(url, Name(name))
        case _:
            url = cast(Mapping[str, Any], given).get("url") if isinstance(given, Mapping) else given
            raise InvalidArgument(Name(f"{name}.url"), f" is {_shown(url)}, expected a text")


def plain_json(value: Any, name: str, depth: int = 0) -> Any:
    """Return a copy of a value that consists of JSON's types only, so that a template gets no other objects.

    Raises:
        InvalidArgument: The value contains a type that JSON does not have, or is nested too deeply.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if depth > _MAX_DEPTH:
        raise InvalidArgument(Name(name), f" is nested more than {_MAX_DEPTH} levels deep")
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        pairs = cast(Mapping[Any, Any], value).items()
        return {_key(key, name): plain_json(each, name, depth + 1) for key, each in pairs}
    if isinstance(value, list | tuple):
        return [plain_json(each, name, depth + 1) for each in cast(Sequence[Any], value)]
    raise InvalidArgument(Name(name), f" has a {type(value).__name__} in it, expected JSON")


def _key(key: Any, name: str) -> str:
    if not isinstance(key, str):
        raise InvalidArgument(Name(name), f" has the key {key!r}, expected a text")
    return str.__str__(key)


def _shown(value: Any) -> str:
    """Return the beginning of a value for an error about it."""
    return "missing" if value is None else repr(value)[:80]


def _message(given: Any, name: str, form: MessageForm) -> Message:
    if not isinstance(given, Mapping):
        raise InvalidArgument(Name(name), f" is {_shown(given)}, expected an object with role and content")
    plain: Message = plain_json(given, name)
    message = {key: value for key, value in plain.items() if value is not None}
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidArgument(Name(name), f".role is {_shown(role)}, expected a text such as user")
    if role == "developer" and not form.takes_developer:
        message["role"] = "system"
    if "content" in message:
        message["content"] = _content(message["content"], f"{name}.content", form, role)
    elif role in _NEEDS_CONTENT:
        raise InvalidArgument(
            Name(name), ".content is missing, expected a text or a list of parts of type text"
        )
    elif role == "assistant":
        message.update(form.empty_content.field(form.takes_text))
    if "tool_calls" in message:
        message["tool_calls"] = _tool_calls(message["tool_calls"], f"{name}.tool_calls", form)
        if not message["tool_calls"]:
            del message["tool_calls"]
    return _with_reasoning(message, name)


def _content(content: Any, name: str, form: MessageForm, role: str) -> str | list[Any]:
    if isinstance(content, str):
        return content if form.takes_text else [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise InvalidArgument(
            Name(name), f" is {_shown(content)}, expected a text or a list of parts of type text"
        )
    parts = [
        _part(part, f"{name}[{index}]", form, role) for index, part in enumerate(cast(list[Any], content))
    ]
    return parts if form.takes_parts else "\n".join(part["text"] for part in parts)


def _part(part: Any, name: str, form: MessageForm, role: str) -> Message:
    match part:
        case {"type": "image_url"} if form.takes_pictures:
            if role not in _HAS_PICTURES:
                raise InvalidArgument(
                    Name(name),
                    f" is a picture in a message of role {role[:80]!r}, expected {' or '.join(_HAS_PICTURES)}",
                )
            return {"type": "image"}
        case _:
            return {"type": "text", "text": _text(part, name, form.takes_pictures)}


def _text(part: Any, name: str, takes_pictures: bool) -> str:
    match part:
        case str(text) | {"type": "text", "text": str(text)} | {"type": "refusal", "refusal": str(text)}:
            return text
        case {"type": "text" | "refusal" as kind}:
            found = _shown(cast(Mapping[str, Any], part).get(kind))
            raise InvalidArgument(Name(name), f".{kind} is {found}, expected a text")
        case {"type": kind}:
            taken = "text and image_url" if takes_pictures else "text alone"
            raise InvalidArgument(
                Name(name), f" is of type {kind!r}; this server takes parts of type {taken}"
            )
        case _:
            raise InvalidArgument(Name(name), f" is {_shown(part)}, expected an object with type and text")


def _tool_calls(calls: Any, name: str, form: MessageForm) -> list[Message]:
    if not isinstance(calls, list):
        raise InvalidArgument(Name(name), f" is {repr(calls)[:80]}, expected a list")
    return [_tool_call(call, f"{name}[{index}]", form) for index, call in enumerate(cast(list[Any], calls))]


def _tool_call(call: Any, name: str, form: MessageForm) -> Message:
    match call:
        case {"function": {"name": str()} as function}:
            function = cast(dict[str, Any], function)
        case _:
            raise InvalidArgument(Name(name), f" is {repr(call)[:80]}, expected an object with function.name")
    arguments = _arguments(function.get("arguments"), f"{name}.function.arguments", form)
    return {**cast(Message, call), "function": {**function, "arguments": arguments}}


def _arguments(arguments: Any, name: str, form: MessageForm) -> Any:
    """Return a call's arguments in the template's form; clients send JSON text or an object."""
    parsed: Any = arguments or {}
    if isinstance(parsed, str):
        try:
            parsed = json.loads(parsed)
        except (ValueError, RecursionError) as error:
            raise InvalidArgument(Name(name), f" is not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise InvalidArgument(Name(name), f" is {repr(arguments)[:80]}, expected a JSON object")
    if not form.arguments_as_text:
        return cast(Any, parsed)
    return arguments if isinstance(arguments, str) and arguments else json.dumps(parsed, ensure_ascii=False)


def _with_reasoning(message: Message, name: str) -> Message:
    """Copy the reasoning, which clients send under one of three names, to the names that templates read."""
    reasoning = next((message[key] for key in _REASONING if key in message), None)
    if reasoning is None:
        return message
    if not isinstance(reasoning, str):
        raise InvalidArgument(Name(name), f".reasoning_content is {repr(reasoning)[:80]}, expected a text")
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}

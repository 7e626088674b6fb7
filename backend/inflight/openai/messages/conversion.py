"""Convert a body of /v1/messages to the body of a chat, and errors about the chat to errors about the body.

Runs on the tokenizing threads.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import pydantic

from inflight.errors import InvalidArgument
from inflight.openai.errors import ApiError, invalid, unsupported, validation_error
from inflight.openai.messages.protocol import CountTokensBody, MessagesBody, MessagesThinking
from inflight.openai.protocol import ChatBody
from inflight.openai.serving_model import ServingModel

_Block = dict[str, Any]

_THINKING_SWITCHES = ("enable_thinking", "thinking")
"""Variables with which chat templates turn reasoning on and off."""

_BLOCKS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    name: (frozenset(required), frozenset(("type", "cache_control", *required, *optional)))
    for name, required, optional in (
        ("text", ("text",), ("citations",)),
        ("image", ("source",), ()),
        ("thinking", ("thinking",), ("signature",)),
        ("tool_use", ("id", "name", "input"), ("caller",)),
        ("tool_result", ("tool_use_id",), ("content", "is_error")),
        ("tool_reference", ("tool_name",), ()),
    )
}
"""The types of blocks: for each, its required fields and all of its fields."""

_TYPES_OF_FIELDS: dict[str, tuple[type, str]] = {
    "text": (str, "a text"),
    "source": (dict, "an object"),
    "thinking": (str, "a text"),
    "signature": (str, "a text"),
    "id": (str, "a text"),
    "name": (str, "a text"),
    "input": (dict, "an object"),
    "tool_use_id": (str, "a text"),
    "tool_name": (str, "a text"),
    "is_error": (bool, "true or false"),
}
_OF_ROLE = {
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
    "system": ("text",),
}
_OF_RESULT = ("text", "image", "tool_reference")

_FIELDS = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "chat_template_kwargs": "thinking",
    "continue_final_message": "messages",
}
"""Fields of a body by fields of a chat, where they differ."""

_PLACE = re.compile(r"(messages\[\d+\])(\.content\[\d+\])?(\.image_url(?:\.url)?)?")
_TOOL = re.compile(r"(tools\[\d+\])\.function(?:\.(name|description|parameters))?")


@dataclass(frozen=True, slots=True)
class ConvertedChat:
    """A chat with the same meaning as a body of /v1/messages.

    Attributes:
        body: The chat.
        places: Path in the client's body by path in the chat, of messages and of their parts.
    """

    body: ChatBody
    places: Mapping[str, str]

    def rename(self, error: ApiError) -> ApiError:
        """Convert an error that names fields of the chat to one that names fields of the client's body."""
        message, param = str(error), error.param or ""
        if param in _FIELDS:
            message = re.sub(rf"\b{param}\b", _FIELDS[param], message, count=1)
        message = _PLACE.sub(self._place, message)
        message = _TOOL.sub(lambda found: f"{found[1]}.{_field_of_tool(found[2])}".rstrip("."), message)
        return ApiError(message, error.status, _FIELDS.get(param, param), error.error_code)

    def _place(self, found: re.Match[str]) -> str:
        message, part, picture = found[1], found[2] or "", found[3] or ""
        whole = self.places.get(message + part)
        place = self.places.get(message, message) + part if whole is None else whole
        return place + (".source" if picture else "")


def _field_of_tool(name: str | None) -> str:
    return "input_schema" if name == "parameters" else name or ""


def convert(model: ServingModel, body: CountTokensBody) -> ConvertedChat:
    """Return a chat with the same meaning as `body`.

    Raises:
        ApiError: A field is malformed or not supported; the error names it.
    """
    chat = _Chat(model.takes_pictures())
    if body.system:
        chat.add("system", _blocks(body.system, "system", _OF_ROLE["system"]))
    for turn in _turns(body):
        chat.add(*turn)
    chat.check_end()
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": chat.messages,
        "tools": [_tool(tool.name, tool.description, tool.input_schema) for tool in body.tools],
        "continue_final_message": chat.messages[-1]["role"] == "assistant",
        **_tool_choice(body),
        **_thinking(model, body),
        **_output(model, body),
    }
    if isinstance(body, MessagesBody):
        fields |= {
            "stream": body.stream,
            "stream_options": {"include_usage": True} if body.stream else None,
            "stop": body.stop_sequences,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "safety_identifier": body.metadata.user_id if body.metadata else None,
        }
    try:
        return ConvertedChat(ChatBody.model_validate(fields), chat.places)
    except pydantic.ValidationError as error:
        raise validation_error(error) from None


def _tool(name: str, description: str | None, schema: dict[str, Any]) -> dict[str, Any]:
    described = {} if description is None else {"description": description}
    return {"type": "function", "function": {"name": name, **described, "parameters": schema}}


def _tool_choice(body: CountTokensBody) -> dict[str, Any]:
    choice = body.tool_choice
    if choice is None:
        return {}
    wanted: str | dict[str, Any] = {"auto": "auto", "any": "required", "none": "none"}.get(choice.type, "")
    if choice.type == "tool":
        if choice.name not in (known := [tool.name for tool in body.tools]):
            expected = ", ".join(known) or "none"
            text = f"tool_choice.name is {choice.name!r}, expected one of the tools: {expected}"
            raise invalid("tool_choice", text)
        wanted = {"type": "function", "function": {"name": choice.name}}
    elif choice.type == "any" and not body.tools:
        raise invalid("tool_choice", "tool_choice.type is 'any', expected auto or none without tools")
    elif not body.tools:
        wanted = "none"
    return {"tool_choice": wanted, "parallel_tool_calls": not choice.disable_parallel_tool_use}


def _thinking(model: ServingModel, body: CountTokensBody) -> dict[str, Any]:
    thinking = body.thinking or MessagesThinking(type="adaptive", budget_tokens=None)
    fields: dict[str, Any] = {"include_reasoning": thinking.display != "omitted"}
    if thinking.type == "adaptive":
        return fields
    template = model.chat_template()
    is_enabled, has_tools = thinking.type == "enabled", bool(body.tools)
    switches = [name for name in _THINKING_SWITCHES if template.reads(name, has_tools)]
    fields["chat_template_kwargs"] = dict.fromkeys(switches, is_enabled)
    if model.reasoning_parser():
        fields["thinking_token_budget"] = thinking.budget_tokens
    if not is_enabled:  # a model that reasons nevertheless shows nothing of it
        fields["include_reasoning"] = False
    elif not switches and not model.reasoning_parser():
        text = "thinking.type is 'enabled', expected disabled or adaptive: this model has no reasoning"
        raise unsupported("thinking", text)
    return fields


def _output(model: ServingModel, body: CountTokensBody) -> dict[str, Any]:
    asked = body.output_config
    if asked is None:
        return {}
    fields: dict[str, Any] = {}
    # Claude Code sends an effort with every request, whatever the model is.
    if asked.effort is not None and model.chat_template().reads("reasoning_effort", bool(body.tools)):
        fields["reasoning_effort"] = asked.effort
    if asked.format is not None:
        schema = {"name": "answer", "schema": asked.format.schema_}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields


def _turns(body: CountTokensBody) -> Iterator[tuple[str, list[tuple[str, _Block]]]]:
    """Yield (role, blocks with their paths) of each turn: consecutive messages of one role are one turn."""
    role, blocks = "", list[tuple[str, _Block]]()
    for index, message in enumerate(body.messages):
        name = f"messages[{index}]"
        if unknown := message.keys() - {"role", "content"}:
            raise invalid(
                "messages", f"{name} has the unknown field {min(unknown)[:80]}: expected role and content"
            )
        given = message.get("role")
        if not isinstance(given, str) or given not in _OF_ROLE:
            raise invalid("messages", f"{name}.role is {repr(given)[:80]}, expected user or assistant")
        read = _blocks(message.get("content"), f"{name}.content", _OF_ROLE[given])
        if role == given:
            blocks += read
            continue
        if role:
            yield role, blocks
        role, blocks = given, read
    yield role, blocks


def _blocks(content: Any, name: str, kinds: tuple[str, ...]) -> list[tuple[str, _Block]]:
    """Return the blocks of a content, checked, each with its path. A text is one block."""
    field_name = name.partition("[")[0]
    if isinstance(content, str):
        return [(name, {"type": "text", "text": content})]
    if not isinstance(content, list):
        raise invalid(field_name, f"{name} is {repr(content)[:80]}, expected a text or a list of blocks")
    found: list[tuple[str, _Block]] = []
    for index, given in enumerate(cast(list[Any], content)):
        place = f"{name}[{index}]"
        try:
            found.append((place, _checked_block(given, place, kinds)))
        except InvalidArgument as error:
            raise invalid(field_name, str(error)) from None
    return found


def _checked_block(given: Any, name: str, kinds: tuple[str, ...]) -> _Block:
    if not isinstance(given, dict):
        raise InvalidArgument(f"{name} is {repr(given)[:80]}, expected an object with a type")
    block = {key: value for key, value in cast(_Block, given).items() if value is not None}
    kind = block.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        raise InvalidArgument(f"{name}.type is {repr(kind)[:80]}, expected {' or '.join(kinds)}")
    required, known = _BLOCKS[kind]
    if missing := sorted(required - block.keys()):
        raise InvalidArgument(f"{name}.{missing[0]} is missing, expected {_TYPES_OF_FIELDS[missing[0]][1]}")
    if unknown := block.keys() - known:
        expected = ", ".join(sorted(known))
        raise InvalidArgument(f"{name} has the unknown field {min(unknown)[:80]}: expected {expected}")
    for key, value in block.items():
        wanted, shown = _TYPES_OF_FIELDS.get(key, (object, ""))
        if not isinstance(value, wanted):
            raise InvalidArgument(f"{name}.{key} is {repr(value)[:80]}, expected {shown}")
    return block


@dataclass(slots=True)
class _Chat:
    """The messages of a chat, made turn by turn.

    Attributes:
        takes_pictures: Whether the model takes pictures.
        messages: OpenAI's messages.
        places: As in `ConvertedChat`.
        open_calls: Names of the tools whose results must be in the next turn, by the ids of the calls.
    """

    takes_pictures: bool
    messages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    places: dict[str, str] = field(default_factory=dict[str, str])
    open_calls: dict[str, str] = field(default_factory=dict[str, str])

    def add(self, role: str, blocks: list[tuple[str, _Block]]) -> None:
        """Add the messages of one turn."""
        results = [each for each in blocks if each[1]["type"] == "tool_result"]
        if results != blocks[: len(results)]:
            raise invalid(
                "messages", f"{results[-1][0]} is a tool_result, expected before the turn's other blocks"
            )
        for place, block in results:
            self._add_result(place, block)
        self._check_answered(blocks[0][0] if blocks else "messages")
        others = [each for each in blocks if each[1]["type"] != "tool_result"]
        if role == "assistant":
            self._add_answer(others)
        elif others or not results:
            self._append(others, role=role)

    def check_end(self) -> None:
        """Raise ApiError if the conversation cannot be answered after its last turn."""
        self._check_answered("messages")
        last = self.messages[-1]
        if last["role"] == "assistant" and not last.get("content"):
            raise invalid(
                "messages", "messages: the last one is the assistant's, and has no text to continue"
            )

    def _check_answered(self, place: str) -> None:
        if self.open_calls:
            missing = ", ".join(self.open_calls)[:200]
            raise invalid(
                "messages", f"{place}: expected a tool_result for each tool_use before, none for {missing}"
            )

    def _add_result(self, place: str, block: _Block) -> None:
        call = block["tool_use_id"]
        name = self.open_calls.pop(call, None)
        if name is None:
            text = (
                f"{place}.tool_use_id is {call[:80]!r}, expected the id of a tool_use in the message before"
            )
            raise invalid("messages", text)
        parts = _blocks(block.get("content", ""), f"{place}.content", _OF_RESULT)
        if block.get("is_error"):  # OpenAI's messages have no field for it
            parts.insert(0, (place, {"type": "text", "text": "Error:"}))
        self._append(parts, role="tool", tool_call_id=call, name=name)

    def _add_answer(self, blocks: list[tuple[str, _Block]]) -> None:
        fields: dict[str, Any] = {}
        thoughts = [block["thinking"] for _, block in blocks if block["type"] == "thinking"]
        if any(thoughts):
            fields["reasoning_content"] = "\n".join(filter(None, thoughts))
        calls = [block for _, block in blocks if block["type"] == "tool_use"]
        if calls:
            fields["tool_calls"] = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {"name": call["name"], "arguments": call["input"]},
                }
                for call in calls
            ]
        self.open_calls = {call["id"]: call["name"] for call in calls}
        self._append([each for each in blocks if each[1]["type"] == "text"], role="assistant", **fields)

    def _append(self, blocks: list[tuple[str, _Block]], **fields: Any) -> None:
        """Append a message whose content has a part for each block of text or picture."""
        index = len(self.messages)
        parts = [self._part(place, block) for place, block in blocks]
        for number, (place, _) in enumerate(blocks):
            self.places[f"messages[{index}].content[{number}]"] = place
        if blocks:
            self.places[f"messages[{index}]"] = re.split(r"\.content\b", blocks[0][0])[0]
        if not parts and fields["role"] == "assistant":
            self.messages.append(fields)
            return
        is_text = len(parts) == 1 and parts[0]["type"] == "text"
        self.messages.append({**fields, "content": parts[0]["text"] if is_text else parts or ""})

    def _part(self, place: str, block: _Block) -> dict[str, Any]:
        if block["type"] == "text":
            return {"type": "text", "text": block["text"]}
        if block["type"] == "tool_reference":
            # Of a client's search for deferred tools, which are in the prompt.
            return {"type": "text", "text": f"The tool {block['tool_name']} is available."}
        if not self.takes_pictures:
            raise invalid(
                "messages", f"{place}.type is 'image', expected text: this server takes no pictures"
            )
        match block["source"]:
            case {"type": "base64", "media_type": str(kind), "data": str(data), **others} if not others:
                url = f"data:{kind};base64,{data}"
            case {"type": "url", "url": str(url), **others} if not others:
                pass
            case {"type": other} if other not in ("base64", "url"):
                text = f"{place}.source.type is {repr(other)[:80]}, expected base64 or url"
                raise invalid("messages", text)
            case _:
                text = f"{place}.source: expected type base64 with media_type and data, or type url with url"
                raise invalid("messages", text)
        return {"type": "image_url", "image_url": {"url": url}}

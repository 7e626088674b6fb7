"""The body of POST /v1/responses, and its translation to the body of a chat. Any thread."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import Field

from inflight.openai.control_fields import BodyControls
from inflight.openai.errors import ApiError, invalid, unsupported, validation_error
from inflight.openai.protocol import MAX_INT32, Body, ChatBody, Metadata, Objects, StreamOptions, Texts
from inflight.openai.responses.items import Item, read_messages

LOG_PROBS = "message.output_text.logprobs"
"""The value of `include` that asks for log probs."""

_SAME_IN_CHATS = (
    *BodyControls.model_fields,
    *("model", "stream", "parallel_tool_calls", "user", "safety_identifier", "prompt_cache_key", "metadata"),
    *("seed", "stop", "stop_token_ids", "ignore_eos", "priority", "cache_salt", "chat_template_kwargs"),
    "thinking_token_budget",
)
"""Fields that a chat has with the same name and meaning."""
_NO_TOOLS_OF_OWN = "this server runs no tools of its own; send tools of type function"


class ReasoningOptions(Body):
    """How the model reasons before its answer.

    Attributes:
        effort: Value of the chat template's variable reasoning_effort.
        summary: Has no effect: the reasoning itself is returned, not a summary.
        generate_summary: The older name of `summary`.
    """

    not_served: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {
        "context": (("auto",), "the chat template chooses the reasoning that the prompt repeats"),
        "mode": (("standard",), "there is one mode"),
    }
    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class TextOptions(Body):
    """Options of the text: `format` is a guide, `verbosity` has no effect."""

    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponseBody(Body, BodyControls):
    """The JSON body of a request to /v1/responses."""

    not_served: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {
        "background": ((False,), "responses are generated while their client is connected; send stream"),
        "background_options": ((), "responses are generated while their client is connected"),
        "conversation": ((), "this server keeps no conversations; send previous_response_id"),
        "prompt": ((), "this server keeps no prompt templates; send instructions and input"),
        "max_tool_calls": ((), _NO_TOOLS_OF_OWN),
        "context_management": (([],), "this server compacts no conversations; truncation auto drops items"),
        "moderation": ((), "this server moderates nothing"),
        "access_programs": ((), "this server has none"),
        "image": ((), "the checkpoint's processor chooses the size of pictures"),
        "prompt_cache_options": ((), "blocks are found by content, and the least used are dropped first"),
        "prompt_cache_retention": (("in_memory",), "blocks are kept in memory"),
        "service_tier": (("auto", "default"), "there is one tier"),
    }
    model: str | None = None
    input: str | Objects
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Objects = Field(default_factory=list[dict[str, Any]])
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=MAX_INT32)
    top_logprobs: int | None = Field(None, ge=0, le=MAX_INT32)
    include: Texts = Field(default_factory=list)
    truncation: Literal["auto", "disabled"] = "disabled"
    metadata: Metadata | None = None
    store: bool = True
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    client_metadata: dict[str, Any] | None = None  # of Codex
    seed: int | None = None
    stop: str | Texts = Field(default_factory=list)
    stop_token_ids: Annotated[list[int], Field(fail_fast=True)] = Field(default_factory=list[int])
    ignore_eos: bool = False
    priority: int = 0
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    thinking_token_budget: int | None = Field(None, ge=0, le=MAX_INT32)

    @property
    def has_log_probs(self) -> bool:
        """Return whether the body asks for log probs."""
        return LOG_PROBS in self.include


@dataclass(frozen=True, slots=True)
class ChatOfResponse:
    """The chat that a response answers.

    Attributes:
        body: The chat's body.
        places: For each message, the field of the response's body from which it comes.
    """

    body: ChatBody
    places: Sequence[str]

    def rename(self, error: ApiError) -> ApiError:
        """Convert an error that names fields of the chat to one that names fields of the response's body."""
        text = _in_fields(str(error), self.places)
        return ApiError(text, error.status, _FIELDS.get(error.param or "", error.param), error.error_code)


_FIELDS = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
    "reasoning_effort": "reasoning",
}
"""Field of a response's body by field of a chat."""
_WORDS = {
    **_FIELDS,
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


def _in_fields(text: str, places: Sequence[str]) -> str:
    text = re.sub(
        r"messages\[(\d+)\]",
        lambda found: places[int(found[1])] if int(found[1]) < len(places) else found[0],
        text,
    )
    text = text.replace(".image_url.url", ".image_url").replace("'image_url'", "'input_image'")
    text = re.sub(r"(tools\[\d+\]|tool_choice)\.function\.", r"\1.", text)
    return re.sub(rf"\b({'|'.join(_WORDS)})\b", lambda found: _WORDS[found[0]], text)


def to_chat(body: ResponseBody, previous: Sequence[Item], own: Sequence[Item]) -> ChatOfResponse:
    """Translate a body to a chat's.

    Args:
        body: The body.
        previous: Items of the conversation before, from the store.
        own: The body's input as items.

    Raises:
        ApiError: A field is invalid or not supported.
    """
    for value in body.include:
        if value not in (LOG_PROBS, "reasoning.encrypted_content"):
            raise unsupported("include", f"include has {value[:80]!r}: this server can include {LOG_PROBS}")
    if body.top_logprobs and not body.has_log_probs:
        raise invalid("top_logprobs", f"top_logprobs is {body.top_logprobs}: it needs {LOG_PROBS} in include")
    if not own and not previous:
        raise invalid("input", "input is empty, expected a text or at least one item")
    names = ["previous_response_id"] * len(previous) + [f"input[{index}]" for index in range(len(own))]
    messages, places = read_messages([*previous, *own], names)
    if body.instructions is not None:
        messages.insert(0, {"role": "system", "content": body.instructions})
        places.insert(0, "instructions")
    chat: dict[str, Any] = {
        **{name: getattr(body, name) for name in _SAME_IN_CHATS},
        "messages": messages,
        "max_completion_tokens": body.max_output_tokens,
        "stream_options": {"include_usage": True} if body.stream else None,
        "logprobs": body.has_log_probs,
        "top_logprobs": body.top_logprobs if body.has_log_probs else None,
        "tools": [_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools)],
        "tool_choice": _tool_choice(body.tool_choice),
        "response_format": _format(body.text),
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        "verbosity": body.text.verbosity if body.text else None,
    }
    try:
        return ChatOfResponse(ChatBody.model_validate(chat), places)
    except pydantic.ValidationError as error:
        raise validation_error(error) from None


def _tool(tool: dict[str, Any], name: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        shown = repr(tool.get("type"))[:80]
        raise unsupported("tools", f"{name}.type is {shown}, expected 'function': {_NO_TOOLS_OF_OWN}")
    if not isinstance(tool.get("name"), str) or not tool["name"]:
        raise invalid("tools", f"{name}.name is {tool.get('name')!r:.80}, expected the function's name")
    kept = {key: tool[key] for key in ("name", "description", "parameters", "strict") if key in tool}
    return {"type": "function", "function": kept}


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    match choice:
        case {"type": "function", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
        case None | "none" | "auto" | "required":
            return choice
        case _:
            raise invalid(
                "tool_choice",
                f"tool_choice is {repr(choice)[:80]}, expected none, auto, required or "
                '{"type": "function", "name": "…"}',
            )


def _format(text: TextOptions | None) -> dict[str, Any] | None:
    """Return a chat's response_format for the format of a text; its schema is beside its type."""
    given = text.format if text else None
    if given is None or given.get("type") != "json_schema":
        return given
    if not isinstance(schema := given.get("schema"), dict | bool):
        shown = "missing" if schema is None else repr(schema)[:80]
        raise invalid("text", f"text.format.schema is {shown}, expected a JSON schema")
    return {
        "type": "json_schema",
        "json_schema": {key: value for key, value in given.items() if key != "type" and value is not None},
    }


def later_turns(chat: ChatOfResponse) -> list[int]:
    """Return the indices of the user's messages from which a shortened chat may begin, without the first."""
    return [place for place, message in enumerate(chat.body.messages) if message["role"] == "user"][1:]


def shortened(chat: ChatOfResponse, start: int) -> ChatOfResponse:
    """Return the chat without the messages before index `start`, except those of system and developer."""
    messages = chat.body.messages
    kept = [
        place
        for place, message in enumerate(messages)
        if place >= start or message["role"] in ("system", "developer")
    ]
    body = chat.body.model_copy(update={"messages": [messages[place] for place in kept]})
    return ChatOfResponse(body, [chat.places[place] for place in kept])


def echoed(body: ResponseBody) -> dict[str, Any]:
    """Return the fields of a response that repeat the body's."""
    text, reasoning = body.text, body.reasoning
    verbosity = {"verbosity": text.verbosity} if text and text.verbosity else {}
    return {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {
            "effort": reasoning.effort if reasoning else None,
            "summary": (reasoning.summary or reasoning.generate_summary) if reasoning else None,
        },
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store,
        "temperature": body.temperature,
        "text": {"format": (text.format if text else None) or {"type": "text"}, **verbosity},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": [{"description": None, "parameters": None, "strict": None, **tool} for tool in body.tools],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p,
        "truncation": body.truncation,
        "user": body.user,
    }

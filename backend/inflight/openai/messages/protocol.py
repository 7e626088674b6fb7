"""Bodies of requests to /v1/messages: Anthropic's fields, each with type and default.

As in the bodies of OpenAI's routes, an unknown field is an error, and a null field counts as absent. The
blocks of messages are checked by `conversion`.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, cast

from pydantic import Field, model_validator

from inflight.openai.errors import invalid, refused, unsupported
from inflight.openai.protocol import MAX_INT32, Body, Objects, Texts

_MIN_BUDGET = 1024

_NOT_SERVED: dict[str, tuple[tuple[Any, ...], str]] = {
    "container": ((), "this server runs no code: send tools, and run them yourself"),
    "context_management": (
        ({}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
        "this server edits no conversation: send the messages that are to be read",
    ),
    "diagnostics": ((), "this server keeps no prompts to compare with"),
    "inference_geo": (("global", "not_available"), "this server cannot move a request to another region"),
    "mcp_servers": (([],), "this server calls no other servers: send tools, and call them yourself"),
    "output_format": ((), "Anthropic has moved it: send output_config.format"),
    "speed": (("standard",), "there is one speed"),
}


class MessagesTool(Body):
    """A tool of a client. Anthropic's own tools, whose `type` has a date, are refused.

    Attributes:
        defer_loading: Has no effect: every tool is in the prompt.
    """

    not_served: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {
        "allowed_callers": ((["direct"],), "this server runs no code that could call tools"),
        "input_examples": (([],), "the chat template has no place for them: put them into the description"),
    }
    name: str = Field(min_length=1)
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] = "custom"
    strict: bool = False
    eager_input_streaming: bool | None = None
    defer_loading: bool = False
    cache_control: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_anthropics(cls, data: Any) -> Any:
        if isinstance(data, dict):
            kind = cast(dict[str, Any], data).get("type")
            if kind not in (None, "custom"):
                text = (
                    f"tools: type is {repr(kind)[:80]}, expected custom: this server has no tools of its own"
                )
                raise refused(unsupported("tools", text))
        return cast(Any, data)


class MessagesToolChoice(Body):
    """Whether the answer may or must use tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _check_name(self) -> MessagesToolChoice:
        if (self.type == "tool") != (self.name is not None):
            expected = "a name" if self.name is None else "no name"
            raise refused(
                invalid(
                    "tool_choice", f"tool_choice.name is {self.name!r}, expected {expected} with {self.type}"
                )
            )
        return self


class MessagesThinking(Body):
    """Whether the model reasons before its answer."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=_MIN_BUDGET)
    display: Literal["summarized", "omitted"] | None = None

    @model_validator(mode="after")
    def _check_budget(self) -> MessagesThinking:
        if (self.type == "enabled") != (self.budget_tokens is not None):
            expected = f"at least {_MIN_BUDGET}" if self.budget_tokens is None else "none"
            text = f"thinking.budget_tokens is {self.budget_tokens}, expected {expected} with {self.type}"
            raise refused(invalid("thinking", text))
        return self


class MessagesFormat(Body):
    """The JSON schema of an answer."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class MessagesOutput(Body):
    """Effort and format of an answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: MessagesFormat | None = None


class MessagesMetadata(Body):
    """The user of a request."""

    user_id: str | None = Field(None, max_length=512)


class CountTokensBody(Body):
    """The JSON body of a request to /v1/messages/count_tokens."""

    not_served = _NOT_SERVED
    model: str | None = None
    messages: Objects = Field(min_length=1)
    system: str | Objects | None = None
    tools: list[MessagesTool] = Field(default_factory=list[MessagesTool])
    tool_choice: MessagesToolChoice | None = None
    thinking: MessagesThinking | None = None
    output_config: MessagesOutput | None = None
    cache_control: dict[str, Any] | None = None


class MessagesBody(CountTokensBody):
    """The JSON body of a request to /v1/messages."""

    max_tokens: int = Field(ge=1, le=MAX_INT32)
    stream: bool = False
    stop_sequences: Texts = Field(default_factory=list[str])
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: MessagesMetadata | None = None
    service_tier: Literal["auto", "standard_only"] = "auto"

    @model_validator(mode="after")
    def _check_lengths(self) -> MessagesBody:
        budget = self.thinking.budget_tokens if self.thinking else None
        if budget is not None and budget >= self.max_tokens:
            text = f"thinking.budget_tokens is {budget}, expected less than max_tokens, {self.max_tokens}"
            raise refused(invalid("thinking", text))
        return self

"""Write an answer as Anthropic's content blocks, whole or as the events of a stream. Runs on the event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import pydantic_core

from inflight.openai.answers import Piece
from inflight.openai.chat_completions import AnswerParser, ReasoningUsage
from inflight.openai.chat_prompts import ChatPrompt
from inflight.openai.errors import describe_error
from inflight.openai.messages.error_format import in_anthropics_format
from inflight.openai.prepared_body import PreparedBody
from inflight.openai.protocol import ChatBody
from inflight.openai.streaming import EventStream, event
from inflight.serving.chat.channels import SEPARATOR
from inflight.serving.chat.tool_deltas import TextOrder, ToolCallDelta

_DELTAS = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""The type of a block's deltas, and the field with their text, by the type of the block."""


class MessageStream(EventStream):
    """A stream of Anthropic's events. It ends with the event message_stop, or with an error event."""

    end = b""

    def error_event(self, error: BaseException) -> bytes:
        """Return the event that reports an error."""
        return event(in_anthropics_format(*describe_error(error)), "error")


@dataclass(frozen=True, slots=True)
class _BlockPart:
    """Text that belongs to one block.

    Attributes:
        kind: Type of the block.
        text: The text; of a tool call, JSON of its arguments.
        call: The call that begins with this part; None for other parts.
    """

    kind: str
    text: str
    call: ToolCallDelta | None = None


class MessageWriter:
    """Writes one answer to a chat as Anthropic's message.

    Args:
        body: The chat.
        prepared: The prepared chat.
        prompt: The chat's prompt.
        message_id: Id of the message.
        max_tokens: Largest number of tokens that the client asked for.
    """

    def __init__(
        self, body: ChatBody, prepared: PreparedBody, prompt: ChatPrompt, message_id: str, max_tokens: int
    ) -> None:
        self._shows_reasoning = body.include_reasoning
        self._prepared = prepared
        self._id = message_id
        self._max_tokens = max_tokens
        self._parser = AnswerParser(prompt, only_one=not body.parallel_tool_calls)
        self._reasoning = ReasoningUsage(prompt, prepared.usage)
        self._order = TextOrder()
        self._kind = ""  # of the block that is open
        self._last_kind = ""  # of the last part; "": there is none
        self._num_blocks = 0

    def whole(self, piece: Piece) -> dict[str, Any]:
        """Return the message of an answer that is not streamed."""
        self._reasoning.add([piece])
        blocks: list[dict[str, Any]] = []
        texts: list[str] = []
        for part in self._parts(piece):
            if part.call is not None or not blocks or blocks[-1]["type"] != part.kind:
                blocks.append(_new_block(part))
                texts.append("")
            texts[-1] += part.text
        for block, text in zip(blocks, texts, strict=True):
            block[_field_of(block["type"])] = _arguments(text) if block["type"] == "tool_use" else text
        return self._message(blocks, self._end(piece), self._usage())

    async def events(self, pieces: AsyncIterator[list[Piece]]) -> AsyncIterator[bytes]:
        """Yield the events of a stream."""
        last: Piece | None = None
        async for some in pieces:
            self._reasoning.add(some)
            told: list[dict[str, Any]] = []
            if last is None:
                usage = {**self._usage(), "output_tokens": 0, "output_tokens_details": None}
                start = self._message([], _end_of(None), usage)
                told.append({"type": "message_start", "message": start})
            for piece in some:
                for part in self._parts(piece):
                    told += self._events_of(part)
                last = piece
            if told:
                yield _framed(told)
        if last is not None:  # the usage is complete now
            end = {"type": "message_delta", "delta": self._end(last), "usage": self._usage()}
            yield _framed([*self._close_block(), end, {"type": "message_stop"}])

    def _parts(self, piece: Piece) -> Iterator[_BlockPart]:
        """Yield the parts that the piece adds, in the order in which the model has written them."""
        for reasoning, delta in self._parser.parts(piece):
            if reasoning and self._shows_reasoning:
                yield self._text_part("thinking", reasoning)
            for part in self._order.sorted(delta):
                if isinstance(part, str):
                    yield self._text_part("text", part)
                else:
                    self._last_kind = "tool_use"
                    yield _BlockPart("tool_use", part.arguments, part if part.id else None)

    def _text_part(self, kind: str, text: str) -> _BlockPart:
        """Return a part without the separator of messages, if a block begins with it."""
        if self._last_kind not in ("", kind):
            text = text.removeprefix(SEPARATOR)
        self._last_kind = kind
        return _BlockPart(kind, text)

    def _events_of(self, part: _BlockPart) -> Iterator[dict[str, Any]]:
        if part.call is not None or part.kind != self._kind:
            yield from self._close_block()
            self._kind = part.kind
            block = _new_block(part)
            yield {"type": "content_block_start", "index": self._num_blocks, "content_block": block}
        if part.text:
            kind, name = _DELTAS[part.kind]
            delta = {"type": kind, name: part.text}
            yield {"type": "content_block_delta", "index": self._num_blocks, "delta": delta}

    def _close_block(self) -> Iterator[dict[str, Any]]:
        if self._kind:
            yield {"type": "content_block_stop", "index": self._num_blocks}
            self._num_blocks += 1
            self._kind = ""

    def _message(
        self, content: list[dict[str, Any]], end: dict[str, Any], usage: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._prepared.model_name,
            "content": content,
            **end,
            "usage": usage,
        }

    def _end(self, piece: Piece) -> dict[str, Any]:
        """Return why the answer ended."""
        num_tokens = self._prepared.usage.completion_tokens
        has_filled = num_tokens == self._prepared.prompts[0][0].request.max_new_tokens < self._max_tokens
        reason = "end_turn"
        if piece.finish_reason == "length":
            reason = "model_context_window_exceeded" if has_filled else "max_tokens"
        elif piece.stop_string:
            reason = "stop_sequence"
        elif self._parser.has_called:
            reason = "tool_use"
        return _end_of(reason, piece.stop_string or None)

    def _usage(self) -> dict[str, Any]:
        usage = self._prepared.usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
            "service_tier": "standard",
        }


def _framed(events: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(event(each, each["type"]) for each in events)


def _end_of(reason: str | None, stop_sequence: str | None = None) -> dict[str, Any]:
    return {"stop_reason": reason, "stop_sequence": stop_sequence, "stop_details": None}


def _new_block(part: _BlockPart) -> dict[str, Any]:
    if part.kind == "thinking":
        return {"type": "thinking", "thinking": "", "signature": ""}
    if part.call is None:
        return {"type": "text", "text": ""}
    return {"type": "tool_use", "id": part.call.id, "name": part.call.name, "input": {}}


def _field_of(kind: str) -> str:
    return "input" if kind == "tool_use" else kind


def _arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call; of a call that a limit has cut off, those that are complete."""
    try:
        found: Any = pydantic_core.from_json(text or "{}", allow_partial=True)
    except ValueError:
        found = None
    return cast(dict[str, Any], found) if isinstance(found, dict) else {"raw_arguments": text}

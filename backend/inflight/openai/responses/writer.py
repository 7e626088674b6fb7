"""Writes a response: its items, and the events of its stream in OpenAI's order.

The answer's text is parsed as in a chat. Reasoning, text and calls become items in the order in which the
model has written them; at most one item is open at a time. Joined events and items do not depend on how the
text is divided into pieces. Used by one thread at a time.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from inflight.errors import Cancelled
from inflight.openai.answers import Piece
from inflight.openai.chat_completions import AnswerParser, ReasoningUsage
from inflight.openai.chat_prompts import ChatPrompt
from inflight.openai.errors import describe_error
from inflight.openai.log_probs import chat_log_probs
from inflight.openai.prepared_body import PreparedBody
from inflight.openai.protocol import ChatBody
from inflight.openai.responses.items import new_item_id
from inflight.openai.streaming import event
from inflight.serving.chat.channels import SEPARATOR
from inflight.serving.chat.tool_deltas import TextOrder, ToolCallDelta

_LAST_EVENTS = {
    "completed": "response.completed",
    "failed": "response.failed",
    "incomplete": "response.incomplete",
    "cancelled": "response.incomplete",
}
"""The last event of a stream by the response's status."""
_TEXT_EVENTS = {"message": "response.output_text", "reasoning": "response.reasoning_text"}


@dataclass(slots=True)
class _OpenItem:
    """The item that is generated now: its kind, and what it has so far."""

    kind: str
    index: int
    call: ToolCallDelta | None = None
    texts: list[str] = field(default_factory=list[str])
    log_probs: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    id: str = ""

    def __post_init__(self) -> None:
        self.id = new_item_id(self.kind)

    @property
    def text(self) -> str:
        """Return the text, the reasoning or the arguments so far."""
        return "".join(self.texts)

    def part(self) -> dict[str, Any]:
        """Return the content part of a message or of reasoning."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {
            "type": "output_text",
            "text": self.text,
            "annotations": [],
            "logprobs": list(self.log_probs),
        }

    def as_json(self, status: str, with_part: bool = True) -> dict[str, Any]:
        """Return OpenAI's object for the item; a new one has no part yet."""
        item: dict[str, Any] = {"id": self.id, "type": self.kind, "status": status}
        if self.call is not None:
            return {**item, "call_id": self.call.id, "name": self.call.name, "arguments": self.text}
        content = [self.part()] if with_part else []
        own: dict[str, Any] = {"summary": []} if self.kind == "reasoning" else {"role": "assistant"}
        return {**item, **own, "content": content}


class _TextLogProbs:
    """The log probs of the tokens of each message, without those of reasoning and calls.

    Parses the answer a second time, token by token, because a token's text may be held back.
    """

    def __init__(self, body: ChatBody, prompt: ChatPrompt, prepared: PreparedBody) -> None:
        self._num_top = body.top_logprobs or 0
        self._prepared = prepared
        self._parser = AnswerParser(prompt, only_one=not body.parallel_tool_calls)
        self._order = TextOrder()
        self._undecided: list[tuple[dict[str, Any] | None, str]] = []  # (log probs, text) of each token
        self._is_in_message = False
        self._is_behind_mark = bool(prompt.reasoning_parser)  # whether marks may precede the next content
        self.of_messages: list[list[dict[str, Any]]] = []

    def add(self, piece: Piece) -> None:
        """Append the tokens of a piece."""
        names = self._prepared.names
        assert names is not None, "the body asks for log probs"
        tops = piece.top_log_probs or ()
        told = chat_log_probs(names, self._num_top, piece.token_ids, piece.log_probs or (), tops)
        for token_id, entry in zip(piece.token_ids, told["content"], strict=True):
            shown = b"" if token_id in self._prepared.hidden_ids else names.bytes_of(token_id)
            text = shown.decode("latin-1")  # marks are ASCII, so the decoding of other bytes does not matter
            self._undecided.append((entry, text))
            self._add(Piece(0, 0, text, ()))
        if piece.finish_reason is not None:
            self._add(Piece(0, 0, "", (), piece.finish_reason, is_cut=piece.is_cut))

    def _add(self, piece: Piece) -> None:
        for reasoning, delta in self._parser.parts(piece):
            if reasoning:
                self._drop()
                self._is_in_message = False
            for part in self._order.sorted(delta):
                if isinstance(part, str):
                    if not self._is_in_message:
                        self.of_messages.append([])
                    self.of_messages[-1] += self._take(part)
                else:
                    self._drop()
                self._is_in_message = isinstance(part, str)

    def _drop(self) -> None:
        """Forget the undecided tokens except the last, which may also have the beginning of a message."""
        del self._undecided[:-1]
        self._is_behind_mark = True

    def _take(self, content: str) -> list[dict[str, Any]]:
        """Return the log probs of the undecided tokens that make this content; forget those before it.

        Behind a mark, a content that repeats the first characters of a mark may lose one of its first tokens.
        """
        shown = "".join(text for _, text in self._undecided)
        if content.startswith(SEPARATOR) and content not in shown:  # between two messages of channels
            content, self._is_behind_mark = content.removeprefix(SEPARATOR), True
            if not content:
                self._drop()
                return []
        start = max(shown.rfind(content), 0) if self._is_behind_mark else 0
        self._is_behind_mark = False
        end, offset = start + len(content), 0
        taken: list[dict[str, Any]] = []
        rest: list[tuple[dict[str, Any] | None, str]] = []
        for entry, text in self._undecided:
            begin, offset = offset, offset + len(text)
            if begin >= end:
                rest.append((entry, text))
            elif offset > start:
                taken += [entry] if entry else []
                if offset > end:
                    rest.append((None, text[end - begin :]))
        self._undecided = rest
        return taken


class ResponseWriter:
    """Writes one response, whole or as a stream of events.

    Args:
        response_id: The response's id.
        body: The chat that the response answers.
        prompt: The chat's prompt, with the names of the parsers.
        prepared: The prepared body.
        echoed: Fields of the response that repeat the request's.

    Attributes:
        status: OpenAI's status of the response.
        output: The items that have ended.
    """

    def __init__(
        self,
        response_id: str,
        body: ChatBody,
        prompt: ChatPrompt,
        prepared: PreparedBody,
        echoed: dict[str, Any],
    ) -> None:
        self.id = response_id
        self.status = "in_progress"
        self.output: list[dict[str, Any]] = []
        self._body = body
        self._prepared = prepared
        self._echoed = echoed
        self._parser = AnswerParser(prompt, only_one=not body.parallel_tool_calls)
        self._order = TextOrder()
        self._reasoning = ReasoningUsage(prompt, prepared.usage)
        self._log_probs = _TextLogProbs(body, prompt, prepared) if body.logprobs else None
        self._num_messages = 0
        self._open: _OpenItem | None = None
        self._events: list[bytes] = []
        self._num_events = 0
        self._created = int(time.time())
        self._ended: dict[str, Any] = {}

    async def events(self, pieces: AsyncIterator[list[Piece]]) -> AsyncIterator[bytes]:
        """Yield the events of a stream. An error before the first piece is raised, a later one is an event."""
        try:
            async for some in pieces:
                for piece in some:
                    self.add(piece)
                if events := self._take_events():
                    yield events
        except Cancelled:
            self.end("cancelled")
        except Exception as error:
            if not self._num_events:
                raise
            self._fail(error)
        yield self._take_events()

    def add(self, piece: Piece) -> None:
        """Append a piece of the answer. Nothing happens after the response's end."""
        if self.status != "in_progress":
            return
        self._begin()
        self._reasoning.add([piece])
        if self._log_probs is not None:
            self._log_probs.add(piece)
        self._add_parts(piece)
        if piece.finish_reason is not None:
            self.end("incomplete" if piece.finish_reason == "length" else "completed")

    def end(self, status: str) -> None:
        """End the response with this status. Nothing happens if it has ended."""
        if self.status != "in_progress":
            return
        self._begin()
        if status == "cancelled":  # text that is held back may be the beginning of a mark, and is dropped
            self._add_parts(Piece(0, 0, "", (), "cancelled", is_cut=True))
        if not (self._open or self.output) and status in ("completed", "incomplete"):
            self._open_item("message")
        self._close("completed" if status == "completed" else "incomplete")
        self.status = status
        if status == "completed":
            self._ended["completed_at"] = int(time.time())
        if status == "incomplete":
            self._ended["incomplete_details"] = {"reason": "max_output_tokens"}
        self._emit(_LAST_EVENTS[status], response=self.response())

    def response(self) -> dict[str, Any]:
        """Return the response object, with the items that have ended."""
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": self.status,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "model": self._prepared.model_name,
            "output": list(self.output),
            "usage": None if self.status == "in_progress" else self._usage(),
            **self._echoed,
            **self._ended,
        }

    def _fail(self, error: Exception) -> None:
        status, described = describe_error(error)
        code = (
            "rate_limit_exceeded" if status == 429 else "invalid_prompt" if status < 500 else "server_error"
        )
        self._ended["error"] = {"code": code, "message": described["error"]["message"]}
        self.end("failed")

    def _begin(self) -> None:
        if not self._num_events:
            self._emit("response.created", response=self.response())
            self._emit("response.in_progress", response=self.response())

    def _add_parts(self, piece: Piece) -> None:
        for reasoning, delta in self._parser.parts(piece):
            if reasoning:
                self._add_text("reasoning", reasoning)
            for part in self._order.sorted(delta):
                if isinstance(part, str):
                    self._add_text("message", part)
                else:
                    self._add_call(part)

    def _add_text(self, kind: str, text: str) -> None:
        item = self._open
        if item is None or item.kind != kind:
            if self.output or item is not None:
                text = text.removeprefix(SEPARATOR)
            item = self._open_item(kind)
        item.texts.append(text)
        more = {"logprobs": self._new_log_probs(item)} if kind == "message" else {}
        self._emit_of(item, f"{_TEXT_EVENTS[kind]}.delta", content_index=0, delta=text, **more)

    def _add_call(self, delta: ToolCallDelta) -> None:
        item = self._open_item("function_call", delta) if delta.id else self._open
        assert item is not None and item.call is not None, "the first delta of a call has its id"
        if delta.arguments:
            item.texts.append(delta.arguments)
            self._emit_of(item, "response.function_call_arguments.delta", delta=delta.arguments)

    def _new_log_probs(self, item: _OpenItem) -> list[dict[str, Any]]:
        """Return the log probs of the message that have become known, and add them to the item."""
        known = self._log_probs.of_messages if self._log_probs else []
        place = self._num_messages - 1
        new = known[place][len(item.log_probs) :] if place < len(known) else []
        item.log_probs += new
        return new

    def _open_item(self, kind: str, call: ToolCallDelta | None = None) -> _OpenItem:
        self._close("completed")
        item = self._open = _OpenItem(kind, len(self.output), call)
        self._num_messages += kind == "message"
        new = item.as_json("in_progress", with_part=False)
        self._emit("response.output_item.added", output_index=item.index, item=new)
        if call is None:
            self._emit_of(item, "response.content_part.added", content_index=0, part=item.part())
        return item

    def _close(self, status: str) -> None:
        item, self._open = self._open, None
        if item is None:
            return
        if item.kind == "message":
            self._new_log_probs(item)
        if item.call is not None:
            self._emit_of(item, "response.function_call_arguments.done", arguments=item.text)
        else:
            more = {"logprobs": list(item.log_probs)} if item.kind == "message" else {}
            self._emit_of(item, f"{_TEXT_EVENTS[item.kind]}.done", content_index=0, text=item.text, **more)
            self._emit_of(item, "response.content_part.done", content_index=0, part=item.part())
        ended = item.as_json(status)
        self.output.append(ended)
        self._emit("response.output_item.done", output_index=item.index, item=ended)

    def _emit_of(self, item: _OpenItem, name: str, **fields: Any) -> None:
        self._emit(name, item_id=item.id, output_index=item.index, **fields)

    def _emit(self, name: str, **fields: Any) -> None:
        if self._body.stream:
            self._events.append(event({"type": name, "sequence_number": self._num_events, **fields}, name))
        self._num_events += 1

    def _take_events(self) -> bytes:
        events, self._events = self._events, []
        return b"".join(events)

    def _usage(self) -> dict[str, Any]:
        usage = self._prepared.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

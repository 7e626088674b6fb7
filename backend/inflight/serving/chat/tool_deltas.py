"""The additions to content and tool calls by each piece of a model's text. Immutable; any thread."""

from __future__ import annotations

import secrets
import string
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from inflight.serving.chat.tool_formats import Ids


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """The part of a tool call that a piece of text adds.

    Attributes:
        index: Index of the call in the text, from 0.
        id: The call's id in its first delta; "" in others.
        name: The function's name in the call's first delta; "" in others.
        arguments: New part of the arguments, as JSON text.
        offset: Number of characters of the text's content before the call; in the call's first delta.
    """

    index: int
    id: str
    name: str
    arguments: str
    offset: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class ChatDelta:
    """The additions of a piece of text to an answer: content, and at most one delta for each tool call."""

    content: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    @classmethod
    def joined(cls, deltas: Iterable[ChatDelta]) -> ChatDelta:
        """Join consecutive deltas of one text."""
        content: list[str] = []
        calls: list[ToolCallDelta] = []
        for delta in deltas:
            content.append(delta.content)
            calls += delta.tool_calls
        return cls("".join(content), one_a_call(calls))


class TextOrder:
    """Brings the content and the calls of an answer's deltas into the order of the answer's text."""

    def __init__(self) -> None:
        self._num_content = 0  # number of characters of the content so far

    def sorted(self, delta: ChatDelta) -> Iterator[str | ToolCallDelta]:
        """Yield the parts of the next delta: texts that are not empty, and calls."""
        content = delta.content
        for call in delta.tool_calls:
            num_before = call.offset - self._num_content if call.id else 0
            if num_before > 0:
                yield content[:num_before]
                content = content[num_before:]
                self._num_content += num_before
            yield call
        if content:
            self._num_content += len(content)
            yield content


def one_a_call(deltas: Sequence[ToolCallDelta]) -> tuple[ToolCallDelta, ...]:
    """Join the deltas of each call, because clients expect at most one entry for each call index in a chunk."""
    if len(deltas) < 2:
        return tuple(deltas)
    firsts: dict[int, ToolCallDelta] = {}
    arguments: dict[int, list[str]] = {}
    for delta in deltas:
        firsts.setdefault(delta.index, delta)
        arguments.setdefault(delta.index, []).append(delta.arguments)
    return tuple(replace(first, arguments="".join(arguments[index])) for index, first in firsts.items())


def new_id(ids: Ids, name: str, index: int) -> str:
    """Return an id for a call, in the form that a format requires."""
    if ids is Ids.NINE:
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
    return f"functions.{name}:{index}" if ids is Ids.NUMBERED else f"call_{secrets.token_hex(12)}"

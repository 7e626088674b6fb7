"""Separation of an answer's messages in gpt-oss' format, harmony, while the text streams.

An answer is a sequence of messages, each with a header:

    <|channel|>analysis<|message|>…<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f json<|message|>{…}<|call|>

Messages of the channel `analysis` are reasoning. Messages to a function are calls, whose headers have several
forms; they are passed on in one form, that of `tool_format_table.py`. All others are content. There is one
ChannelStream for each text; it is used by one thread at a time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from inflight.serving.chat.held_text import HeldText, overlap

CALL_BEGIN, CALL_NAME_END, CALL_END = "<|channel|>commentary to=functions.", "<|message|>", "<|call|>"
"""The texts of calls in the form in which they are passed on."""

SEPARATOR = "\n\n"
"""The text between two messages of one kind."""

_LONGEST_HEADER = 1024
_HEADER_END, _START, _END = "<|message|>", "<|start|>", "<|end|>"
_STARTS = (_START, "<|channel|>")
_MARKS = {
    "reasoning": (_END, CALL_END, "<|return|>", _START),
    "final": (_END, CALL_END, "<|return|>", _START),
    "call": (CALL_END, "<|return|>", _END + _START, _START),  # a text among the arguments may have an `_END`
    "content": _STARTS,
}
"""The texts that end a message, by its kind. `content` is text without a header."""
_TO = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class ChannelStream:
    """Incremental parser of a text into reasoning, and content with calls in one form.

    Has the methods of `reasoning.ReasoningStream`. A text without headers is returned unchanged as content.
    Messages of one kind are joined with an empty line between them. The joined results do not depend on how the
    text is divided into pieces.

    Args:
        starts_inside: Whether the prompt ends with the header of reasoning.
    """

    def __init__(self, starts_inside: bool) -> None:
        self._text = ""  # text not parsed yet
        self._kind = "reasoning" if starts_inside else "between"
        self._reasoning = HeldText(drop_leading=True)
        self._has_reasoning = False
        self._content = ""
        self._has_content = False
        self._is_first = True  # whether no message has begun

    def add(self, text: str) -> tuple[str, str]:
        """Append text; return (reasoning, content): the parts that are certain now."""
        parts = list(self.parts(text))
        return "".join(part[0] for part in parts), "".join(part[1] for part in parts)

    def parts(self, text: str) -> Iterator[tuple[str, str]]:
        """Append text; yield (reasoning, content) of each message, in the order of the text."""
        self._text += text
        while True:
            is_further = self._between() if self._kind == "between" else self._inside()
            if self._kind == "between" or not is_further:
                yield self._take()
            if not is_further:
                return

    def _take(self) -> tuple[str, str]:
        content, self._content = self._content, ""
        return self._reasoning.take(), content

    def finish(self, is_cut: bool = False) -> tuple[str, str]:
        """End the text; return (reasoning, content): the remaining parts.

        Args:
            is_cut: Whether a limit ended the text. An incomplete mark at its end is then dropped.
        """
        rest, self._text = self._text, ""
        shown = rest.lstrip()
        if self._kind == "between":
            is_header = shown.startswith((*_STARTS, "to="))
            is_begun = is_cut and len(shown) > 1 and _begins(shown, (*_STARTS, "to="))
            rest = "" if is_header or is_begun or not (shown or self._is_first) else rest
        elif is_cut and len(rest) > 1 and _begins(rest, _MARKS[self._kind]):
            rest = ""
        elif self._kind == "call":
            rest = rest.removesuffix(_END)
        self._pass(rest)
        return self._take()

    @property
    def is_in_reasoning(self) -> bool:
        """Return whether the text so far ends inside the reasoning."""
        return self._kind == "reasoning"

    @property
    def has_ended(self) -> bool:
        """Return whether all further text is content. It never is: reasoning may follow every message."""
        return False

    def _between(self) -> bool:
        """Parse the header of the next message; return whether it is complete."""
        shown = self._text.lstrip()
        starts = (*_STARTS, "to=") if self._is_first else _STARTS
        if not shown or _begins(shown, starts):
            return False
        header, end, rest = shown.partition(_HEADER_END)
        if shown.startswith(starts):
            if not end and len(shown) < _LONGEST_HEADER + len(_HEADER_END):
                return False
            if end and len(header) <= _LONGEST_HEADER:
                self._text = rest
                self._open_by(header)
                return True
        if not self._is_first:
            self._text = shown
        self._open("content")
        begun = next((start for start in _STARTS if shown.startswith(start)), "")
        if begun:  # a header without an end
            place = self._text.find(begun) + len(begun)
            self._pass(self._text[:place])
            self._text = self._text[place:]
        return True

    def _open_by(self, header: str) -> None:
        """Begin the message that a header describes."""
        recipient, channel = _TO.search(header), _CHANNEL.search(header)
        if recipient is not None:
            self._open("call")
            self._content += f"{CALL_BEGIN}{recipient[1]}{CALL_NAME_END}"
        elif channel is not None and channel[1] == "analysis":
            self._open("reasoning")
            if self._has_reasoning:
                self._reasoning.add(SEPARATOR)
        else:
            self._open("final")
            self._content += SEPARATOR if self._has_content else ""

    def _open(self, kind: str) -> None:
        self._kind, self._is_first = kind, False

    def _inside(self) -> bool:
        """Pass on a message up to its end; return whether the end was found."""
        marks = _MARKS[self._kind]
        places = [(place, mark) for mark in marks if (place := self._text.find(mark)) >= 0]
        if not places:
            held = max(overlap(self._text, mark) for mark in marks)
            end = len(self._text) - held
            self._pass(self._text[:end])
            self._text = self._text[end:]
            return False
        place, mark = min(places)
        self._pass(self._text[:place])
        header = next((start for start in _STARTS if mark.endswith(start)), "")
        self._text = header + self._text[place + len(mark) :]
        if self._kind == "call":
            self._content += CALL_END
        self._kind = "between"
        return True

    def _pass(self, text: str) -> None:
        """Pass on a part of the message."""
        if self._kind == "reasoning":
            self._reasoning.add(text)
            self._has_reasoning |= bool(text.strip())
        else:
            self._content += text
            self._has_content |= bool(text.strip()) and self._kind != "call"


def _begins(text: str, marks: tuple[str, ...]) -> bool:
    """Return whether a text is the beginning of a mark, but not the whole mark."""
    return any(mark.startswith(text) and mark != text for mark in marks)

"""Separation of a model's reasoning from its answer while the text streams.

Reasoning stands between the marks of a format, such as `<think>…</think>`, at the beginning of an answer. The
first mark is missing if the prompt ends with it or the model leaves it out. Tool calls are parsed afterwards
from the rest of the answer. There is one parser for each text; it is used by one thread at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from inflight.serving.chat.channels import ChannelStream
from inflight.serving.chat.held_text import HeldText, overlap
from inflight.serving.chat.reasoning_formats import ReasoningFormat, find_reasoning_format


def reasoning_stream(parser: str, starts_inside: bool) -> ReasoningStream | ChannelStream:
    """Return a parser for one answer.

    Args:
        parser: One of reasoning_formats.REASONING_PARSERS; "" treats all text as content.
        starts_inside: Whether the answer begins with reasoning; see the function `starts_inside`.

    Raises:
        InvalidArgument: The parser does not exist.
    """
    form = find_reasoning_format(parser) if parser else ReasoningFormat("", "")
    if form.has_channels:
        return ChannelStream(starts_inside)
    return ReasoningStream(form, starts_inside and bool(parser))


def ends_reasoning(
    prompt: str, final_message: Mapping[str, Any] | None = None, parser: str = "think"
) -> bool:
    """Return whether the prompt contains the end of the reasoning; arguments as in `starts_inside`."""
    form = find_reasoning_format(parser)
    if final_message is not None:
        content = str(final_message.get("content") or "")
        if content.rfind(form.end) > content.rfind(form.begin):
            return True
    return prompt.rstrip().endswith(form.end)


def starts_inside(parser: str, prompt: str, final_message: Mapping[str, Any] | None = None) -> bool:
    """Return whether the answer to a prompt begins inside the reasoning, without `<think>`.

    Args:
        parser: One of reasoning_formats.REASONING_PARSERS, or "".
        prompt: The rendered prompt.
        final_message: The message that the answer continues; None if it begins a new message.
    """
    if not parser:
        return False
    if opens_reasoning(prompt, final_message, parser):
        return True
    is_always = find_reasoning_format(parser).is_always
    return is_always and final_message is None and not ends_reasoning(prompt, parser=parser)


def opens_reasoning(
    prompt: str, final_message: Mapping[str, Any] | None = None, parser: str = "think"
) -> bool:
    """Return whether a prompt ends inside the reasoning; arguments as in `starts_inside`."""
    form = find_reasoning_format(parser)
    if final_message is not None:
        content = str(final_message.get("content") or "")
        if content.rfind(form.begin) > content.rfind(form.end):
            return True
    return prompt.rstrip().endswith(form.begin)


class ReasoningStream:
    """Incremental parser of a text into reasoning and content.

    Drops white space around the reasoning and before the content that follows it. A text without reasoning
    is returned unchanged as content. The concatenated results do not depend on how the text is divided into
    pieces.

    Args:
        form: The marks; with an empty `begin` there is no reasoning.
        starts_inside: Whether the text begins with reasoning, without `begin`. If the format has reasoning
            always, the text may nevertheless begin with `begin`, which is then dropped.
    """

    def __init__(self, form: ReasoningFormat, starts_inside: bool) -> None:
        self._begin, self._end = form.begin, form.end
        self._skipped = form.skipped  # texts that may still follow
        self._closing = form.closing  # text that may still follow, "" for none
        self._text = ""
        self._otherwise = "inside" if starts_inside else "after"  # state without `begin`
        is_open = not form.begin or (starts_inside and not form.is_always)
        self._place = self._otherwise if is_open else "start"
        self._reasoning = HeldText(drop_leading=True)
        self._drop_leading = False

    def add(self, text: str) -> tuple[str, str]:
        """Append text; return (reasoning, content): the parts that are certain now."""
        self._text += text
        if self._place == "start":
            self._start()
        if self._place == "inside":
            self._inside()
        return self._reasoning.take(), self._content() if self._place == "after" else ""

    def parts(self, text: str) -> Iterator[tuple[str, str]]:
        """Append text; yield (reasoning, content) in the order of the text: content follows all reasoning."""
        yield self.add(text)

    def finish(self, is_cut: bool = False) -> tuple[str, str]:
        """End the text; return (reasoning, content): the remaining parts.

        Args:
            is_cut: Whether a limit ended the text. An incomplete mark at its end is then dropped.
        """
        marks = {"start": self._begin, "inside": self._end, "after": self._closing}
        mark = marks[self._place]
        if is_cut and len(self._text.lstrip()) > 1 and mark.startswith(self._text.lstrip()):
            self._text = ""
        if self._place == "start":
            self._place = self._otherwise
        if self._place == "after":
            return "", self._content(is_end=True)
        self._reasoning.add(self._text)
        return self._reasoning.take(), ""

    @property
    def is_in_reasoning(self) -> bool:
        """Return whether the text so far ends inside the reasoning."""
        return self._place == "inside"

    @property
    def has_ended(self) -> bool:
        """Return whether all further text is content."""
        return self._place == "after"

    def _start(self) -> None:
        shown = self._text.lstrip()
        if shown.startswith(self._begin):
            self._text = shown[len(self._begin) :]
            self._place = "inside"
        elif not self._begin.startswith(shown):
            self._place = self._otherwise

    def _inside(self) -> None:
        thought, end, rest = self._text.partition(self._end)
        if end:
            self._reasoning.add(thought)
            self._text, self._place, self._drop_leading = rest, "after", True
            return
        held = overlap(self._text, self._end)
        self._reasoning.add(self._text[: len(self._text) - held])
        self._text = self._text[len(self._text) - held :]

    def _content(self, is_end: bool = False) -> str:
        shown = self._text.lstrip()
        if self._skipped and shown.startswith(self._skipped):
            mark = next(each for each in self._skipped if shown.startswith(each))
            self._text, self._drop_leading = shown[len(mark) :], True
        elif not is_end and any(each.startswith(shown) for each in self._skipped):
            return ""
        self._skipped = ()
        text, self._text = self._text, ""
        if self._drop_leading:
            text = text.lstrip()
            self._drop_leading = not text
        return self._without_closing(text, is_end) if self._closing else text

    def _without_closing(self, text: str, is_end: bool) -> str:
        """Return the text without the text that ends the answer, of which a beginning is held back."""
        before, closing, after = text.partition(self._closing)
        if closing:
            self._closing, after = "", after.lstrip()
            self._drop_leading = not after
            return before.rstrip() + after
        shown = text if is_end else text[: len(text) - overlap(text, self._closing)].rstrip()
        self._text = text[len(shown) :]
        return shown


class ReasoningTokens:
    """Counter of an answer's reasoning tokens, including the tokens of the marks.

    Args:
        stream: A new parser, which only this counter uses.
        token_bytes: The bytes that each token adds to a text, indexed by token id.
    """

    def __init__(self, stream: ReasoningStream | ChannelStream, token_bytes: Sequence[bytes]) -> None:
        self._stream = stream
        self._token_bytes = token_bytes
        self._num_undecided = 0

    def add(self, token_ids: Sequence[int]) -> int:
        """Append tokens; return by how many the known number of reasoning tokens grows."""
        count = 0
        for token_id in token_ids:
            if self._stream.has_ended:
                break
            raw = self._token_bytes[token_id] if token_id < len(self._token_bytes) else b""
            was_inside = self._stream.is_in_reasoning
            # The marks are ASCII, so the decoding of other bytes does not matter.
            reasoning, content = self._stream.add(raw.decode("latin-1"))
            self._num_undecided += 1
            if was_inside or reasoning or self._stream.is_in_reasoning:
                count += self._num_undecided
                self._num_undecided = 0
            elif content:
                self._num_undecided = 0
        return count

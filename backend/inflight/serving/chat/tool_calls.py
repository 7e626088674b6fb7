"""Parsing of tool calls in a model's text while it streams.

Finds where calls begin and end, and gives them ids. Text that turns out to be no call is content. Neither
the names of tools nor arguments are checked. There is one ToolCallStream for each text; it is used by one
thread at a time.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from inflight.serving.chat.held_text import HeldText, overlap
from inflight.serving.chat.tool_styles import ToolStyle, find_tool_style


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """The part of a tool call that a piece of text adds.

    Attributes:
        index: Index of the call in the text, from 0.
        id: The call's id in its first delta; "" in others.
        name: The function's name in the call's first delta; "" in others.
        arguments: New part of the arguments, as JSON text.
    """

    index: int
    id: str
    name: str
    arguments: str


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
        return cls("".join(content), _one_a_call(calls))


def _one_a_call(deltas: Sequence[ToolCallDelta]) -> tuple[ToolCallDelta, ...]:
    """Join the deltas of each call, because clients expect at most one entry for each call index in a chunk."""
    firsts: dict[int, ToolCallDelta] = {}
    arguments: dict[int, list[str]] = {}
    for delta in deltas:
        firsts.setdefault(delta.index, delta)
        arguments.setdefault(delta.index, []).append(delta.arguments)
    return tuple(replace(first, arguments="".join(arguments[index])) for index, first in firsts.items())


def tool_call_stream(parser: str, forced: bool = False) -> ToolCallStream:
    """Return a parser for one text.

    Args:
        parser: One of TOOL_CALL_PARSERS; "" treats all text as content.
        forced: Whether a guide (`tool_guides.tool_guide`) forces calls, and the prompt ends with
            `forced_prefix`.

    Raises:
        InvalidArgument: The parser does not exist.
    """
    style = find_tool_style(parser) if parser else None
    return ToolCallStream(style, is_forced=forced)


class ToolCallStream:
    """Incremental parser of a text into content and tool calls.

    A call is reported as soon as its name is known and its arguments begin; after that it is never taken
    back. Before that its text is held back, and becomes content if it is no call. White space around a call
    is dropped. A text without calls is returned unchanged as content. The joined deltas do not depend on how
    the text is divided into pieces, except for the random ids.

    Args:
        style: The form of calls; None treats all text as content.
        is_forced: Whether a guide forces calls, and the text begins after a marker.
    """

    def __init__(self, style: ToolStyle | None, is_forced: bool = False) -> None:
        self._is_forced = is_forced
        self._style = style or ToolStyle("", "arguments")
        self._text = ""  # text not parsed yet
        self._held = ""  # text before `_text` that is content if no call follows
        self._nesting = _Nesting()
        self._num_scanned = 0  # number of characters of `_text` that `_nesting` has scanned
        self._in_list = False
        self._content = HeldText()
        self._calls: list[ToolCallDelta] = []
        self._num_calls = 0
        may_begin = style is not None and (is_forced or not style.needs_marker)
        self._step: Callable[[], bool] = self._at_beginning if may_begin else self._in_content

    def add(self, text: str) -> ChatDelta:
        """Append text; return the delta that is certain now."""
        self._text += text
        while self._step():
            pass
        return self._take()

    def finish(self, is_cut: bool = False) -> ChatDelta:
        """End the text; return the remaining delta. A call that has begun is reported with its arguments so far.

        Args:
            is_cut: Whether a limit ended the text. A possible beginning of a call at its end is then
                dropped, because it is useful neither as a call nor as content.
        """
        if not (self._is_rest_of_a_call() or (is_cut and self._may_become_a_call())):
            self._content.add(self._held + self._text)
        self._text = self._held = ""
        delta = self._take()
        return ChatDelta(delta.content + self._content.take_space(), delta.tool_calls)

    def _may_become_a_call(self) -> bool:
        """Return whether the undecided text at the end looks like the beginning of a call."""
        if self._step == self._in_content:  # a single `<` or `[` is probably something else
            return len(self._text) > 1 and self._style.marker.startswith(self._text)
        if self._is_forced or (self._style.marker and self._held.lstrip().startswith(self._style.marker)):
            return True
        if self._step == self._at_beginning:
            return len(self._text) > 1
        is_head = len(self._text) > 1 and _CUT_HEAD.match(self._text) is not None
        return is_head or bool(self._held.strip())

    def _is_rest_of_a_call(self) -> bool:
        """Return whether the undecided text at the end can only belong to a call."""
        if self._is_forced and self._num_calls:
            return True  # a guide allows only calls
        is_part_of_end = self._step == self._after_call and self._style.end.startswith(self._text)
        return self._step == self._in_rest_of_object or (is_part_of_end and bool(self._text))

    def _take(self) -> ChatDelta:
        calls, self._calls = self._calls, []
        return ChatDelta(self._content.take(), _one_a_call(calls))

    # Parser states. Each method parses from its state, and returns whether the next state can run at once.

    def _at_beginning(self) -> bool:
        """Parse the beginning of the text, before any character that is not white space."""
        if not self._skip_space():
            return False
        if self._text.startswith(("{", "[") if self._style.is_list else "{") or self._style.takes_names:
            self._step = self._before_call
        elif self._style.marker.startswith(self._text):
            return False
        else:
            self._give_up()
        return True

    def _in_content(self) -> bool:
        marker = self._style.marker
        place = self._text.find(marker) if marker else -1
        if place < 0:
            end = len(self._text) - overlap(self._text, marker)
            self._content.add(self._text[:end])
            self._text = self._text[end:]
            return False
        self._content.add(self._text[:place])
        self._text, self._held = self._text[place + len(marker) :], marker
        self._step = self._before_call
        return True

    def _before_call(self) -> bool:
        """Parse up to a call or a list of calls."""
        if not self._skip_space():
            return False
        if self._text[0] == "{":
            self._step = self._in_head
        elif self._text[0] == "[" and self._style.is_list and not self._in_list:
            self._in_list = True
            self._hold(1)
        elif self._style.takes_names and not self._in_list:
            self._step = self._in_name
        else:
            self._give_up()
        return True

    def _in_name(self) -> bool:
        """Parse a function's name that is written before the arguments, `name{…}`, instead of inside an object."""
        if found := _NAME.match(self._text[:_LONGEST_HEAD]):
            self._begin_call(found[1])
            self._text = self._text[found.end() :]
            self._step = self._in_named_arguments
            return True
        if "{" in self._text or len(self._text) >= _LONGEST_HEAD or not _NAME_BEGIN.match(self._text):
            self._give_up()
            return True
        return False

    def _in_head(self) -> bool:
        """Parse an object up to its name and the beginning of its arguments."""
        key = _FIRST_KEY.match(self._text)
        if _NO_KEY.match(self._text) or (key and key[1] not in _KEYS):
            self._give_up()
            return True
        if found := _HEAD.match(self._text[:_LONGEST_HEAD]):
            name = _parsed(found[1])
            if not isinstance(name, str) or not name:
                self._give_up()
                return True
            self._begin_call(name)
            self._text = self._text[found.end() :]
            self._num_scanned, self._nesting = 0, _Nesting()
            self._step = self._in_arguments
            return True
        end = self._scan()
        if end < 0:
            return False
        return self._take_whole(self._text[:end], end)

    def _in_arguments(self) -> bool:
        if self._pass_arguments():
            self._nesting = _Nesting(depth=1)
            self._step = self._in_rest_of_object
            return True
        return False

    def _in_named_arguments(self) -> bool:
        if self._pass_arguments():
            self._step = self._after_call
            return True
        return False

    def _in_rest_of_object(self) -> bool:
        """Skip other keys after the arguments."""
        end = self._scan()
        if end < 0:
            self._text, self._num_scanned = "", 0
            return False
        self._text = self._text[end:]
        self._step = self._after_call
        return True

    def _after_call(self) -> bool:
        """Parse after a call: another call, the end of a group of calls, or content."""
        style = self._style
        if not self._skip_space():
            return False
        self._held = ""
        end = "]" if self._in_list else style.end
        if end and self._text.startswith(end):
            self._text = self._text[len(end) :]
        elif style.separator and (self._in_list or not style.is_list) and self._text[0] == style.separator:
            self._hold(1)
            self._step = self._before_call
            return True
        elif style.separator and not style.is_list and self._text[0] == "{":
            self._step = self._in_head  # a line end may replace the separator
            return True
        elif end.startswith(self._text):
            return False
        self._in_list = False
        self._step = self._in_content
        return True

    # Helpers of the states.

    def _skip_space(self) -> bool:
        """Hold white space; return whether other text follows it."""
        self._hold(len(self._text) - len(self._text.lstrip()))
        return bool(self._text)

    def _hold(self, length: int) -> None:
        self._held += self._text[:length]
        self._text = self._text[length:]

    def _give_up(self) -> None:
        """Treat the held text as content, and also the text that follows until the next marker."""
        self._content.add(self._held)
        self._held = ""
        self._num_scanned, self._nesting = 0, _Nesting()
        self._in_list = False
        self._step = self._in_content

    def _scan(self) -> int:
        """Scan to the end of an object; return the index after it, or -1 if the text has no end of it yet."""
        end = self._nesting.find_end(self._text, self._num_scanned)
        self._num_scanned = 0 if end >= 0 else len(self._text)
        return end

    def _pass_arguments(self) -> bool:
        """Report arguments up to their end; return whether the end was found."""
        end = self._scan()
        passed = self._text[:end] if end >= 0 else self._text
        if passed:
            self._calls.append(ToolCallDelta(self._num_calls - 1, "", "", passed))
        self._text = self._text[len(passed) :]
        self._num_scanned = 0
        return end >= 0

    def _take_whole(self, text: str, end: int) -> bool:
        """Parse a complete object whose keys are not in the usual order; return whether it is a call."""
        call = _parsed(text)
        values = cast(dict[str, Any], call) if isinstance(call, dict) else {}
        name, arguments = values.get("name"), values.get("arguments", values.get("parameters"))
        if isinstance(arguments, str):
            arguments = _parsed(arguments)
        if arguments is None and self._style.needs_marker:
            arguments = {}  # after a marker, an object with a name alone is a call
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            self._give_up()
            return True
        self._begin_call(name)
        self._calls.append(
            ToolCallDelta(self._num_calls - 1, "", "", json.dumps(arguments, ensure_ascii=False))
        )
        self._text = self._text[end:]
        self._step = self._after_call
        return True

    def _begin_call(self, name: str) -> None:
        self._held = ""
        self._nesting = _Nesting()
        self._num_scanned = 0
        self._content.cut()
        self._calls.append(ToolCallDelta(self._num_calls, _new_id(self._style), name, ""))
        self._num_calls += 1


class _Nesting:
    """Depth of nested objects and lists at a position in JSON text."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = False
        self._is_escaped = False

    def find_end(self, text: str, start: int) -> int:
        """Scan from `start`; return the index after the end of the outermost object, or -1 if it does not end."""
        for place in range(start, len(text)):
            character = text[place]
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped = character == "\\"
                self._in_string = character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return place + 1
        return -1


def _parsed(text: str) -> Any:
    """Return the value of a JSON text; None if it is invalid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _new_id(style: ToolStyle) -> str:
    if style.short_ids:
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"


_LONGEST_HEAD = 1024
_KEYS = frozenset(("name", "arguments", "parameters", "type", "id"))
_STRING = r'"(?:[^"\\]|\\.)*"'
_OTHER = rf'(?:"(?:type|id)"\s*:\s*{_STRING}\s*,\s*)*'
_HEAD = re.compile(
    rf'\{{\s*{_OTHER}"name"\s*:\s*({_STRING})\s*,\s*{_OTHER}"(?:arguments|parameters)"\s*:\s*(?=\{{)'
)
_PAIR = rf'"(?:name|type|id)"\s*:\s*{_STRING}'
_CUT_KEY = '"(?:' + "|".join(sorted({key[:end] for key in _KEYS for end in range(1, len(key) + 1)})) + ")?"
_CUT_HEAD = re.compile(
    rf'\{{\s*(?:{_PAIR}\s*,\s*)*(?:{_PAIR}\s*,?|{_CUT_KEY}|"(?:name|type|id)"\s*:?\s*(?:"(?:[^"\\]|\\.)*\\?)?'
    r'|"(?:arguments|parameters)"\s*:?\s*)?\Z'
)
"""Pattern of a call without marker that a limit cut before its arguments begin."""
_FIRST_KEY = re.compile(r'\{\s*"([^"]*)"')
_NO_KEY = re.compile(r'\{\s*[^"\s]')
_NAME = re.compile(r"([\w.-]+)\s*(?:\[CALL_ID\]\s*[\w-]+\s*)?(?:\[ARGS\]\s*)?(?=\{)")
_NAME_BEGIN = re.compile(r"[\w.-]+\s*(?:\[[\w\[\]\s-]*)?\Z")

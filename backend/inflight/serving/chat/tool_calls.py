"""Tool calls in what a model writes, told apart from the rest while the text comes.

Owns where a call begins and ends, and its id. What turns out to be none is content. Does not know which tools
there are, nor whether arguments fit them. One ToolCallStream a text, used by one thread at a time.
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
        index: Which call of the text, from 0 on.
        id: The call's id, in its first delta; "" in others.
        name: The function's name, in the call's first delta; "" in others.
        arguments: What comes to the arguments, which are JSON as text.
    """

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ChatDelta:
    """The part of an answer that a piece of text adds: content, then tool calls, at most one delta for each."""

    content: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    @classmethod
    def joined(cls, deltas: Iterable[ChatDelta]) -> ChatDelta:
        """Deltas of one text that follow each other, as one."""
        content: list[str] = []
        calls: list[ToolCallDelta] = []
        for delta in deltas:
            content.append(delta.content)
            calls += delta.tool_calls
        return cls("".join(content), _one_a_call(calls))


def _one_a_call(deltas: Sequence[ToolCallDelta]) -> tuple[ToolCallDelta, ...]:
    """Deltas with those of each call joined: clients expect one entry for an index in a chunk."""
    firsts: dict[int, ToolCallDelta] = {}
    arguments: dict[int, list[str]] = {}
    for delta in deltas:
        firsts.setdefault(delta.index, delta)
        arguments.setdefault(delta.index, []).append(delta.arguments)
    return tuple(replace(first, arguments="".join(arguments[index])) for index, first in firsts.items())


def tool_call_stream(parser: str, forced: bool = False) -> ToolCallStream:
    """A stream for one text.

    Args:
        parser: One of TOOL_CALL_PARSERS; "" takes all text for content.
        forced: A guide (`tool_guides.tool_guide`) asks for calls, and the prompt ends with `forced_prefix`.

    Raises:
        InvalidArgument: There is no such parser.
    """
    style = find_tool_style(parser) if parser else None
    return ToolCallStream(style, is_forced=forced)


class ToolCallStream:
    """Splits a text into content and tool calls.

    A call is passed on as soon as its name is known and its arguments begin; from then on it is a call, whatever
    comes. Until then its text is held back, and is content if it turns out to be none. White space beside a call
    is left out; a text without calls is content as it is. However the text is cut into pieces, the joined deltas
    are the same, but for ids, which are random.

    Args:
        style: How calls are written; None takes all text for content.
        is_forced: A guide asks for calls and nothing else, and the text begins behind a marker.
    """

    def __init__(self, style: ToolStyle | None, is_forced: bool = False) -> None:
        self._is_forced = is_forced
        self._style = style or ToolStyle("", "arguments")
        self._text = ""  # what has come and is not decided
        self._held = ""  # what stands in front of that and is content if no call follows
        self._nesting = _Nesting()
        self._num_scanned = 0  # characters of the text that the nesting has gone through
        self._in_list = False
        self._content = HeldText()
        self._calls: list[ToolCallDelta] = []
        self._num_calls = 0
        may_begin = style is not None and (is_forced or not style.needs_marker)
        self._step: Callable[[], bool] = self._at_beginning if may_begin else self._in_content

    def add(self, text: str) -> ChatDelta:
        """Go on with the text; returns what is certain now."""
        self._text += text
        while self._step():
            pass
        return self._take()

    def finish(self, is_cut: bool = False) -> ChatDelta:
        """The text has ended; returns the rest. A call that has begun stays one, with the arguments so far.

        Args:
            is_cut: A limit has ended it, so that what may be the beginning of a call is left out: nobody can use
                it, and it is no content.
        """
        if not (self._is_rest_of_a_call() or (is_cut and self._may_become_a_call())):
            self._content.add(self._held + self._text)
        self._text = self._held = ""
        delta = self._take()
        return ChatDelta(delta.content + self._content.take_space(), delta.tool_calls)

    def _may_become_a_call(self) -> bool:
        """Whether what is not decided at the text's end looks like the beginning of a call."""
        if self._step == self._in_content:  # a single `<` or `[` is more likely something else
            return len(self._text) > 1 and self._style.marker.startswith(self._text)
        if self._is_forced or (self._style.marker and self._held.lstrip().startswith(self._style.marker)):
            return True
        if self._step == self._at_beginning:
            return len(self._text) > 1
        is_head = len(self._text) > 1 and _CUT_HEAD.match(self._text) is not None
        return is_head or bool(self._held.strip())

    def _is_rest_of_a_call(self) -> bool:
        """Whether what is not decided at the text's end can only belong to a call, and tells nobody anything."""
        if self._is_forced and self._num_calls:
            return True  # a guide allows nothing else behind a call
        is_part_of_end = self._step == self._behind_call and self._style.end.startswith(self._text)
        return self._step == self._in_rest_of_object or (is_part_of_end and bool(self._text))

    def _take(self) -> ChatDelta:
        calls, self._calls = self._calls, []
        return ChatDelta(self._content.take(), _one_a_call(calls))

    # Each of these is a place in the text. It returns whether there is something to do at once, in the next place.

    def _at_beginning(self) -> bool:
        """Nothing has come but white space."""
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
        """A call has to follow, or a list of them."""
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
        """A name stands where an object could."""
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
        """An object has begun, and its name or its arguments are still to come."""
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
            self._step = self._behind_call
            return True
        return False

    def _in_rest_of_object(self) -> bool:
        """Behind the arguments there may be other keys, which say nothing."""
        end = self._scan()
        if end < 0:
            self._text, self._num_scanned = "", 0
            return False
        self._text = self._text[end:]
        self._step = self._behind_call
        return True

    def _behind_call(self) -> bool:
        """Another call may follow, or the end of the group, or content."""
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
            self._step = self._in_head  # instead of the separator there may be a line end
            return True
        elif end.startswith(self._text):
            return False
        self._in_list = False
        self._step = self._in_content
        return True

    # What the places share.

    def _skip_space(self) -> bool:
        """Hold white space back; returns whether something follows it."""
        self._hold(len(self._text) - len(self._text.lstrip()))
        return bool(self._text)

    def _hold(self, length: int) -> None:
        self._held += self._text[:length]
        self._text = self._text[length:]

    def _give_up(self) -> None:
        """Treat the held text as content, and also the text that follows, up to the next marker."""
        self._content.add(self._held)
        self._held = ""
        self._num_scanned, self._nesting = 0, _Nesting()
        self._in_list = False
        self._step = self._in_content

    def _scan(self) -> int:
        """Go on to the end of an object; returns where it is, or -1."""
        end = self._nesting.find_end(self._text, self._num_scanned)
        self._num_scanned = 0 if end >= 0 else len(self._text)
        return end

    def _pass_arguments(self) -> bool:
        """Pass on arguments up to their end; returns whether that has come."""
        end = self._scan()
        passed = self._text[:end] if end >= 0 else self._text
        if passed:
            self._calls.append(ToolCallDelta(self._num_calls - 1, "", "", passed))
        self._text = self._text[len(passed) :]
        self._num_scanned = 0
        return end >= 0

    def _take_whole(self, text: str, end: int) -> bool:
        """Take an object that is complete and did not begin as a call does: it may be one all the same."""
        call = _parsed(text)
        values = cast(dict[str, Any], call) if isinstance(call, dict) else {}
        name, arguments = values.get("name"), values.get("arguments", values.get("parameters"))
        if isinstance(arguments, str):
            arguments = _parsed(arguments)
        if arguments is None and self._style.needs_marker:
            arguments = {}  # behind a marker a name alone is a call
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            self._give_up()
            return True
        self._begin_call(name)
        self._calls.append(
            ToolCallDelta(self._num_calls - 1, "", "", json.dumps(arguments, ensure_ascii=False))
        )
        self._text = self._text[end:]
        self._step = self._behind_call
        return True

    def _begin_call(self, name: str) -> None:
        self._held = ""
        self._nesting = _Nesting()
        self._num_scanned = 0
        self._content.cut()
        self._calls.append(ToolCallDelta(self._num_calls, _new_id(self._style), name, ""))
        self._num_calls += 1


class _Nesting:
    """How deep a place in a JSON text is in objects and lists."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = False
        self._is_escaped = False

    def find_end(self, text: str, start: int) -> int:
        """Go on from `start`; returns where the outermost object ends, or -1 if it does not."""
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
    """The value of a JSON text; None where it is none."""
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
"""A call without a marker that is cut before its arguments begin."""
_FIRST_KEY = re.compile(r'\{\s*"([^"]*)"')
_NO_KEY = re.compile(r'\{\s*[^"\s]')
_NAME = re.compile(r"([\w.-]+)\s*(?:\[CALL_ID\]\s*[\w-]+\s*)?(?:\[ARGS\]\s*)?(?=\{)")
_NAME_BEGIN = re.compile(r"[\w.-]+\s*(?:\[[\w\[\]\s-]*)?\Z")

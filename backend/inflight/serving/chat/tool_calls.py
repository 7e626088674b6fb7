"""Parsing of tool calls in a model's text while it streams.

Finds where calls begin and end by the description of a format, and gives them ids. Text that turns out not to
be a call is content. Neither the names of tools nor arguments are checked. There is one ToolCallStream for
each text; it is used by one thread at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from inflight.serving.chat.held_text import HeldText, overlap
from inflight.serving.chat.tool_deltas import ChatDelta, ToolCallDelta, new_id, one_a_call
from inflight.serving.chat.tool_format_table import find_tool_format
from inflight.serving.chat.tool_formats import ArgumentStyle, ToolFormat
from inflight.serving.chat.tool_heads import LONGEST_HEAD, Heads
from inflight.serving.chat.tool_values import Nesting, Schemas, read_json, read_tagged, schemas_of


def tool_call_stream(
    parser: str, forced: bool = False, tools: Iterable[Mapping[str, Any]] | None = None
) -> ToolCallStream:
    """Return a parser for one text.

    Args:
        parser: One of TOOL_CALL_PARSERS; "" treats all text as content.
        forced: Whether a guide (`tool_guides.tool_guide`) forces calls, and the prompt ends with
            `forced_prefix`.
        tools: OpenAI's tools. Their schemas give the types of arguments in formats that do not write them.

    Raises:
        InvalidArgument: The parser does not exist.
    """
    form = find_tool_format(parser) if parser else None
    return ToolCallStream(form, is_forced=forced, schemas=schemas_of(tools))


class ToolCallStream:
    """Incremental parser of a text into content and tool calls.

    A call is reported as soon as its name is known and its arguments begin; after that it is never taken
    back. Calls in Python's syntax and with bare keys are reported when they are complete. Before that the
    text is held back, and becomes content if it is not a call. White space around a call is dropped. A text
    without calls is returned unchanged as content. The joined deltas do not depend on how the text is divided
    into pieces, except for the random ids.

    Args:
        form: The format of calls; None treats all text as content.
        is_forced: Whether a guide forces calls, and the text begins after a marker.
        schemas: The schemas of the functions' parameters.
    """

    def __init__(
        self, form: ToolFormat | None, is_forced: bool = False, schemas: Schemas | None = None
    ) -> None:
        self._is_forced = is_forced
        self._form = form or ToolFormat("")
        self._schemas = schemas or {}
        self._heads = Heads.of(self._form)
        self._text = ""  # text not parsed yet
        self._held = ""  # text before `_text` that is content if no call follows
        self._nesting = Nesting()
        self._num_scanned = 0  # number of characters of `_text` that `_nesting` has scanned
        self._in_list = False
        self._name = ""  # of the call that is parsed
        self._num_values = 0  # number of the call's arguments between tags
        self._content = HeldText()
        self._calls: list[ToolCallDelta] = []
        self._num_calls = 0
        may_begin = form is not None and (is_forced or not form.needs_marker)
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
            return len(self._text) > 1 and self._form.begin.startswith(self._text)
        if self._is_forced or (self._form.begin and self._held.lstrip().startswith(self._form.begin)):
            return True
        if self._step == self._at_beginning:
            return len(self._text) > 1
        is_head = len(self._text) > 1 and self._heads.is_cut_head(self._text)
        return is_head or bool(self._held.strip())

    def _is_rest_of_a_call(self) -> bool:
        """Return whether the undecided text at the end can only belong to a call."""
        if self._is_forced and self._num_calls:
            return True  # a guide allows only calls
        form = self._form
        ends = {
            self._before_call_end: (form.call_end.strip(),),
            self._after_call: (form.end, form.call_begin),
            self._after_list: (form.end,),
        }.get(self._step, ())
        is_part_of_end = any(end.startswith(self._text) for end in ends)
        inside = (self._in_rest_of_object, self._in_tags)
        return self._step in inside or (is_part_of_end and bool(self._text))

    def _take(self) -> ChatDelta:
        calls, self._calls = self._calls, []
        return ChatDelta(self._content.take(), one_a_call(calls))

    # Parser states. Each method parses from its state, and returns whether the next state can run at once.

    def _at_beginning(self) -> bool:
        """Parse the beginning of a text that has had only white space so far."""
        if not self._skip_space():
            return False
        form = self._form
        is_behind_marker = form.takes_names or (self._is_forced and form.has_special_marker)
        if self._text.startswith(("{", "[") if form.is_list else "{") or is_behind_marker:
            self._step = self._before_call
        elif form.begin.startswith(self._text):
            return False
        else:
            self._give_up()
        return True

    def _in_content(self) -> bool:
        marker = self._form.begin
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
        form = self._form
        if self._text[0] == "[" and form.is_list and not self._in_list:
            self._in_list = True
            self._hold(1)
        elif form.arguments is not ArgumentStyle.OBJECT:
            if form.call_begin.startswith(self._text) and self._text != form.call_begin:
                return False
            if not self._text.startswith(form.call_begin) or (form.is_list and not self._in_list):
                self._give_up()
                return True
            self._hold(len(form.call_begin))
            self._step = self._in_outer_name
        elif self._text[0] == "{":
            self._step = self._in_head
        elif form.takes_names and not self._in_list:
            self._step = self._in_name
        else:
            self._give_up()
        return True

    def _in_outer_name(self) -> bool:
        """Parse a name before the arguments, and the text between them, of a format with names outside."""
        found = self._heads.outer_name(self._text[:LONGEST_HEAD])
        if found is None:
            if len(self._text) < LONGEST_HEAD and self._heads.may_be_outer_name(self._text):
                return False
            self._give_up()
            return True
        self._name, length = found
        form = self._form
        if form.arguments in (ArgumentStyle.JSON, ArgumentStyle.TAGS):
            self._begin_call(self._name)
            self._text = self._text[length:]
            self._num_values = 0
            self._step = self._in_named_arguments if form.arguments is ArgumentStyle.JSON else self._in_tags
            return True
        self._hold(length)
        quotes = ("'", '"') if form.arguments is ArgumentStyle.PYTHON else (form.quote,)
        self._nesting, self._num_scanned = Nesting(quotes=quotes), 0
        self._step = self._in_whole_arguments
        return True

    def _in_whole_arguments(self) -> bool:
        """Parse arguments that are converted when they are complete."""
        end = self._scan()
        if end < 0:
            return False
        arguments = self._heads.whole_arguments(self._text[:end])
        if arguments is None:
            self._give_up()
            return True
        self._begin_call(self._name)
        self._add_arguments(json.dumps(arguments, ensure_ascii=False))
        self._text = self._text[end:]
        self._step = self._before_call_end
        return True

    def _in_tags(self) -> bool:
        """Parse arguments between tags, one at a time."""
        tags, close = self._form.tags, self._form.call_end.strip() or self._form.end
        assert tags is not None
        self._text = self._text.lstrip()
        if not self._text:
            return False
        if not self._text.startswith(tags.key_begin):
            if any(each.startswith(self._text) and each != self._text for each in (tags.key_begin, close)):
                return False
            self._add_arguments("}" if self._num_values else "{}")
            self._step = self._before_call_end
            return True
        place = self._text.find(tags.value_end)
        if place < 0:
            return False
        key, text, is_text = self._heads.tagged(self._text[len(tags.key_begin) : place])
        schema = self._schemas.get(self._name, {}).get(key) if is_text is None else None
        value = text if is_text else read_tagged(text, schema)
        pair = json.dumps({key: value}, ensure_ascii=False)
        self._add_arguments(f"{', ' if self._num_values else '{'}{pair[1:-1]}")
        self._num_values += 1
        self._text = self._text[place + len(tags.value_end) :]
        return True

    def _in_name(self) -> bool:
        """Parse a function's name that is written before the arguments, `name{…}`, instead of inside an object."""
        if found := self._heads.inner_name(self._text):
            self._begin_call(found[0])
            self._text = self._text[found[1] :]
            self._step = self._in_named_arguments
            return True
        if self._heads.may_be_inner_name(self._text):
            return False
        self._give_up()
        return True

    def _in_head(self) -> bool:
        """Parse an object up to its name and the beginning of its arguments."""
        if self._heads.is_no_object(self._text):
            self._give_up()
            return True
        if found := self._heads.head.match(self._text[:LONGEST_HEAD]):
            name = read_json(found[1])
            if not isinstance(name, str) or not name:
                self._give_up()
                return True
            self._begin_call(name)
            self._text = self._text[found.end() :]
            self._step = self._in_arguments
            return True
        end = self._scan()
        if end < 0:
            return False
        return self._take_whole(self._text[:end], end)

    def _in_arguments(self) -> bool:
        if self._pass_arguments():
            self._nesting = Nesting(depth=1)
            self._step = self._in_rest_of_object
            return True
        return False

    def _in_named_arguments(self) -> bool:
        if self._pass_arguments():
            self._step = self._before_call_end
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

    def _before_call_end(self) -> bool:
        """Parse the text after a call, which may be missing."""
        return self._pass_end(self._form.call_end.strip(), self._after_call)

    def _after_call(self) -> bool:
        """Parse after a call: another call, the end of a group of calls, or content."""
        form = self._form
        if not self._skip_space():
            return False
        self._held = ""
        end = "]" if self._in_list else form.end
        may_repeat = self._in_list or not form.is_list
        if end and self._text.startswith(end):
            self._text = self._text[len(end) :]
            self._step = self._after_list if self._in_list else self._in_content
            self._in_list = False
            return True
        if form.separator and may_repeat and self._text[0] == form.separator:
            self._hold(1)
            self._step = self._before_call
            return True
        if form.separator and not form.is_list and self._heads.begins_call(self._text):
            self._step = self._before_call  # a line end may replace the separator
            return True
        if form.call_begin and self._text.startswith(form.call_begin):
            self._step = self._before_call
            return True
        if end.startswith(self._text) or form.call_begin.startswith(self._text):
            return False
        self._in_list = False
        self._step = self._in_content
        return True

    def _after_list(self) -> bool:
        """Parse the text that ends a group of calls, after a list of calls. This text may be missing."""
        return self._pass_end(self._form.end, self._in_content)

    # Helpers of the states.

    def _pass_end(self, end: str, following: Callable[[], bool]) -> bool:
        """Drop the text `end` if it is next; return whether the state `following` can run."""
        if end and not self._skip_space():
            return False
        if end and end.startswith(self._text) and end != self._text:
            return False
        self._text = self._text.removeprefix(end)
        self._held = ""
        self._step = following
        return True

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
        self._num_scanned, self._nesting = 0, Nesting()
        self._in_list = False
        self._step = self._in_content

    def _scan(self) -> int:
        """Scan to the end of an object; return the index after it, or -1 if the text has no end of it yet."""
        end, self._num_scanned = self._nesting.find_end(self._text, self._num_scanned)
        if end >= 0:
            self._num_scanned = 0
        return end

    def _pass_arguments(self) -> bool:
        """Report arguments up to their end; return whether the end was found."""
        end = self._scan()
        passed = self._text[:end] if end >= 0 else self._text
        if passed:
            self._add_arguments(passed)
        self._text = self._text[len(passed) :]
        self._num_scanned = 0
        return end >= 0

    def _take_whole(self, text: str, end: int) -> bool:
        """Parse a complete object whose keys are not in the usual order; return whether it is a call."""
        call = self._heads.whole_call(text)
        if call is None:
            self._give_up()
            return True
        self._begin_call(call[0])
        self._add_arguments(json.dumps(call[1], ensure_ascii=False))
        self._text = self._text[end:]
        self._step = self._after_call
        return True

    def _begin_call(self, name: str) -> None:
        self._held = ""
        self._nesting = Nesting()
        self._num_scanned = 0
        self._content.cut()
        call_id = new_id(self._form.ids, name, self._num_calls)
        self._calls.append(ToolCallDelta(self._num_calls, call_id, name, "", self._content.length))
        self._num_calls += 1

    def _add_arguments(self, text: str) -> None:
        self._calls.append(ToolCallDelta(self._num_calls - 1, "", "", text))

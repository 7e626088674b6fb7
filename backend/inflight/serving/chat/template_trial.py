"""Find out a chat template's message form, roles and tool calls by rendering made-up messages.

A template does not describe itself, and its source can mislead: it may mention a marker that it never
writes. A template's style of tool calls is the parser in `tool_calls.py` that can read the calls that it
writes. Any thread.
"""

from __future__ import annotations

import json
import os.path
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import product
from typing import Any

import jinja2

from inflight.serving.chat.messages import EmptyContent, Message, MessageForm
from inflight.serving.chat.reasoning import reasoning_stream
from inflight.serving.chat.template_environment import render_bounded
from inflight.serving.chat.tool_calls import tool_call_stream
from inflight.serving.chat.tool_format_table import TOOL_CALL_PARSERS, find_tool_format

TOOLS_NAMES = ("tools", "xml_tools", "python_tools")
"""Names that templates use for the variable with the tools. Tools are passed by the first that a template
reads."""

USUAL_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""The roles of messages in OpenAI's API, including former ones."""

_PROBE = "pr0be"
_NAME, _ARGUMENTS = "pr0be_function", {"pr0be_key": "pr0be value"}
_CALL_ID = "abcdef123"  # nine letters or digits, as Mistral's templates require
_NUMBERED_ID = f"functions.{_NAME}:0"  # Kimi K2's template writes the id, and not the name
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "A function",
        "parameters": {
            "type": "object",
            "properties": {"pr0be_key": {"type": "string", "description": "A value"}},
            "required": ["pr0be_key"],
        },
    },
}
_SHOWN = 80


@dataclass(frozen=True, slots=True)
class Trial:
    """A renderer of test messages with one template and the variables that real chats have.

    Attributes:
        compiled: The template.
        special_tokens: Texts of special tokens by name, such as `bos_token`.
        tools_name: Name of the variable with the tools; "": the template renders no tools.
    """

    compiled: jinja2.Template
    special_tokens: Mapping[str, str]
    tools_name: str

    def rendered(self, *messages: Message, tools: bool = False, begins_answer: bool = False) -> str | None:
        """Return the text of a chat; None if the template raises an error."""
        values = {**self.special_tokens, "messages": list(messages), "tools": None, "documents": None}
        if tools and self.tools_name:
            values[self.tools_name] = [_TOOL]
        try:
            return render_bounded(self.compiled, {**values, "add_generation_prompt": begins_answer})
        except Exception:  # templates may raise any class of error
            return None


class RoleTreatment(Enum):
    """A template's treatment of messages of a role."""

    WRITTEN = "written"
    LEFT_OUT = "left out"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class CallStyle:
    """The form in which a template writes tool calls.

    Attributes:
        parser: Name of the parser in `tool_calls.py` for these calls; "": no parser reads them.
        example: The beginning of a call in the template's form; "" if it writes no calls.
    """

    parser: str
    example: str


def find_form(trial: Trial) -> MessageForm:
    """Return the form of messages that a template renders."""
    text = trial.rendered({"role": "user", "content": _PROBE}) or ""
    parts = trial.rendered({"role": "user", "content": _parts(_PROBE)}) or ""
    # A template that prints a list's representation leaves quotation marks around its text.
    takes_parts = _PROBE in parts and f"'{_PROBE}'" not in parts and f'"{_PROBE}"' not in parts
    takes_text = _PROBE in text or not takes_parts
    beside = trial.rendered({"role": "user", "content": [{"type": "image"}, *_parts(_PROBE)]}) or ""
    developer = {"role": "developer", "content": _PROBE if _PROBE in text else _parts(_PROBE)}
    as_text = not _takes_arguments(trial, takes_text, {"key": _PROBE}) and _takes_arguments(
        trial, takes_text, json.dumps({"key": _PROBE})
    )
    return MessageForm(
        takes_developer=_PROBE in (trial.rendered(developer, _user(takes_text)) or ""),
        takes_text=takes_text,
        takes_parts=takes_parts,
        takes_pictures=takes_parts and _PROBE in beside and beside != parts,
        arguments_as_text=as_text,
        empty_content=_find_empty_content(trial, takes_text, as_text),
    )


def find_call_style(trial: Trial, form: MessageForm) -> CallStyle:
    """Return the form in which a template writes tool calls.

    It is found in a rendered call, or if the template renders no calls, in its instructions about tools.
    """
    user = _user(form.takes_text)
    calls = [
        _calling(form.empty_content, form.arguments_as_text, form.takes_text, call_id=call_id)
        for call_id in (_CALL_ID, _NUMBERED_ID)
    ]
    instructions = trial.rendered(user, tools=True) or ""
    said = next((parser for parser, each in _EXAMPLES.items() if re.search(each, instructions)), "")
    example = ""
    # Without tools, no instructions can look like a call.
    for has_tools, call in product((True, False), calls):
        begun = trial.rendered(user, tools=has_tools, begins_answer=True)
        whole = trial.rendered(user, call, tools=has_tools)
        if begun is None or whole is None:
            continue
        written = whole[_common_length(begun, whole) :].strip()
        lengths = {parser: _read(parser, written) for parser in TOOL_CALL_PARSERS}
        readers = [parser for parser, length in lengths.items() if length is not None]
        if readers:  # the best reader leaves the least of the call's syntax as content
            best = min(readers, key=lambda parser: lengths[parser] or 0)
            # Phi-4-mini's template leaves the marker out of the calls that it renders.
            has_lost_marker = said in _MAY_LOSE_MARKER and not find_tool_format(best).needs_marker
            return CallStyle(said if has_lost_marker else best, written[:_SHOWN])
        if not example and _PROBE in written:
            example = written[:_SHOWN]
    return CallStyle("", example) if example else CallStyle(said, "")


def find_treatment(trial: Trial, form: MessageForm, role: str) -> RoleTreatment:
    """Return a template's treatment of messages of a role."""
    content = _PROBE if form.takes_text else _parts(_PROBE)
    message = {"role": role, "content": content, "tool_call_id": _CALL_ID, "name": _NAME}
    user, call = (
        _user(form.takes_text),
        _calling(form.empty_content, form.arguments_as_text, form.takes_text),
    )
    chats: Iterable[tuple[Message, ...]] = (
        (message, user),
        (user, message),
        (user, call, message),
        (message,),
    )
    treatment = RoleTreatment.REFUSED
    for chat in chats:
        for has_tools in (False, True):
            text = trial.rendered(*chat, tools=has_tools)
            if text is not None and _PROBE in text.replace(_NAME, ""):
                return RoleTreatment.WRITTEN
            if text is not None:
                treatment = RoleTreatment.LEFT_OUT
    return treatment


def _user(as_text: bool) -> Message:
    return {"role": "user", "content": "question" if as_text else _parts("question")}


def _parts(text: str) -> list[Any]:
    return [{"type": "text", "text": text}]


def _calling(
    content: EmptyContent,
    arguments_as_text: bool,
    takes_text: bool,
    arguments: Any = _ARGUMENTS,
    call_id: str = _CALL_ID,
) -> Message:
    """Return an assistant message with a tool call and without content."""
    if arguments_as_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments)
    call = {"id": call_id, "type": "function", "function": {"name": _NAME, "arguments": arguments}}
    return {"role": "assistant", **content.field(takes_text), "tool_calls": [call]}


def _takes_arguments(trial: Trial, takes_text: bool, arguments: Any) -> bool:
    """Return whether a template renders a call with these arguments, for some form of empty content."""
    chats = (_calling(content, False, takes_text, arguments) for content in EmptyContent)
    found = (trial.rendered(_user(takes_text), chat) for chat in chats)
    return any(_PROBE in (text or "").replace(_NAME, "") for text in found)


def _find_empty_content(trial: Trial, takes_text: bool, arguments_as_text: bool) -> EmptyContent:
    """Return the form of empty content with which most test chats with a call are rendered.

    On a tie, returns the first form.
    """
    user = _user(takes_text)
    result = {"role": "tool", "tool_call_id": _CALL_ID, "name": _NAME, "content": user["content"]}
    answer = {"role": "assistant", "content": user["content"]}

    def num_rendered(content: EmptyContent) -> int:
        call = _calling(content, arguments_as_text, takes_text)
        chats = ((user, call), (user, call, result), (user, call, result, answer, user))
        return sum(
            trial.rendered(*chat, tools=tools) is not None for chat in chats for tools in (False, True)
        )

    return max(EmptyContent, key=num_rendered)


def _common_length(begun: str, whole: str) -> int:
    """Return the length of the common prefix of a prompt (`begun`) and the chat with its answer (`whole`).

    The prefix is cut after a line end, `>` or `]`, because for instance `<think>` and `<tool_call>` begin
    with the same letters.
    """
    if whole.startswith(begun):
        return len(begun)
    common = os.path.commonprefix([begun, whole])  # noqa: RUF071 - of characters
    return max(common.rfind("\n"), common.rfind(">"), common.rfind("]")) + 1


def _read(parser: str, written: str) -> int | None:
    """Return the length of what a parser treats as content in `written`; None if it does not read the call."""
    if before := find_tool_format(parser).reasoning_parser:
        reader = reasoning_stream(before, False)
        written = "".join(content for _, content in (reader.add(written), reader.finish()))
    stream = tool_call_stream(parser)
    deltas = (stream.add(written), stream.finish())
    calls = [call for delta in deltas for call in delta.tool_calls]
    content = "".join(delta.content for delta in deltas)
    try:
        arguments = json.loads("".join(call.arguments for call in calls))
    except ValueError:
        return None
    names = [call.name for call in calls if call.name]
    is_read = names == [_NAME] and arguments == _ARGUMENTS and "pr0be" not in content
    return len(content) if is_read else None


_EXAMPLES = {
    "hermes": r'<tool_call>\s*\{\s*"name"\s*:',
    "mistral": r'\[TOOL_CALLS\]\s*\[\s*\{\s*"name"\s*:',
    "llama3_json": r'\{"name": function name, "parameters": ',
    "phi4_mini_json": r'functools\s*\[\s*\{\s*"name"\s*:',
}
"""Patterns by parser that find an example of a call in a template's instructions about tools."""
_MAY_LOSE_MARKER = ("phi4_mini_json",)

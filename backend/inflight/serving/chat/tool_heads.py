"""Patterns and readers of the parts of a call, made from a format's description. Any thread."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

from inflight.serving.chat.tool_formats import ArgumentStyle, ToolFormat
from inflight.serving.chat.tool_values import read_bare_keys, read_json, read_python

LONGEST_HEAD = 1024
"""Maximum length of a call's text before its arguments."""

_STRING = r'"(?:[^"\\]|\\.)*"'
_NAME = re.compile(r"([\w.-]+)\s*(?:\[CALL_ID\]\s*[\w-]+\s*)?(?:\[ARGS\]\s*)?(?=\{)")
_NAME_BEGIN = re.compile(r"[\w.-]+\s*(?:\[[\w\[\]\s-]*)?\Z")
_OUTER_NAME = re.compile(r"\s*([\w.-]+)")
_NUMBERED_NAME = re.compile(r"\s*([\w.-]+):\d+")
_NUMBERED_BEGIN = re.compile(r"\s*[\w.-]*:?\Z")
_FIRST_KEY = re.compile(r'\{\s*"([^"]*)"')
_NO_KEY = re.compile(r'\{\s*[^"\s]')


@dataclass(frozen=True, slots=True)
class Heads:
    """Patterns of the beginnings of calls in one format.

    Attributes:
        form: The format.
        keys: Keys of a call that is a JSON object.
        head: Pattern of such a call up to its arguments.
        cut_head: Pattern of such a call that a limit cut before its arguments begin.
    """

    form: ToolFormat
    keys: frozenset[str]
    head: re.Pattern[str]
    cut_head: re.Pattern[str]

    @staticmethod
    @cache
    def of(form: ToolFormat) -> Heads:
        """Return the patterns of a format."""
        others = ["type", "id"] if form.name_key == "name" else ["type", "tool_call_id"]
        other_keys, named_keys = "|".join(others), "|".join([form.name_key, *others])
        keys = frozenset((form.name_key, *others, "arguments", "parameters"))
        other = rf'(?:"(?:{other_keys})"\s*:\s*{_STRING}\s*,\s*)*'
        pair = rf'"(?:{named_keys})"\s*:\s*{_STRING}'
        cut_keys = "|".join(sorted({key[:end] for key in keys for end in range(1, len(key) + 1)}))
        return Heads(
            form,
            keys,
            re.compile(
                rf'\{{\s*{other}"{form.name_key}"\s*:\s*({_STRING})\s*,\s*{other}"(?:arguments|parameters)"'
                r"\s*:\s*(?=\{)"
            ),
            re.compile(
                rf'\{{\s*(?:{pair}\s*,\s*)*(?:{pair}\s*,?|"(?:{cut_keys})?'
                rf'|"(?:{named_keys})"\s*:?\s*(?:"(?:[^"\\]|\\.)*\\?)?'
                r'|"(?:arguments|parameters)"\s*:?\s*)?\Z'
            ),
        )

    def is_no_object(self, text: str) -> bool:
        """Return whether a text that begins with `{` cannot be a call, by its first key."""
        key = _FIRST_KEY.match(text)
        return _NO_KEY.match(text) is not None or (key is not None and key[1] not in self.keys)

    def is_cut_head(self, text: str) -> bool:
        """Return whether the text may be a call that ends before its arguments."""
        if self.form.arguments is not ArgumentStyle.OBJECT:
            return False
        return self.cut_head.match(text) is not None

    def whole_call(self, text: str) -> tuple[str, dict[str, Any]] | None:
        """Return name and arguments of a call that is a complete JSON object; None if it is not a call."""
        call = read_json(text)
        values = cast(dict[str, Any], call) if isinstance(call, dict) else {}
        name, arguments = values.get(self.form.name_key), values.get("arguments", values.get("parameters"))
        if isinstance(arguments, str):
            arguments = read_json(arguments)
        if arguments is None and self.form.needs_marker:
            arguments = {}  # after a marker, an object with a name alone is a call
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            return None
        return name, cast(dict[str, Any], arguments)

    def whole_arguments(self, text: str) -> dict[str, Any] | None:
        """Return arguments in Python's syntax or with bare keys, brackets included; None if they are invalid."""
        if self.form.arguments is ArgumentStyle.PYTHON:
            return read_python(text[1:])
        return read_bare_keys(text, self.form.quote)

    def begins_call(self, text: str) -> bool:
        """Return whether a text after a call may be another call."""
        if self.form.arguments is ArgumentStyle.PYTHON:
            return text[0].isalpha() or text[0] == "_"
        return text[0] == "{"

    def inner_name(self, text: str) -> tuple[str, int] | None:
        """Return the name in `name{` or `name[ARGS]{`, and the length before `{`; None if it is not there."""
        found = _NAME.match(text[:LONGEST_HEAD])
        return (found[1], found.end()) if found else None

    def may_be_inner_name(self, text: str) -> bool:
        """Return whether the text may become a name of that form."""
        return "{" not in text and len(text) < LONGEST_HEAD and _NAME_BEGIN.match(text) is not None

    def outer_name(self, text: str) -> tuple[str, int] | None:
        """Return the name that a text begins with, and the length of the text up to the arguments.

        Returns:
            None if the text is not a name with arguments, or not yet.
        """
        name, rest = self._split(text)
        end = self.form.name_end.strip()
        if not name or not rest.startswith(end):
            return None
        rest = rest[len(end) :].lstrip()
        return (name, len(text) - len(rest)) if rest.startswith(self._openers) else None

    def may_be_outer_name(self, text: str) -> bool:
        """Return whether a text that is not yet a name with arguments may become one."""
        name, rest = self._split(text)
        end = self.form.name_end.strip()
        if not name:
            is_numbered = self.form.is_numbered
            return _NUMBERED_BEGIN.match(text) is not None if is_numbered else not text.strip()
        if rest.startswith(end):
            rest = rest[len(end) :].lstrip()
            return any(opener.startswith(rest) for opener in self._openers)
        return end.startswith(rest)

    def _split(self, text: str) -> tuple[str, str]:
        """Return the name at the beginning, "" for none, and the text after it."""
        found = (_NUMBERED_NAME if self.form.is_numbered else _OUTER_NAME).match(text)
        return (found[1], text[found.end() :].lstrip()) if found else ("", text)

    @property
    def _openers(self) -> tuple[str, ...]:
        """The texts with which arguments begin."""
        form = self.form
        if form.tags is not None:
            return (form.tags.key_begin, form.call_end.strip() or form.end)
        return ("(",) if form.arguments is ArgumentStyle.PYTHON else ("{",)

    def tagged(self, text: str) -> tuple[str, str, bool | None]:
        """Split the text between an argument's first and last tag.

        Returns:
            The key, the value, and whether the tags say that the value is a text; None if they do not say.
        """
        tags = self.form.tags
        assert tags is not None
        ends = (tags.text_key_end, tags.key_end) if tags.text_key_end else (tags.key_end,)
        places = [(text.find(end), end) for end in ends if end in text]
        if not places:
            return text, "", None
        place, end = min(places)
        value = text[place + len(end) :]
        if tags.value_begin:
            value = value.lstrip().removeprefix(tags.value_begin)
        if tags.pads:
            value = value.removeprefix("\n").removesuffix("\n")
        return text[:place].strip(), value, end == tags.text_key_end if tags.text_key_end else None

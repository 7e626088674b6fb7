"""The formats in which models write tool calls: the texts before, between and after names and arguments.

`tool_calls.py` parses calls of every format by its description, and `tool_guides.py` makes the grammar of
forced calls from it. `tool_format_table.py` has the formats. Immutable; any thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class ArgumentStyle(Enum):
    """How a call's arguments are written."""

    OBJECT = "one JSON object has the name and the arguments"
    JSON = "a JSON object follows the name"
    TAGS = "each argument is a key and a value between tags"
    PYTHON = "keyword arguments of a Python call"
    BARE_KEYS = "an object with keys without quotation marks, and with its own quotation mark"


class Ids(Enum):
    """The form of the ids of calls."""

    RANDOM = "call_ and 24 hexadecimal digits"
    NINE = "nine letters and digits"
    NUMBERED = "functions.NAME:INDEX"


@dataclass(frozen=True, slots=True)
class ArgumentTags:
    """The texts around an argument's key and value.

    Attributes:
        key_begin: Text before the key.
        key_end: Text after the key.
        value_end: Text after the value.
        value_begin: Text before the value.
        text_key_end: Text after the key instead of `key_end` if the value is a text; "": the same.
        pads: Whether a line end on each side of the value belongs to the tags.
    """

    key_begin: str
    key_end: str
    value_end: str
    value_begin: str = ""
    text_key_end: str = ""
    pads: bool = False


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A format of tool calls.

    White space may stand between any two of these texts.

    Attributes:
        begin: Marker before a call or a group of calls; "": none.
        arguments: How the arguments are written.
        end: Text after a call or a group of calls; "": none.
        name_key: Key of the name, with ArgumentStyle.OBJECT.
        arguments_key: Key of the arguments, with ArgumentStyle.OBJECT.
        is_list: Whether calls are items of a list, `[…, …]`.
        needs_marker: Whether calls begin only after a marker; otherwise also at the beginning of the text.
        separator: Text between two calls after one marker; "": none, or each call has its own marker.
        call_begin: Text before each call's name; "": none.
        name_end: Text between the name and the arguments; "": none.
        call_end: Text after each call; "": none.
        takes_names: Whether a call with ArgumentStyle.OBJECT may also be written as `name{…}` or `name[ARGS]{…}`.
        is_numbered: Whether `:` and the call's number follow the name.
        tags: Texts around keys and values, with ArgumentStyle.TAGS.
        quote: The quotation mark, with ArgumentStyle.BARE_KEYS.
        ids: The form of ids that the model's template requires.
        has_special_marker: Whether `begin` is a special token, which a guide cannot require.
        has_own_markers: Whether each call has its own markers, where several may also follow one.
        pads: Text between the markers and the call that a guide requires.
        reasoning_parser: Name of the reasoning format whose parser has to read the answer first, because it
            passes calls on in this form; "": none.
        models: The models that write this format, for the documentation.
    """

    begin: str
    arguments: ArgumentStyle = ArgumentStyle.OBJECT
    end: str = ""
    name_key: str = "name"
    arguments_key: str = "arguments"
    is_list: bool = False
    needs_marker: bool = True
    separator: str = ""
    call_begin: str = ""
    name_end: str = ""
    call_end: str = ""
    takes_names: bool = False
    is_numbered: bool = False
    tags: ArgumentTags | None = None
    quote: str = '"'
    ids: Ids = Ids.RANDOM
    has_special_marker: bool = False
    has_own_markers: bool = False
    pads: str = ""
    reasoning_parser: str = ""
    models: str = ""

    @property
    def is_group(self) -> bool:
        """Return whether the markers stand around all calls, not around each."""
        is_group = bool(self.is_list or self.separator or self.call_begin)
        return self.needs_marker and is_group and not self.has_own_markers

    @property
    def has_json(self) -> bool:
        """Return whether arguments are JSON, which a guide can force."""
        return self.arguments in (ArgumentStyle.OBJECT, ArgumentStyle.JSON)

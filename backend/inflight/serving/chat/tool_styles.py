"""The forms in which models write tool calls: the texts before, between and after them.

Each form has the name of its parser. `tool_calls.py` parses calls in these forms, and `tool_guides.py`
forces them. Immutable; any thread.
"""

from __future__ import annotations

from dataclasses import dataclass

from inflight.errors import InvalidArgument
from inflight.serving.chat.reasoning import THINK_BEGIN, THINK_END
from inflight.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ToolStyle:
    """A form of tool calls. Each call is a JSON object with name and arguments.

    Attributes:
        marker: Text before a call or a list of calls; "": none.
        arguments_key: Key of the arguments.
        is_list: Whether calls are items of a list, `[{…}, {…}]`.
        needs_marker: Whether calls begin only after a marker; otherwise also at the beginning of the text.
        separator: Text between two calls after one marker; "" if each call has its own marker.
        end: Text after a call; "": none.
        takes_names: Whether a call may also be written as `name{…}` or `name[ARGS]{…}`, with the arguments
            as the object.
        short_ids: Whether ids of calls must have nine letters and digits, as the model's template requires.
    """

    marker: str
    arguments_key: str
    is_list: bool = False
    needs_marker: bool = True
    separator: str = ""
    end: str = ""
    takes_names: bool = False
    short_ids: bool = False


_STYLES = {
    "llama3_json": ToolStyle("<|python_tag|>", "parameters", needs_marker=False, separator=";"),
    "hermes": ToolStyle("<tool_call>", "arguments", end="</tool_call>"),
    "mistral": ToolStyle(
        "[TOOL_CALLS]", "arguments", is_list=True, separator=",", takes_names=True, short_ids=True
    ),
    "json": ToolStyle("", "arguments", is_list=True, needs_marker=False, separator=","),
}

TOOL_CALL_PARSERS = tuple(_STYLES)
"""Names of the parsers. `json` is for models without a style: the answer is a list of calls and nothing else."""


def find_tool_style(parser: str) -> ToolStyle:
    """Return the style of a parser; raise InvalidArgument if the parser does not exist."""
    if parser not in _STYLES:
        raise InvalidArgument(
            f"the tool call parser is {parser!r}, expected one of {', '.join(TOOL_CALL_PARSERS)}"
        )
    return _STYLES[parser]


def needs_special_tokens(tokenizer: Tokenizer, tool_parser: str, reasoning_parser: str) -> bool:
    """Return whether the parsers need special tokens of the model, so that texts must include special tokens.

    Args:
        tokenizer: Tokenizer of the model.
        tool_parser: One of TOOL_CALL_PARSERS, or "" for none.
        reasoning_parser: One of `reasoning.REASONING_PARSERS`, or "" for none.
    """
    markers = [THINK_BEGIN, THINK_END] if reasoning_parser else []
    if tool_parser:
        style = find_tool_style(tool_parser)
        markers += [style.marker, style.end]
    return any(tokenizer.added_token_id(marker) in tokenizer.special_ids for marker in markers)

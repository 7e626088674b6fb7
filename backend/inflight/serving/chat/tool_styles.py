"""How models write tool calls: what stands in front of them, between them and behind them.

Owns the names of the parsers. Does not know how a text is read (`tool_calls.py`) or enforced (`tool_guides.py`).
Immutable; any thread.
"""

from __future__ import annotations

from dataclasses import dataclass

from inflight.errors import InvalidArgument
from inflight.serving.chat.reasoning import THINK_BEGIN, THINK_END
from inflight.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ToolStyle:
    """A way to write tool calls: each is an object with a name and with arguments.

    Attributes:
        marker: Text in front of a call, or of a list of them; "" where nothing stands there.
        arguments_key: What the model calls the arguments.
        is_list: Calls stand in a list, `[{…}, {…}]`.
        needs_marker: Calls are only looked for behind a marker; else also where the text begins.
        separator: Text between two calls that follow one marker; "" where each has its own.
        end: Text behind a call; "" where nothing stands there.
        takes_names: A call may also be written as its name and its arguments, `name{…}` or `name[ARGS]{…}`.
        short_ids: Ids of calls have nine letters and digits, as the model's template wants them.
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
"""Names of the parsers. The style json is a list of calls and nothing else, for models that have no style."""


def find_tool_style(parser: str) -> ToolStyle:
    """The style of a parser's name. Raises InvalidArgument where there is none."""
    if parser not in _STYLES:
        raise InvalidArgument(
            f"the tool call parser is {parser!r}, expected one of {', '.join(TOOL_CALL_PARSERS)}"
        )
    return _STYLES[parser]


def needs_special_tokens(tokenizer: Tokenizer, tool_parser: str, reasoning_parser: str) -> bool:
    """Whether the parsers look for special tokens of a model, so that its text must not be made without these.

    Args:
        tokenizer: Of the model.
        tool_parser: One of TOOL_CALL_PARSERS, or "" for none.
        reasoning_parser: One of `reasoning.REASONING_PARSERS`, or "" for none.
    """
    markers = [THINK_BEGIN, THINK_END] if reasoning_parser else []
    if tool_parser:
        style = find_tool_style(tool_parser)
        markers += [style.marker, style.end]
    return any(tokenizer.added_token_id(marker) in tokenizer.special_ids for marker in markers)

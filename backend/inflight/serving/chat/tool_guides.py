"""Guides that force tool calls: for tool_choice required, and for a named function.

Builds the grammar of forced calls in each format of `tool_format_table.py`. The engine enforces the guide, and
`tool_calls.py` parses the text. Any thread.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from inflight.core.request.guide import Guide, GuideKind
from inflight.errors import InvalidArgument, Name
from inflight.serving.chat.argument_fields import argument_fields, is_writable
from inflight.serving.chat.messages import plain_json
from inflight.serving.chat.tool_format_table import find_tool_format
from inflight.serving.chat.tool_formats import ArgumentStyle, ToolFormat


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether an answer may or must call functions, as a client's tool_choice says.

    Attributes:
        mode: none, auto, required, or named.
        name: The function to call if the mode is named.
    """

    mode: str
    name: str = ""

    @property
    def is_forced(self) -> bool:
        """Return whether the answer must be a call."""
        return self.mode in ("required", "named")


def read_tool_choice(tools: Sequence[Mapping[str, Any]] | None, tool_choice: Any) -> ToolChoice:
    """Read a request's tool_choice, and check its tools.

    Args:
        tools: OpenAI's tools; None and an empty list mean no tools.
        tool_choice: none, auto, required, or {"type": "function", "function": {"name": …}}. None means auto
            if there are tools, else none.

    Raises:
        InvalidArgument: An argument is malformed, or the named function is not among the tools.
    """
    names = [name for name, _ in _functions(tools or ())]
    match tool_choice:
        case None:
            return ToolChoice("auto" if names else "none")
        case "none":
            return ToolChoice("none")
        case "auto" | "required" if names:
            return ToolChoice(str(tool_choice))
        case {"type": "function", "function": {"name": str(name)}} if name in names:
            return ToolChoice("named", name)
        case "auto" | "required":
            raise InvalidArgument(Name("tool_choice"), f" is {tool_choice}, but there are no tools")
        case {"type": "function", "function": {"name": str(name)}}:
            raise InvalidArgument(
                Name("tool_choice"),
                f".function.name is {name!r}, expected one of the tools: {', '.join(names) or 'none'}",
            )
        case _:
            raise InvalidArgument(
                Name("tool_choice"),
                f" is {repr(tool_choice)[:80]}, expected none, auto, required or "
                '{"type": "function", "function": {"name": "…"}}',
            )


def tool_guide(
    tools: Sequence[Mapping[str, Any]],
    tool_choice: Any,
    parser: str,
    parallel: bool = True,
    starts_inside_reasoning: bool = False,
    reasoning_end: str = "</think>",
) -> Guide | None:
    """Return the guide for a request whose answer must be one or several tool calls; None if none is forced.

    Args:
        tools: OpenAI's tools.
        tool_choice: As in `read_tool_choice`.
        parser: One of TOOL_CALL_PARSERS, which determines the form of calls.
        parallel: Whether to allow several calls. A named function is always called once.
        starts_inside_reasoning: Whether the prompt has opened the reasoning, which the model must end before
            the calls.
        reasoning_end: The text that ends the reasoning.

    Raises:
        InvalidArgument: As in `read_tool_choice`, or the parser does not exist.
    """
    choice = read_tool_choice(tools, tool_choice)
    if not choice.is_forced:
        return None
    form = find_tool_format(forced_parser(parser, tools))
    structures = [
        {"name": name, **_structure(form, name, parameters)}
        for name, parameters in _functions(tools)
        if choice.mode == "required" or name == choice.name
    ]
    begin, end = _group(form)
    sequence = {
        "after": reasoning_end if starts_inside_reasoning else "",
        "begin": begin,
        "separator": f"{form.separator} " if form.separator.strip() else "\n",
        "end": end,
        # A model with channels ends its answer after a call.
        "only_one": choice.mode == "named" or not parallel or bool(form.reasoning_parser),
    }
    return Guide(GuideKind.STRUCTURAL_TAG, json.dumps({"structures": structures, "sequence": sequence}))


def forced_parser(parser: str, tools: Sequence[Mapping[str, Any]]) -> str:
    """Return the format of forced calls: the model's own, or `json` if a guide cannot force that format.

    The guide makes the model follow the format.

    Args:
        parser: One of TOOL_CALL_PARSERS; "": the model has none.
        tools: OpenAI's tools. Some schemas can only be followed in JSON.
    """
    form = find_tool_format(parser) if parser else None
    if form is None or form.has_json:
        return parser or "json"
    is_forced = is_writable(form) and all(
        _fields(form, schema) is not None for _, schema in _functions(tools)
    )
    return parser if is_forced else "json"


def forced_prefix(parser: str, starts_inside_reasoning: bool = False) -> str:
    """Return the text to append to a prompt whose answer follows a guide of `tool_guide`.

    It is the format's marker if that is a special token, which a guide cannot require. It is "" for other
    formats, and if the answer begins inside reasoning.

    Args:
        parser: The format of the calls, as `forced_parser` returned it.
        starts_inside_reasoning: As in `tool_guide`.
    """
    form = find_tool_format(parser)
    return form.begin if form.has_special_marker and not starts_inside_reasoning else ""


def _structure(form: ToolFormat, name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Return what a guide requires of a call: the texts around the arguments, and their schema or fields."""
    begin, end = form.call_begin, form.call_end
    if not form.is_group and form.needs_marker and not form.has_special_marker:
        begin, end = f"{form.begin}{form.pads}{begin}", f"{end}{form.pads}{form.end}"
    match form.arguments:
        case ArgumentStyle.OBJECT:
            keys = f'{{"{form.name_key}": {json.dumps(name)}, "{form.arguments_key}": '
            return {"begin": f"{begin}{keys}", "schema": schema, "end": f"}}{end}"}
        case ArgumentStyle.JSON:
            number = ":0" if form.is_numbered else ""
            return {"begin": f"{begin}{name}{number}{form.name_end}", "schema": schema, "end": end}
        case ArgumentStyle.PYTHON:
            fields = {"fields": _fields(form, schema), "separator": ", "}
            return {"begin": f"{begin}{name}(", **fields, "end": f"){end}"}
        case _:
            line = "" if end.startswith("\n") else "\n"
            fields = {"fields": _fields(form, schema), "separator": ""}
            return {"begin": f"{begin}{name}{form.name_end}", **fields, "end": f"{line}{end}"}


def _fields(form: ToolFormat, schema: dict[str, Any]) -> list[dict[str, Any]] | None:
    return argument_fields(form, schema, json.dumps(schema))


def _group(form: ToolFormat) -> tuple[str, str]:
    """Return the texts that a guide requires before and after all calls."""
    begin, end = ("[", "]") if form.is_list else ("", "")
    if not form.is_group:
        return begin, end
    marker = "" if form.has_special_marker else form.begin
    return f"{marker}{form.pads}{begin}", f"{end}{form.pads}{form.end}"


def _functions(tools: Sequence[Mapping[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Return (name, JSON schema of the parameters) of each tool's function."""
    functions: dict[str, dict[str, Any]] = {}
    for index, tool in enumerate(tools):
        match plain_json(tool, f"tools[{index}]"):
            case {"type": "function", "function": {"name": str(name)} as function} if name:
                parameters: Any = cast(dict[str, Any], function).get("parameters")
            case _:
                raise InvalidArgument(
                    Name(f"tools[{index}]"),
                    f" is {repr(tool)[:80]}, expected an object with type function and a function "
                    "that has a name",
                )
        if name in functions:
            raise InvalidArgument(
                Name(f"tools[{index}]"), f".function.name is {name!r}, which another tool has"
            )
        functions[name] = _schema(parameters, f"tools[{index}].function.parameters")
    return list(functions.items())


def _schema(parameters: Any, name: str) -> dict[str, Any]:
    """Return the JSON schema of a function's arguments, with `"type": "object"` added if it is missing."""
    if parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    schema = cast(dict[str, Any], parameters if isinstance(parameters, dict) else {"type": parameters})
    if schema.get("type", "object") != "object":
        raise InvalidArgument(
            Name(name), f" is {json.dumps(parameters)[:80]}, expected a JSON schema of type object"
        )
    return schema if "$ref" in schema else {"type": "object", **schema}

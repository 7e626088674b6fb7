"""Read and fill in the `parameters` of a config.pbtxt without changing the rest of its text.

Parses as much of protobuf's text format as is needed to find the entries: comments, quoted strings, braces
and brackets. Also replaces template variables outside of strings by their defaults.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

_TOKEN = re.compile(
    r"""(?P<space>(?:\s|\#[^\n]*)+)
      | (?P<string>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
      | (?P<word>[^\s\#"'{}\[\]<>:,;]+)
      | (?P<mark>.)""",
    re.VERBOSE,
)
_OPEN, _CLOSE = frozenset("{[<"), frozenset("}]>")
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{1,2}|[0-7]{1,3}|.)", re.DOTALL)
_NAMED_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}


_UNQUOTED_VARIABLE = re.compile(
    r"""(?P<kept>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|\#[^\n]*)|\$\{(?P<name>\w+)\}""", re.VERBOSE
)
_FIELD_DEFAULTS = {
    "triton_max_batch_size": "64",
    "decoupled_mode": "true",
    "max_queue_delay_microseconds": "0",
    "max_queue_size": "0",
    "bls_instance_count": "1",
    "preprocessing_instance_count": "1",
    "postprocessing_instance_count": "1",
    "logits_datatype": "TYPE_FP32",
    "encoder_input_features_data_type": "TYPE_FP16",
    "prompt_embedding_table_data_type": "TYPE_FP16",
}
"""Defaults of tensorrtllm_backend's template variables outside of strings; the values of `model_repository`."""


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    start: int
    end: int


@dataclass(frozen=True)
class _Entry:
    """One `parameters` entry: its key, its value, and the position of the value's quoted text."""

    key: str
    value: str
    start: int
    end: int


def read_parameters(config_text: str) -> dict[str, str]:
    """Return every parameter with a string value, in the order of the file."""
    return {entry.key: entry.value for entry in _entries(config_text)}


def set_parameters(config_text: str, values: Mapping[str, str]) -> str:
    """Return the text with the values of these parameters replaced. Missing parameters are appended."""
    missing = dict(values)
    pieces: list[str] = []
    position = 0
    for entry in _entries(config_text):
        if entry.key in values:
            pieces += [config_text[position : entry.start], quote(values[entry.key])]
            position = entry.end
            missing.pop(entry.key, None)
    pieces.append(config_text[position:])
    if missing and config_text and not config_text.endswith("\n"):
        pieces.append("\n")
    pieces += [_new_entry(key, value) for key, value in missing.items()]
    return "".join(pieces)


def add_outputs(config_text: str, outputs: Mapping[str, int]) -> str:
    """Return the text with declarations of FP32 outputs appended, unless they are declared.

    `outputs` has the number of dimensions of each output by name.
    """
    new = [name for name in outputs if not re.search(rf'name\s*:\s*"{re.escape(name)}"', config_text)]
    if not new:
        return config_text
    lines = [
        f"output {{ name: {quote(name)} data_type: TYPE_FP32 dims: [ {', '.join(['-1'] * outputs[name])} ] }}"
        for name in new
    ]
    return "\n".join([config_text.rstrip("\n"), *lines, ""])


def set_input_type(config_text: str, name: str, data_type: str) -> str:
    """Return the text with another data type for the tensor `name`, if the type follows the name directly."""
    pattern = rf'(name\s*:\s*"{re.escape(name)}"\s*,?\s*data_type\s*:\s*)\w+'
    return re.sub(pattern, rf"\g<1>{data_type}", config_text)


def fill_fields(config_text: str) -> str:
    """Return the text with defaults for template variables outside of strings, which are invalid protobuf.

    Variables without a default are not changed, nor are variables in strings and comments.
    """
    return _UNQUOTED_VARIABLE.sub(
        lambda match: match["kept"] or _FIELD_DEFAULTS.get(match["name"], match[0]), config_text
    )


def set_max_batch_size(text: str, size: int) -> str:
    """Return the text with another `max_batch_size`, if it has one."""
    return re.sub(r"^max_batch_size\s*:\s*\d+", f"max_batch_size: {size}", text, flags=re.MULTILINE)


_DECOUPLED = re.compile(r"(?P<head>model_transaction_policy\s*:?\s*\{\s*decoupled\s*:\s*)(?P<value>\w+)")


def read_decoupled(text: str) -> bool | None:
    """Return `decoupled` of the `model_transaction_policy`; None if there is no such policy."""
    match = _DECOUPLED.search(text)
    return None if match is None else match["value"].lower() == "true"


def set_decoupled(text: str, decoupled: bool) -> str:
    """Return the text with another `decoupled` in its `model_transaction_policy`, if it has one."""
    return _DECOUPLED.sub(lambda match: match["head"] + ("true" if decoupled else "false"), text)


def quote(value: str) -> str:
    """Return `value` as a quoted string of protobuf's text format."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + escaped.replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t") + '"'


def unquote(literal: str) -> str:
    """Return the text of a quoted string. Numeric escapes stand for bytes of UTF-8."""
    raw = _ESCAPE.sub(lambda match: _unescape(match[1]), literal[1:-1])
    return raw.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _unescape(code: str) -> str:
    if code[0] == "x" and len(code) > 1:
        byte = int(code[1:], 16)
    elif code[0] in "01234567":
        byte = int(code, 8) & 0xFF
    else:
        return _NAMED_ESCAPES.get(code, code)
    return bytes([byte]).decode("utf-8", "surrogateescape")


def _new_entry(key: str, value: str) -> str:
    return f"parameters {{\n  key: {quote(key)}\n  value {{ string_value: {quote(value)} }}\n}}\n"


def _tokens(text: str) -> list[_Token]:
    matches = _TOKEN.finditer(text)
    return [_Token(m.lastgroup or "", m[0], m.start(), m.end()) for m in matches if m.lastgroup != "space"]


@lru_cache(maxsize=32)  # a start reads the same few texts again and again
def _entries(text: str) -> tuple[_Entry, ...]:
    return tuple(_find_entries(text))


def _find_entries(text: str) -> Iterator[_Entry]:
    tokens = _tokens(text)
    index = depth = 0
    while index < len(tokens):
        token = tokens[index]
        if depth == 0 and token.text == "parameters":
            end = _end_of_block(tokens, index + 1)
            yield from _entries_in(tokens[index + 1 : end])
            index = end
            continue
        depth += (token.text in _OPEN) - (token.text in _CLOSE)
        index += 1


def _end_of_block(tokens: list[_Token], index: int) -> int:
    """Return the index after the bracket that closes the block at `index`, which may begin with a colon."""
    depth = 0
    for position in range(index, len(tokens)):
        depth += (tokens[position].text in _OPEN) - (tokens[position].text in _CLOSE)
        if depth == 0 and tokens[position].text in _CLOSE:
            return position + 1
    return len(tokens)


def _entries_in(block: list[_Token]) -> Iterator[_Entry]:
    """Yield the entries of `{ key: "k" value: { string_value: "v" } }`, or of a list of these."""
    key: str | None = None
    for index, token in enumerate(block):
        if token.text == "key":
            key = "".join(unquote(part.text) for part in _strings_after(block, index))
        elif token.text == "string_value" and key is not None:
            parts = _strings_after(block, index)
            if parts:
                value = "".join(unquote(part.text) for part in parts)
                yield _Entry(key, value, parts[0].start, parts[-1].end)
            key = None


def _strings_after(block: list[_Token], index: int) -> list[_Token]:
    """Return the quoted strings after a field name. Adjacent strings are parts of one value."""
    position = index + 1
    if position < len(block) and block[position].text == ":":
        position += 1
    parts: list[_Token] = []
    while position < len(block) and block[position].kind == "string":
        parts.append(block[position])
        position += 1
    return parts

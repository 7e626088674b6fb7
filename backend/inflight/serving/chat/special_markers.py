"""Whether the markers of a model's tool calls and reasoning are special tokens. Any thread."""

from __future__ import annotations

from inflight.serving.chat.reasoning_formats import find_reasoning_format
from inflight.serving.chat.tool_format_table import find_tool_format
from inflight.text.tokenizer import Tokenizer


def needs_special_tokens(tokenizer: Tokenizer, tool_parser: str, reasoning_parser: str) -> bool:
    """Return whether the parsers need special tokens of the model, so that texts must include special tokens.

    Args:
        tokenizer: Tokenizer of the model.
        tool_parser: One of TOOL_CALL_PARSERS, or "" for none.
        reasoning_parser: One of `reasoning_formats.REASONING_PARSERS`, or "" for none.
    """
    texts: list[str] = []
    if reasoning_parser:
        reasoning = find_reasoning_format(reasoning_parser)
        texts += [reasoning.begin, reasoning.end, *reasoning.skipped]
    if tool_parser:
        form = find_tool_format(tool_parser)
        tags = (form.tags.key_begin, form.tags.value_begin, form.tags.value_end) if form.tags else ()
        texts += [form.begin, form.end, form.call_begin, form.name_end, form.call_end, form.quote, *tags]
    joined = "\0".join(texts)
    return bool(texts) and any(token in joined for token in tokenizer.special_texts)

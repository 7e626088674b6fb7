"""A checkpoint's chat template: messages to the text of a prompt, as transformers' `apply_chat_template` does.

Owns the choice among several templates, what is found out about one by trying it, and `continue_final_message`.
The messages themselves are made fit by `messages.py`. Does not know a protocol. A ChatTemplate is immutable; any
thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from inflight.errors import ConfigError, InvalidArgument
from inflight.serving.chat.messages import Message, MessageForm, plain_json, plain_messages
from inflight.serving.chat.reasoning import THINK_END
from inflight.serving.chat.template_environment import compile_template, names_in, render_bounded
from inflight.serving.chat.template_files import DEFAULT, TOOL_USE, TemplateFiles, read_template_files

_OWN_ARGUMENTS = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template")
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


def load_chat_template(tokenizer_dir: str, file: Path | None = None) -> ChatTemplate | None:
    """Read the chat template of a checkpoint; None if it has none.

    Args:
        tokenizer_dir: The folder with tokenizer.json.
        file: A jinja2 template to use instead of the checkpoint's.

    Raises:
        ConfigError: A file is missing or broken, or a template is none; the message names it.
    """
    files = read_template_files(tokenizer_dir, file)
    return ChatTemplate(files) if files.sources else None


class ChatTemplate:
    """The templates of a checkpoint, of which a chat takes one.

    Attributes:
        style: The parser of `tool_calls.py` that fits what the template asks for: llama3_json, hermes, mistral, or
            "" where none does.
        reasoning_style: The parser of `reasoning.py` that fits: think, or "".
    """

    def __init__(self, files: TemplateFiles) -> None:
        self._special_tokens = dict(files.special_tokens)
        self._by_name = {
            name: _compile(source, name, files.origin, self._special_tokens)
            for name, source in files.sources.items()
        }
        for_tools = files.sources.get(TOOL_USE) or files.sources.get(DEFAULT, "")
        self.style = tool_style(for_tools)
        self.reasoning_style = "think" if THINK_END in files.sources.get(DEFAULT, "") else ""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] = {},
    ) -> str:
        """The text of a prompt, special tokens included.

        Args:
            messages: OpenAI's messages: role, content (text, or parts of type text), tool_calls, tool_call_id, ….
            tools: OpenAI's tools; None and an empty list are none.
            add_generation_prompt: End with what an answer of the assistant begins with.
            continue_final_message: End within the last message, which the model is to go on with.
            template_kwargs: Further variables of the template, such as `enable_thinking` and `documents`.

        Raises:
            InvalidArgument: A message is of another form, the template has no place for what is given, or refuses
                it; the message names the field.
        """
        if add_generation_prompt and continue_final_message:
            raise InvalidArgument(
                "continue_final_message and add_generation_prompt exclude each other: an answer is either "
                "continued or begun; set add_generation_prompt to false"
            )
        chosen = self._choose(has_tools=bool(tools))
        chat = plain_messages(messages, chosen.form)
        values = {**self._special_tokens, **_checked_kwargs(template_kwargs, chosen)}
        values["tools"] = _checked_tools(tools, chosen) if tools else None
        values.setdefault("documents", None)
        if continue_final_message:
            return _render_continued(chosen, chat, values)
        return _render(chosen, {**values, "messages": chat, "add_generation_prompt": add_generation_prompt})

    def reads(self, name: str, has_tools: bool) -> bool:
        """Whether the template of a chat, with tools or without, has a variable of this name."""
        return name in self._choose(has_tools).names

    def _choose(self, has_tools: bool) -> _Template:
        chosen = self._by_name.get(TOOL_USE) if has_tools else None
        chosen = chosen or self._by_name.get(DEFAULT)
        if chosen is None:
            raise InvalidArgument(
                f"messages need a chat template named {DEFAULT}; the checkpoint has only {sorted(self._by_name)}"
            )
        return chosen


def tool_style(source: str) -> str:
    """The parser of tool calls that a template asks the model to write for; "" where none fits."""
    if "<tool_call>" in source and "arguments" in source:
        return "" if "<function=" in source or "<arg_key>" in source else "hermes"
    if "[TOOL_CALLS]" in source:
        return "mistral"
    is_llama = "<|start_header_id|>" in source and "parameters" in source
    return "llama3_json" if is_llama and "<function=" not in source else ""


@dataclass(frozen=True, slots=True)
class _Template:
    """One template, compiled, and what is known of it.

    Attributes:
        compiled: To render.
        names: The variables that it reads.
        source: What it was compiled from.
        form: What messages have to look like for it.
    """

    compiled: jinja2.Template
    names: frozenset[str]
    source: str
    form: MessageForm


def _compile(source: str, name: str, origin: str, special_tokens: Mapping[str, str]) -> _Template:
    try:
        compiled, names = compile_template(source), names_in(source)
    except (jinja2.TemplateError, RecursionError) as error:
        line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise ConfigError(f"the chat template {name} of {origin} is no template{line}: {error}") from error
    return _Template(compiled, names, source, _find_form(compiled, special_tokens))


_PROBE = "pr0be"
_CALL_ID = "abcdef123"  # nine letters or digits, as Mistral's templates want


def _find_form(compiled: jinja2.Template, special_tokens: Mapping[str, str]) -> MessageForm:
    """Find out by trying what messages a template can render."""

    def rendered(*messages: Message) -> str:
        values = {**special_tokens, "messages": list(messages), "tools": None, "documents": None}
        try:
            return render_bounded(compiled, {**values, "add_generation_prompt": False})
        except Exception:  # whatever a template raises
            return ""

    def takes_arguments(arguments: Any) -> bool:
        user = {"role": "user", "content": "question"}
        call = {"id": _CALL_ID, "type": "function", "function": {"name": "f", "arguments": arguments}}
        for content in ({}, {"content": ""}):
            answer = {"role": "assistant", **content, "tool_calls": [call]}
            if _PROBE in rendered(user, answer):
                return True
        return False

    text = rendered({"role": "user", "content": _PROBE})
    parts = rendered({"role": "user", "content": [{"type": "text", "text": _PROBE}]})
    # Where a template prints a list as it is, the text in it is in quotation marks.
    takes_parts = _PROBE in parts and f"'{_PROBE}'" not in parts and f'"{_PROBE}"' not in parts
    developer = {
        "role": "developer",
        "content": _PROBE if _PROBE in text else [{"type": "text", "text": _PROBE}],
    }
    return MessageForm(
        takes_developer=_PROBE in rendered(developer, {"role": "user", "content": "question"}),
        takes_text=_PROBE in text or not takes_parts,
        takes_parts=takes_parts,
        arguments_as_text=not takes_arguments({"key": _PROBE}) and takes_arguments(f'{{"key": "{_PROBE}"}}'),
    )


def _checked_kwargs(given: Mapping[str, Any], chosen: _Template) -> dict[str, Any]:
    for name in given:
        if name in _OWN_ARGUMENTS:
            raise InvalidArgument(
                f"chat_template_kwargs.{name} is not allowed: it is a field of the request itself"
            )
        if name not in chosen.names:
            raise InvalidArgument(
                f"chat_template_kwargs.{name}: the chat template has no variable of this name; it has "
                f"{', '.join(sorted(chosen.names - set(_OWN_ARGUMENTS))) or 'no others'}"
            )
    return plain_json(given, "chat_template_kwargs")


def _checked_tools(tools: Sequence[Mapping[str, Any]], chosen: _Template) -> list[Any]:
    if "tools" not in chosen.names:
        raise InvalidArgument("tools: the chat template of this model has no place for tools")
    return plain_json(tools, "tools")


def _render(chosen: _Template, values: Mapping[str, Any]) -> str:
    try:
        return render_bounded(chosen.compiled, values)
    except InvalidArgument:
        raise
    except Exception as error:  # a template may raise anything, by what it calls
        raise InvalidArgument(f"messages cannot be rendered by the chat template: {error}") from error


def _render_continued(chosen: _Template, chat: list[Message], values: Mapping[str, Any]) -> str:
    """Render with a mark behind the last message's text, and cut there, as transformers does."""
    final = chat[-1].get("content")
    if final is None or final == []:
        raise InvalidArgument("continue_final_message: the last message has no content to go on with")
    if isinstance(final, str):
        marked: Any = final + _TAG
    else:
        *before, last = final
        final, marked = last["text"], [*before, {**last, "text": last["text"] + _TAG}]
    messages = [*chat[:-1], {**chat[-1], "content": marked}]
    text = _render(chosen, {**values, "messages": messages, "add_generation_prompt": False})
    place = text.rfind(_TAG.strip())
    if place < 0 or final.strip() not in text:
        raise InvalidArgument(
            "continue_final_message: the chat template does not render the last message as it is, so that it "
            "cannot be gone on with"
        )
    kept = text[:place]
    # Where the template strips contents, the space at the end of the mark is gone, and so is that of the message.
    return kept if text[place : place + len(_TAG)] == _TAG else kept.rstrip()

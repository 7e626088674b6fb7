"""A checkpoint's chat template: renders messages to a prompt, like transformers' `apply_chat_template`.

Chooses among several templates, and implements `continue_final_message`. `template_trial.py` finds out what
a template can render; `messages.py` converts the messages. A ChatTemplate is immutable, except for its cache
of roles; any thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jinja2

from inflight.errors import ConfigError, InvalidArgument, Name
from inflight.serving.chat.messages import Message, MessageForm, plain_json, plain_messages
from inflight.serving.chat.reasoning_formats import reasoning_format_in
from inflight.serving.chat.template_environment import (
    compile_template,
    constants_in,
    names_in,
    render_bounded,
)
from inflight.serving.chat.template_files import DEFAULT, TOOL_USE, TemplateFiles, read_template_files
from inflight.serving.chat.template_trial import (
    TOOLS_NAMES,
    USUAL_ROLES,
    CallStyle,
    RoleTreatment,
    Trial,
    find_call_style,
    find_form,
    find_treatment,
)

_OWN_ARGUMENTS = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template")
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


def load_chat_template(tokenizer_dir: str, file: Path | None = None) -> ChatTemplate | None:
    """Read the chat template of a checkpoint; return None if it has none.

    Args:
        tokenizer_dir: The folder with tokenizer.json.
        file: A file with a jinja2 template to use instead of the checkpoint's; None: use the checkpoint's.

    Raises:
        ConfigError: A file is missing or broken, or a template is invalid; the message names the file or
            template.
    """
    files = read_template_files(tokenizer_dir, file)
    return ChatTemplate(files) if files.sources else None


class ChatTemplate:
    """The chat templates of a checkpoint; each chat is rendered by one of them.

    Attributes:
        style: Name of the parser in `tool_calls.py` for the calls that the template writes; "": no parser.
        call_example: The beginning of a call in the template's form; "" if it writes no calls.
        takes_tools: Whether the template renders tools.
        takes_pictures: Whether the template has a place for pictures.
        reasoning_style: Name of the format in `reasoning_formats.py` of the model's reasoning; "" for none.
    """

    def __init__(self, files: TemplateFiles) -> None:
        self._special_tokens = dict(files.special_tokens)
        self._by_name = {
            name: _compile(source, name, files.origin, self._special_tokens)
            for name, source in files.sources.items()
        }
        for_tools = self._by_name.get(TOOL_USE) or self._by_name.get(DEFAULT)
        calls = CallStyle("", "") if for_tools is None else find_call_style(for_tools.trial, for_tools.form)
        self.style, self.call_example = calls.parser, calls.example
        self.takes_tools = for_tools is not None and bool(for_tools.trial.tools_name)
        self.takes_pictures = any(each.form.takes_pictures for each in self._by_name.values())
        self.reasoning_style = reasoning_format_in(files.sources.get(DEFAULT, ""))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] = {},
        takes_pictures: bool = False,
    ) -> str:
        """Render a chat to the text of a prompt, special tokens included.

        Args:
            messages: OpenAI's messages: role, content (text, or parts), tool_calls, tool_call_id, ….
            tools: OpenAI's tools; None and an empty list mean no tools.
            add_generation_prompt: Whether the prompt ends with the beginning of an assistant message.
            continue_final_message: Whether the prompt ends inside the last message, for the model to
                continue it.
            template_kwargs: More variables of the template, such as `enable_thinking` and `documents`.
            takes_pictures: Whether contents may have parts of type image_url, if the template has a place for
                them. The text then has the template's placeholder for each.

        Raises:
            InvalidArgument: A message is malformed, or the template ignores or refuses an argument; the
                error names the field.
        """
        if add_generation_prompt and continue_final_message:
            raise InvalidArgument(
                Name("continue_final_message"),
                " and ",
                Name("add_generation_prompt"),
                " exclude each other: an answer is either continued or begun; set ",
                Name("add_generation_prompt"),
                " to false",
            )
        chosen = self._choose(has_tools=bool(tools))
        form = replace(chosen.form, takes_pictures=takes_pictures and chosen.form.takes_pictures)
        chat = plain_messages(messages, form)
        _check_roles(messages, chosen)
        values = {"tools": None, "documents": None, **self._special_tokens}
        values |= _checked_kwargs(template_kwargs, chosen)
        if tools:
            values |= _checked_tools(tools, chosen, template_kwargs)
        if continue_final_message:
            if messages[-1].get("content") in (None, []):
                raise InvalidArgument(
                    Name("continue_final_message"), ": the last message has no content to continue"
                )
            return _render_continued(chosen, chat, values)
        return _render(chosen, {**values, "messages": chat, "add_generation_prompt": add_generation_prompt})

    def reads(self, name: str, has_tools: bool) -> bool:
        """Return whether the template for chats with tools, or for chats without, reads the variable `name`."""
        return name in self._choose(has_tools).names

    def unknown_calls(self) -> str:
        """Return the reason why `style` is ""."""
        if self.call_example:
            return f"no parser reads tool calls as the chat template writes them, {self.call_example!r}"
        return "the chat template does not show how the model writes tool calls"

    def _choose(self, has_tools: bool) -> _Template:
        chosen = self._by_name.get(TOOL_USE) if has_tools else None
        chosen = chosen or self._by_name.get(DEFAULT)
        if chosen is None:
            raise InvalidArgument(
                Name("messages"),
                f" need a chat template named {DEFAULT}; the checkpoint has only {sorted(self._by_name)}",
            )
        return chosen


@dataclass(frozen=True, slots=True)
class _Template:
    """One compiled template with its properties.

    Attributes:
        compiled: The compiled template.
        names: Variables that the template reads.
        constants: Texts in the template's expressions, such as names of roles.
        form: Form of the messages that the template renders.
        trial: Renderer of test messages.
        roles: The template's treatment of messages of each role in USUAL_ROLES.
        own_roles: The template's treatment of other roles among its constants; an entry is added by the
            first message of the role.
    """

    compiled: jinja2.Template
    names: frozenset[str]
    constants: frozenset[str]
    form: MessageForm
    trial: Trial
    roles: Mapping[str, RoleTreatment]
    own_roles: dict[str, RoleTreatment] = field(default_factory=dict[str, RoleTreatment])

    def treatment_of(self, role: str) -> RoleTreatment:
        """Return the treatment of a role's messages.

        The first call for a role not in USUAL_ROLES renders test chats.
        """
        treatment = self.roles.get(role) or self.own_roles.get(role)
        if treatment is None:
            if role not in self.constants:
                return RoleTreatment.LEFT_OUT
            treatment = self.own_roles[role] = find_treatment(self.trial, self.form, role)
        return treatment


def _compile(source: str, name: str, origin: str, special_tokens: Mapping[str, str]) -> _Template:
    try:
        compiled, names, constants = compile_template(source), names_in(source), constants_in(source)
    except (jinja2.TemplateError, RecursionError) as error:
        line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise ConfigError(f"the chat template {name} of {origin} is not a template{line}: {error}") from error
    trial = Trial(compiled, special_tokens, next((each for each in TOOLS_NAMES if each in names), ""))
    form = find_form(trial)
    roles = {role: find_treatment(trial, form, role) for role in USUAL_ROLES}
    return _Template(compiled, names, constants, form, trial, roles)


def _check_roles(messages: Sequence[Mapping[str, Any]], chosen: _Template) -> None:
    """Raise InvalidArgument if the template would leave out a message because of its role."""
    for index, message in enumerate(messages):
        given = str(message["role"])
        role = "system" if given == "developer" and not chosen.form.takes_developer else given
        if chosen.treatment_of(role) is RoleTreatment.LEFT_OUT:
            known = [each for each, treatment in chosen.roles.items() if treatment is RoleTreatment.WRITTEN]
            raise InvalidArgument(
                Name(f"messages[{index}]"),
                f".role is {given[:80]!r}, which the chat template of this model does not know: "
                f"expected {', '.join(known)}",
            )


def _checked_kwargs(given: Mapping[str, Any], chosen: _Template) -> dict[str, Any]:
    for name in given:
        if name in _OWN_ARGUMENTS:
            raise InvalidArgument(
                Name("chat_template_kwargs"), f".{name} is not allowed: it is a field of the request itself"
            )
        if name not in chosen.names:
            raise InvalidArgument(
                Name("chat_template_kwargs"),
                f".{name}: the chat template has no variable of this name; it has "
                f"{', '.join(sorted(chosen.names - set(_OWN_ARGUMENTS))) or 'no others'}",
            )
    return plain_json(given, "chat_template_kwargs")


def _checked_tools(
    tools: Sequence[Mapping[str, Any]], chosen: _Template, template_kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    name = chosen.trial.tools_name
    if not name:
        raise InvalidArgument(Name("tools"), ": the chat template of this model has no place for tools")
    if name in template_kwargs:
        raise InvalidArgument(
            Name("chat_template_kwargs"),
            f".{name} is where the template gets the tools of the request: send one of the two",
        )
    return {name: plain_json(tools, "tools")}


def _render(chosen: _Template, values: Mapping[str, Any]) -> str:
    try:
        return render_bounded(chosen.compiled, values)
    except InvalidArgument:
        raise
    except Exception as error:  # functions called by a template may raise any error
        raise InvalidArgument(
            Name("messages"), f" cannot be rendered by the chat template: {error}"
        ) from error


def _render_continued(chosen: _Template, chat: list[Message], values: Mapping[str, Any]) -> str:
    """Render with a mark after the last message's text, and cut the prompt at the mark, as transformers does."""
    final = chat[-1]["content"]
    if isinstance(final, str):
        marked: Any = final + _TAG
    else:
        *before, last = final
        if "text" not in last:
            raise InvalidArgument(
                Name("continue_final_message"), ": the last message ends with a picture, expected a text"
            )
        final, marked = last["text"], [*before, {**last, "text": last["text"] + _TAG}]
    messages = [*chat[:-1], {**chat[-1], "content": marked}]
    text = _render(chosen, {**values, "messages": messages, "add_generation_prompt": False})
    place = text.rfind(_TAG.strip())
    if place < 0 or final.strip() not in text:
        raise InvalidArgument(
            Name("continue_final_message"),
            ": the chat template changes the last message, so that it cannot be continued",
        )
    kept = text[:place]
    # A template that strips contents removes the space at the end of the mark. White space at the end of the
    # message is then removed, too.
    return kept if text[place : place + len(_TAG)] == _TAG else kept.rstrip()

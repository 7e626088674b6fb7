"""From the messages of a chat to a prompt, and to what reads the answer. On the tokenizing threads.

Owns which parsers and which guide a body gets. The template, the parsers and the guides themselves are in
`inflight.serving.chat`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from inflight.core.request.guide import Guide
from inflight.openai.errors import invalid, unsupported
from inflight.openai.guides import read_guide
from inflight.openai.protocol import ChatBody
from inflight.openai.serving_model import ServingModel
from inflight.serving.chat.reasoning import (
    THINK_BEGIN,
    THINK_END,
    ends_reasoning,
    opens_reasoning,
    starts_inside,
)
from inflight.serving.chat.template import ChatTemplate
from inflight.serving.chat.tool_guides import forced_prefix, read_tool_choice, tool_guide

_FORCED_STYLE = "json"
"""How forced calls are written where the template has no style of its own: the guide says it to the model."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A chat, ready to be tokenized.

    Attributes:
        text: Of the prompt.
        guide: What the answer has to look like.
        tool_parser: What finds tool calls in it; "": there are none to find.
        is_forced: Whether it has to be tool calls.
        reasoning_parser: What finds its reasoning; "": it is told as content.
        starts_inside: Whether the prompt has opened the reasoning.
        token_bytes: By id, what each token adds to a text; empty where no reasoning is looked for.
    """

    text: str
    guide: Guide | None
    tool_parser: str
    is_forced: bool
    reasoning_parser: str
    starts_inside: bool
    token_bytes: Sequence[bytes]


def read_chat(model: ServingModel, body: ChatBody) -> ChatPrompt:
    """Render the messages, and choose what reads the answer; raises what is wrong, by the body's names."""
    template = model.chat_template()
    text = render_messages(template, body)
    final = body.messages[-1] if body.continue_final_message else None
    reasoning_parser = _parser(model.options.reasoning_parser, template.reasoning_style)
    is_inside = starts_inside(reasoning_parser, text, final)
    choice = read_tool_choice(body.tools, body.tool_choice)
    tool_parser = _parser(model.options.tool_call_parser, template.style)
    guide = read_guide(body)
    if choice.is_forced:
        tool_parser = tool_parser or _FORCED_STYLE
        if guide is not None:
            raise invalid(
                "tool_choice", "tool_choice asks for a call, and the body for a text of another form"
            )
        guide = tool_guide(body.tools, body.tool_choice, tool_parser, body.parallel_tool_calls, is_inside)
        text += forced_prefix(tool_parser, is_inside)
    elif choice.mode == "none":
        tool_parser = ""
    elif not tool_parser and model.options.tool_call_parser == "auto":
        raise unsupported(
            "tools",
            f"tools: {template.unknown_calls()}: start the server with --tool-call-parser, or send tool_choice "
            '"required" or "none"',
        )
    if not choice.is_forced and guide is not None and is_inside:
        # A guide is for all that is generated, so what the model thinks has to end before.
        begin = "" if opens_reasoning(text, final) else THINK_BEGIN
        text, is_inside = f"{text.rstrip()}{begin}\n\n{THINK_END}\n\n", False
    if ends_reasoning(text, final):
        reasoning_parser = ""
    token_bytes = model.token_bytes if reasoning_parser else ()
    return ChatPrompt(text, guide, tool_parser, choice.is_forced, reasoning_parser, is_inside, token_bytes)


def render_messages(template: ChatTemplate, body: Any) -> str:
    """The text of a body's messages, for an answer or for /tokenize."""
    kwargs = dict(body.chat_template_kwargs)
    effort = getattr(body, "reasoning_effort", None)
    if effort is not None:
        if not template.reads("reasoning_effort", has_tools=bool(body.tools)):
            raise unsupported(
                "reasoning_effort",
                "reasoning_effort: the chat template of this model does not read it; leave it out",
            )
        kwargs.setdefault("reasoning_effort", effort)
    begins_answer = body.add_generation_prompt
    return template.render(
        body.messages,
        tools=body.tools or None,
        add_generation_prompt=not body.continue_final_message if begins_answer is None else begins_answer,
        continue_final_message=body.continue_final_message,
        template_kwargs=kwargs,
    )


def _parser(option: str, of_template: str) -> str:
    if option == "auto":
        return of_template
    return "" if option == "none" else option

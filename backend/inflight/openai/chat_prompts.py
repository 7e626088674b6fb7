"""Convert a chat's messages to a prompt, and choose the guide and the parsers of its answer.

`inflight.serving.chat` has the template, the parsers and the guides. Runs on the tokenizing threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inflight.core.request.guide import Guide
from inflight.openai.errors import invalid, unsupported
from inflight.openai.guides import read_guide
from inflight.openai.protocol import ChatBody
from inflight.openai.serving_model import ServingModel, chosen_parser
from inflight.serving.chat.messages import PictureUrl, picture_urls
from inflight.serving.chat.reasoning import ends_reasoning, opens_reasoning, starts_inside
from inflight.serving.chat.reasoning_formats import find_reasoning_format
from inflight.serving.chat.template import ChatTemplate
from inflight.serving.chat.tool_format_table import find_tool_format
from inflight.serving.chat.tool_guides import (
    forced_parser,
    forced_prefix,
    read_tool_choice,
    tool_guide,
)


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A chat's prompt before tokenization, with the parsers of its answer.

    Attributes:
        text: Text of the prompt.
        guide: Guide of the answer; None if it is free.
        tool_parser: Name of the tool call parser; "": none.
        is_forced: Whether the answer must be tool calls.
        reasoning_parser: Name of the reasoning parser; "": none, all text is content.
        starts_inside: Whether the prompt has opened the reasoning.
        token_bytes: The bytes that each token adds to a text, indexed by token id; empty without a reasoning
            parser.
        pictures: The pictures; the text has a placeholder for each.
        tools: OpenAI's tools.
    """

    text: str
    guide: Guide | None
    tool_parser: str
    is_forced: bool
    reasoning_parser: str
    starts_inside: bool
    token_bytes: Sequence[bytes]
    pictures: Sequence[PictureUrl] = ()
    tools: Sequence[Mapping[str, Any]] | None = None


def read_chat(model: ServingModel, body: ChatBody) -> ChatPrompt:
    """Render the messages, and choose guide and parsers. Errors name fields of the body."""
    template = model.chat_template()
    text = render_messages(template, body, model.takes_pictures())
    pictures = _pictures(model, body) if model.takes_pictures() else ()
    final = body.messages[-1] if body.continue_final_message else None
    reasoning_parser = model.reasoning_parser()
    is_inside = starts_inside(reasoning_parser, text, final)
    marked_by = reasoning_parser or "think"
    marks = find_reasoning_format(marked_by)
    choice = read_tool_choice(body.tools, body.tool_choice)
    tool_parser = chosen_parser(model.options.tool_call_parser, template.style)
    guide = read_guide(body)
    if choice.is_forced:
        tool_parser = forced_parser(tool_parser, body.tools)
        if guide is not None:
            raise invalid(
                "tool_choice", "tool_choice demands a call, which contradicts the body's response format"
            )
        waits = is_inside and body.thinking_token_budget is None
        guide = tool_guide(
            body.tools, body.tool_choice, tool_parser, body.parallel_tool_calls, waits, marks.end
        )
        text += forced_prefix(tool_parser, is_inside)
    elif choice.mode == "none":
        tool_parser = ""
    elif not tool_parser and model.options.tool_call_parser == "auto":
        raise unsupported(
            "tools",
            f"tools: {template.unknown_calls()}: start the server with --tool-call-parser, or send tool_choice "
            '"required" or "none"',
        )
    if body.thinking_token_budget is not None:
        guide = _budgeted(body.thinking_token_budget, reasoning_parser, is_inside, guide)
    elif not choice.is_forced and guide is not None and is_inside:
        # A guide applies to all generated text, so the reasoning must end in the prompt.
        begin = "" if opens_reasoning(text, final, marked_by) else marks.begin
        text, is_inside = f"{text.rstrip()}{begin}\n\n{marks.end}\n\n", False
    if ends_reasoning(text, final, marked_by):
        reasoning_parser = ""
    if tool_parser and (needed := find_tool_format(tool_parser).reasoning_parser):
        # A forced call begins after its own marker, without messages before it.
        reasoning_parser = "" if choice.is_forced and not is_inside else needed
    token_bytes = model.token_bytes if reasoning_parser else ()
    return ChatPrompt(
        text,
        guide,
        tool_parser,
        choice.is_forced,
        reasoning_parser,
        is_inside,
        token_bytes,
        pictures,
        body.tools,
    )


def _budgeted(max_tokens: int, parser: str, is_inside: bool, guide: Guide | None) -> Guide | None:
    """Return the guide of an answer whose reasoning has at most this number of tokens."""
    if not parser:
        raise unsupported("thinking_token_budget", "thinking_token_budget: this model has no reasoning")
    if guide is not None and not is_inside:
        return guide  # the answer begins without reasoning
    marks = find_reasoning_format(parser)
    begin = "" if is_inside else marks.begin
    return Guide.behind_reasoning(begin, marks.end, max_tokens, guide)


def _pictures(model: ServingModel, body: ChatBody) -> Sequence[PictureUrl]:
    """Return the pictures of a body, after checking what else it asks for."""
    pictures, most = picture_urls(body.messages), model.options.max_pictures
    if len(pictures) > most:
        raise invalid(
            "messages",
            f"messages have {len(pictures)} pictures; this server takes at most {most} in a prompt "
            "(--limit-mm-per-prompt)",
        )
    excluded = {
        "truncate_prompt_tokens": body.truncate_prompt_tokens is not None,
        "add_special_tokens": body.add_special_tokens,
        "prompt_logprobs": body.prompt_logprobs is not None,
    }
    for name, is_set in excluded.items():
        if pictures and is_set:
            raise unsupported(name, f"{name} is for prompts without pictures: leave it out")
    return pictures


def render_messages(template: ChatTemplate, body: Any, takes_pictures: bool) -> str:
    """Render a body's messages to the prompt's text, for an answer or for /tokenize."""
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
        takes_pictures=takes_pictures,
    )

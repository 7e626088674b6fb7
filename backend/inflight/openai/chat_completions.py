"""/v1/chat/completions: answers to messages. Runs on the event loop, except `_prepare`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from inflight.openai.answers import Piece, Usage
from inflight.openai.bodies import body_as
from inflight.openai.chat_prompts import ChatPrompt, read_chat
from inflight.openai.context import Context, Envelope, answer_stream, answer_whole, chosen_context
from inflight.openai.errors import invalid
from inflight.openai.log_probs import chat_log_probs, prompt_log_probs_json
from inflight.openai.prepared_body import PreparedBody, check_number_of_sequences, prepare_body
from inflight.openai.protocol import ChatBody
from inflight.openai.sampling import BodySettings, choose_seed
from inflight.openai.serving_model import ServingModel
from inflight.openai.streaming import JsonAnswer, event, made, while_connected
from inflight.pooling import Task
from inflight.serving.chat.reasoning import ReasoningTokens, reasoning_stream
from inflight.serving.chat.special_markers import needs_special_tokens
from inflight.serving.chat.tool_calls import tool_call_stream
from inflight.serving.chat.tool_deltas import ChatDelta, ToolCallDelta

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(body: Annotated[ChatBody, body_as(ChatBody)], request: Request) -> Response:
    """Generate `n` answers to the messages."""
    context, adapter = await chosen_context(request, body.model, Task.GENERATE)
    default = context.model.options.default_max_tokens
    prompt, prepared = await prepare_chat(context, request, body, adapter, default)
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    writer = ChatWriter(body, prepared, prompt, Envelope.of("chatcmpl", kind, prepared, request))
    if body.stream:
        return await answer_stream(context, request, prepared, writer.events)
    pieces = await answer_whole(context, request, prepared)
    return await context.session.compute(lambda: JsonAnswer(writer.whole(pieces)))


async def prepare_chat(
    context: Context, request: Request, body: ChatBody, adapter: str, default_max_tokens: int | None
) -> tuple[ChatPrompt, PreparedBody]:
    """Return a chat's prompt, and the prepared body. Errors name fields of the body.

    Args:
        context: The context of the engine that the body chooses.
        request: The HTTP request.
        body: The chat.
        adapter: Name of the LoRA adapter; "": the bare model.
        default_max_tokens: Largest number of tokens to generate if the body has none, or fewer if fewer fit;
            None: as many as fit.
    """
    prepare = partial(_prepare, context.model, body, adapter, default_max_tokens)
    prompt, asked, prepared = await context.session.compute(prepare)
    if prepared is None:
        prepared = await while_connected(request, _prepare_pictures(context, prompt, asked))
    return prompt, prepared


def _prepare(
    model: ServingModel, body: ChatBody, adapter: str, default_max_tokens: int | None
) -> tuple[ChatPrompt, BodySettings, PreparedBody | None]:
    """Return the prompt, the settings, and the prepared body unless the prompt has pictures to be encoded."""
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "top_logprobs is only for logprobs: true")
    if (
        None not in (body.max_tokens, body.max_completion_tokens)
        and body.max_tokens != body.max_completion_tokens
    ):
        raise invalid(
            "max_tokens",
            f"max_tokens is {body.max_tokens} and max_completion_tokens {body.max_completion_tokens}, which mean "
            "the same: send one",
        )
    check_number_of_sequences(model, 1, body.n)
    chat = read_chat(model, body)
    asked = BodySettings(
        body,
        body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        default_max_tokens,
        num_top=(body.top_logprobs or 0) if body.logprobs else None,
        num_prompt_top=body.prompt_logprobs,
        guide=chat.guide,
        adapter=adapter,
        seed=choose_seed(body),
        skip_special_tokens=body.skip_special_tokens
        and not needs_special_tokens(model.tokenizer(), chat.tool_parser, chat.reasoning_parser),
    )
    if chat.pictures:
        model.check_length(chat.text, "messages")
        return chat, asked, None
    ids = model.encode([chat.text], body.add_special_tokens, "messages")
    return chat, asked, prepare_body(model, asked, [chat.text], ids)


async def _prepare_pictures(context: Context, prompt: ChatPrompt, asked: BodySettings) -> PreparedBody:
    model = context.model
    assert context.pictures is not None, "the model takes pictures"
    vocab_size = model.describe().limits.vocab_size
    encoded = await context.pictures.encode(prompt.text, prompt.pictures, vocab_size)
    ids = [encoded.token_ids]
    return await context.session.compute(lambda: prepare_body(model, asked, [prompt.text], ids, encoded))


class AnswerParser:
    """Parser of one choice's text into reasoning, content and tool calls.

    Args:
        prompt: The chat's prompt, with the names of the parsers.
        only_one: Whether to drop tool calls after the first, as `parallel_tool_calls: false` requires.
    """

    def __init__(self, prompt: ChatPrompt, only_one: bool) -> None:
        self._only_one = only_one
        self._reasoning = reasoning_stream(prompt.reasoning_parser, prompt.starts_inside)
        self._tools = tool_call_stream(prompt.tool_parser, prompt.is_forced, prompt.tools)
        self.has_called = False

    def add(self, piece: Piece) -> tuple[str, ChatDelta]:
        """Parse the next piece's text; return (reasoning, content and tool calls)."""
        parts = list(self.parts(piece))
        return "".join(part[0] for part in parts), ChatDelta.joined(part[1] for part in parts)

    def parts(self, piece: Piece) -> Iterator[tuple[str, ChatDelta]]:
        """Parse the next piece's text; yield (reasoning, content and calls after it) in the order of the text."""
        for reasoning, content in self._reasoning.parts(piece.text):
            yield reasoning, self._seen(self._tools.add(content))
        if piece.finish_reason is not None:
            reasoning, content = self._reasoning.finish(piece.is_cut)
            rest = self._tools.add(content), self._tools.finish(piece.is_cut)
            yield reasoning, self._seen(ChatDelta.joined(rest))

    def _seen(self, delta: ChatDelta) -> ChatDelta:
        """Return the delta without calls that are to be dropped."""
        self.has_called |= bool(delta.tool_calls)
        if self._only_one:
            first = tuple(call for call in delta.tool_calls if call.index == 0)
            delta = ChatDelta(delta.content, first)
        return delta


class ReasoningUsage:
    """Counts the reasoning tokens of all choices in `usage.reasoning_tokens`.

    Args:
        prompt: The chat's prompt, with the name of the parser.
        usage: The usage of the answer.
    """

    def __init__(self, prompt: ChatPrompt, usage: Usage) -> None:
        self._prompt = prompt
        self._usage = usage
        self._choices: dict[int, ReasoningTokens] = {}
        self._count = usage.reasoning_tokens = 0

    def add(self, pieces: Sequence[Piece]) -> None:
        """Count the pieces' reasoning tokens."""
        prompt = self._prompt
        if not prompt.reasoning_parser:
            return
        for piece in pieces:
            tokens = self._choices.get(piece.index)
            if tokens is None:
                stream = reasoning_stream(prompt.reasoning_parser, prompt.starts_inside)
                tokens = self._choices[piece.index] = ReasoningTokens(stream, prompt.token_bytes)
            self._count += tokens.add(piece.token_ids)
        self._usage.reasoning_tokens = self._count


class ChatWriter:
    """Writes one chat answer, whole or as a stream of chunks."""

    def __init__(
        self, body: ChatBody, prepared: PreparedBody, prompt: ChatPrompt, envelope: Envelope
    ) -> None:
        self._body = body
        self._prepared = prepared
        self._prompt = prompt
        self._envelope = envelope
        self._messages: dict[int, AnswerParser] = {}
        self._reasoning = ReasoningUsage(prompt, prepared.usage)

    def whole(self, pieces: list[Piece]) -> dict[str, Any]:
        """Return the `chat.completion` object of an answer that is not streamed."""
        body, prepared = self._body, self._prepared
        self._reasoning.add(pieces)
        more: dict[str, Any] = {"usage": prepared.usage.as_json(), **prepared.receipt.of_answer(body)}
        if body.prompt_logprobs is not None and prepared.names is not None:
            first = pieces[0]
            more["prompt_logprobs"] = prompt_log_probs_json(
                prepared.names,
                prepared.prompt_ids(0),
                first.prompt_log_probs or (),
                first.prompt_tops,
                body.prompt_logprobs,
                first.prompt_ranks,
            )
        if body.return_token_ids:
            more["prompt_token_ids"] = prepared.prompt_ids(0)
        return self._envelope.around([self._choice(piece) for piece in pieces], **more)

    async def events(self, pieces: AsyncIterator[list[Piece]]) -> AsyncIterator[bytes]:
        """Yield the events of a stream."""
        body, usage = self._body, self._prepared.usage
        prompt_ids = {"prompt_token_ids": self._prepared.prompt_ids(0)} if body.return_token_ids else {}
        async for some in pieces:
            if body.includes_usage:
                self._reasoning.add(some)
            make = partial(self._events_of, some, usage.of_chunk(body), prompt_ids)
            if told := await made(make, grows_with_prompt=bool(prompt_ids)):
                prompt_ids = {}  # only the stream's first chunk has them
                yield told
        if last := self._prepared.of_last_chunk():
            yield event(self._envelope.around([], **last))

    def _events_of(self, pieces: list[Piece], usage: dict[str, Any], of_first: dict[str, Any]) -> bytes:
        """Return the chunks for these pieces. The first chunk also has the fields `of_first`."""
        told: list[bytes] = []
        for choice in filter(None, map(self._chunk, pieces)):
            told.append(event(self._envelope.around([choice], **usage, **({} if told else of_first))))
        return b"".join(told)

    def _choice(self, piece: Piece) -> dict[str, Any]:
        said = self._said(piece)
        message: dict[str, Any] = {"role": "assistant", "content": said.pop("content", None), **said}
        if message["content"] is None and not said.get("tool_calls"):
            message["content"] = ""
        for call in message.get("tool_calls", ()):
            del call["index"]  # only chunks have an index
        return self._around("message", message, piece)

    def _chunk(self, piece: Piece) -> dict[str, Any] | None:
        delta = self._said(piece)
        if piece.is_first:
            delta = {"role": "assistant", "content": "", **delta}
        has_ids = self._body.return_token_ids and piece.token_ids
        if not (delta or piece.finish_reason or piece.log_probs or has_ids):
            return None  # the parsers hold the text back until its meaning is certain
        return self._around("delta", delta, piece)

    def _around(self, name: str, said: dict[str, Any], piece: Piece) -> dict[str, Any]:
        body, names, reason = self._body, self._prepared.names, piece.finish_reason
        if reason == "stop" and self._messages[piece.index].has_called:
            reason = "tool_calls"
        told = None
        if body.logprobs and names is not None:
            tops = piece.top_log_probs or ()
            told = chat_log_probs(names, body.top_logprobs or 0, piece.token_ids, piece.log_probs or (), tops)
        choice: dict[str, Any] = {"index": piece.index, name: said, "logprobs": told, "finish_reason": reason}
        if body.return_token_ids:
            choice["token_ids"] = piece.token_ids
        return choice

    def _said(self, piece: Piece) -> dict[str, Any]:
        """Return the non-empty fields that the piece adds to the message, by OpenAI's names."""
        message = self._messages.get(piece.index)
        if message is None:
            message = self._messages[piece.index] = AnswerParser(
                self._prompt, only_one=not self._body.parallel_tool_calls
            )
        reasoning, delta = message.add(piece)
        said: dict[str, Any] = {}
        if reasoning and self._body.include_reasoning:
            # vLLM's present name of the field, and its name before vLLM 0.10, which other servers still use.
            said["reasoning"] = said["reasoning_content"] = reasoning
        if delta.content:
            said["content"] = delta.content
        if delta.tool_calls:
            said["tool_calls"] = [_call(each) for each in delta.tool_calls]
        return said


def _call(delta: ToolCallDelta) -> dict[str, Any]:
    """Return OpenAI's object for a part of a tool call; the call's first part has its id and name."""
    function: dict[str, str] = {"arguments": delta.arguments}
    if not delta.id:
        return {"index": delta.index, "function": function}
    function = {"name": delta.name, **function}
    return {"index": delta.index, "id": delta.id, "type": "function", "function": function}

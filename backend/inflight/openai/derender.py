"""/v1/chat/completions/derender and /v1/completions/derender: the answer to a request whose tokens were generated
elsewhere.

The counterpart of `render.py`, as in vLLM: takes a request and the answers of /inference/v1/generate to it.
Nothing is generated, and no slot in the engine is needed. Runs on the event loop, except `_pieces`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from inflight.core.request.response import SequenceResult, TopLogProbs
from inflight.core.request.stop import FinishReason
from inflight.openai.answers import Piece
from inflight.openai.bodies import body_as
from inflight.openai.chat_completions import ChatWriter, prepare_chat
from inflight.openai.completions import CompletionWriter, prepare_completion
from inflight.openai.context import Envelope, chosen_context
from inflight.openai.errors import invalid
from inflight.openai.prepared_body import PreparedBody
from inflight.openai.protocol import MAX_INT32, Body, ChatBody, CompletionBody, TokenIds
from inflight.openai.render import refuse_what_ids_lack
from inflight.openai.serving_model import ServingModel
from inflight.openai.streaming import JsonAnswer
from inflight.pooling import Task
from inflight.serving.reply import NewText

router = APIRouter()
_ONE_BY_ONE = "whole answers are parsed here, not the chunks of streams: leave it out"


class _Given(BaseModel):
    """Base class of objects in answers of /inference/v1/generate, of any server; unknown fields have no effect."""

    model_config = ConfigDict(extra="ignore", strict=True)


class _LogProb(_Given):
    token_id: int = Field(ge=0, le=MAX_INT32)
    logprob: float


class _TokenLogProbs(_LogProb):
    top_logprobs: list[_LogProb] = []


class _LogProbs(_Given):
    content: list[_TokenLogProbs] | None = None


class GeneratedChoice(_Given):
    """One of the `choices` of an answer of /inference/v1/generate."""

    index: int = Field(ge=0, le=MAX_INT32)
    token_ids: TokenIds
    finish_reason: str | None = "stop"
    logprobs: _LogProbs | None = None


class GeneratedAnswer(_Given):
    """The JSON body of an answer of /inference/v1/generate with the `output_mode` tokens."""

    output_mode: Literal["tokens"] = "tokens"
    choices: list[GeneratedChoice] = Field(min_length=1)


class _DerenderBody(Body):
    not_served: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {
        "stream": ((False,), _ONE_BY_ONE),
        "stream_state": ((), _ONE_BY_ONE),
        "generate_chunk": ((), _ONE_BY_ONE),
    }
    model: str | None = None


class DerenderChatBody(_DerenderBody):
    """The JSON body of a request to /v1/chat/completions/derender.

    Attributes:
        chat_request: The body that was rendered.
        generate_response: The answer to the rendered body.
        prompt_tokens: Number of tokens of the prompt, for `usage`; None: that of the rendered chat.
        prompt_token_ids: Without effect, because the chat is rendered again.
    """

    chat_request: ChatBody
    generate_response: GeneratedAnswer
    prompt_tokens: int | None = Field(None, ge=0, le=MAX_INT32)
    prompt_token_ids: TokenIds | None = None


class DerenderCompletionBody(_DerenderBody):
    """The JSON body of a request to /v1/completions/derender.

    Attributes:
        completion_request: The body that was rendered.
        generate_responses: The answer to each rendered body, in the order of the prompts.
        prompt_tokens: Number of tokens of each prompt, for `usage`; None: those of the rendered prompts.
        prompt_token_ids: Without effect, because the prompts are rendered again.
    """

    completion_request: CompletionBody
    generate_responses: list[GeneratedAnswer] = Field(min_length=1)
    prompt_tokens: list[int] | None = None
    prompt_token_ids: list[TokenIds | None] | None = None


@router.post("/v1/chat/completions/derender")
async def derender_chat(
    body: Annotated[DerenderChatBody, body_as(DerenderChatBody)], request: Request
) -> Response:
    """Return the answer of /v1/chat/completions that has the given tokens."""
    context, adapter = await chosen_context(request, body.model or body.chat_request.model, Task.GENERATE)
    chat = body.chat_request
    refuse_what_ids_lack(chat)
    default = context.model.options.default_max_tokens
    prompt, prepared = await prepare_chat(context, request, chat, adapter, default)

    def answer() -> Response:
        counts = None if body.prompt_tokens is None else [body.prompt_tokens]
        pieces = _pieces(context.model, prepared, [body.generate_response], counts)
        envelope = Envelope.of("chatcmpl", "chat.completion", prepared, request)
        return JsonAnswer(ChatWriter(chat, prepared, prompt, envelope).whole(pieces))

    return await context.session.compute(answer)


@router.post("/v1/completions/derender")
async def derender_completion(
    body: Annotated[DerenderCompletionBody, body_as(DerenderCompletionBody)], request: Request
) -> Response:
    """Return the answer of /v1/completions that has the given tokens."""
    asked = body.completion_request
    context, adapter = await chosen_context(request, body.model or asked.model, Task.GENERATE)
    refuse_what_ids_lack(asked)
    prepared = await context.session.compute(partial(prepare_completion, context.model, asked, adapter))

    def answer() -> Response:
        pieces = _pieces(context.model, prepared, body.generate_responses, body.prompt_tokens)
        envelope = Envelope.of("cmpl", "text_completion", prepared, request)
        return JsonAnswer(CompletionWriter(asked, prepared, envelope).whole(pieces))

    return await context.session.compute(answer)


def _pieces(
    model: ServingModel,
    prepared: PreparedBody,
    answers: Sequence[GeneratedAnswer],
    prompt_tokens: Sequence[int] | None,
) -> list[Piece]:
    """Return each choice of the answers as one piece, and count the tokens in the usage."""
    num_prompts = len(prepared.prompts)
    for name, values in (("generate_responses", answers), ("prompt_tokens", prompt_tokens)):
        if values is not None and len(values) != num_prompts:
            raise invalid(name, f"{name} has {len(values)} items, and the request has {num_prompts} prompts")
    if prompt_tokens is not None:
        prepared.usage.prompt_tokens = sum(prompt_tokens)
    most = prepared.asked.body.n
    pieces: list[Piece] = []
    for place, answer in enumerate(answers):
        new_text = prepared.prompts[place][1]
        indices = [choice.index for choice in answer.choices]
        if len(set(indices)) < len(indices) or max(indices) >= most:
            raise invalid(
                "choices", f"choices have the indices {indices[:8]}, expected different ones below {most}"
            )
        for choice in sorted(answer.choices, key=lambda choice: choice.index):
            pieces.append(_piece(model, prepared, choice, place, new_text))
    prepared.usage.completion_tokens = sum(len(piece.token_ids) for piece in pieces)
    return pieces


def _piece(
    model: ServingModel, prepared: PreparedBody, choice: GeneratedChoice, place: int, new_text: NewText
) -> Piece:
    description, asked = model.describe(), prepared.asked
    ids = tuple(choice.token_ids)
    if len(ids) > description.limits.max_sequence_length:
        raise invalid(
            "token_ids",
            f"token_ids has {len(ids)} tokens; a sequence of this model has at most "
            f"{description.limits.max_sequence_length}",
        )
    if choice.finish_reason == "stop" and ids and ids[-1] in description.eos_token_ids:
        ids = ids[:-1]  # other servers return the end id, too
    result = SequenceResult((ids,), 0, (len(ids),), (FinishReason.END_ID,), is_sequence_final=True)
    (delta,) = new_text().add(result)
    kept = ids[: delta.num_kept_tokens]
    log_probs, tops = None, None
    if asked.num_top is not None:
        told = (choice.logprobs and choice.logprobs.content) or []
        if len(told) < len(kept):
            raise invalid(
                "logprobs", f"logprobs has {len(told)} items for {len(kept)} tokens, and they are asked for"
            )
        log_probs = tuple(each.logprob for each in told[: len(kept)])
        tops = tuple(_top(each) for each in told[: len(kept)])
    return Piece(
        place * asked.body.n + choice.index,
        place,
        delta.text,
        kept,
        "stop" if delta.stopped else choice.finish_reason,
        log_probs,
        tops,
        is_first=True,
        is_cut=delta.stopped or choice.finish_reason == "length",
        stop_string=delta.stop_string,
    )


def _top(told: _TokenLogProbs) -> TopLogProbs:
    """Return the likeliest tokens, the likeliest first."""
    best = sorted(told.top_logprobs, key=lambda each: -each.logprob)
    return TopLogProbs(tuple(each.token_id for each in best), tuple(each.logprob for each in best))

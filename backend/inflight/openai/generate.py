"""/inference/v1/generate: token ids in, token ids out, as in vLLM. Runs on the event loop, except `_prepare`.

A body is converted to that of a completion whose prompt is given as ids, and runs as one.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from inflight.core.request.response import TopLogProbs
from inflight.openai.answers import Piece
from inflight.openai.bodies import body_as
from inflight.openai.completions import prepare_completion
from inflight.openai.context import answer_stream, answer_whole, chosen_context
from inflight.openai.errors import ApiError, renamed_errors, unsupported, validation_error
from inflight.openai.log_probs import chat_log_probs, finite, prompt_log_probs_json
from inflight.openai.prepared_body import PreparedBody
from inflight.openai.protocol import (
    MAX_ID_LENGTH,
    MAX_INT32,
    Body,
    CompletionBody,
    SamplingFields,
    StreamOptions,
    TokenIds,
)
from inflight.openai.request_ids import request_id_of
from inflight.openai.serving_model import ServingModel
from inflight.openai.streaming import JsonAnswer, event, made
from inflight.pooling import Task

router = APIRouter()
_NO_PICTURES = (
    "prompts with pictures are not passed on as ids here: send the messages to /v1/chat/completions"
)
_ONE_ENGINE = "prefill and decode run in one engine here"
_OF_REASONING = "guides begin with the first generated token: send a prompt that has ended its reasoning"


class SamplingParams(SamplingFields):
    """vLLM's object with the sampling parameters of a request.

    Attributes:
        logprobs: How many of the likeliest tokens to return at each position, beside the generated one.
        detokenize: Whether the answer may have texts.
    """

    not_served: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {
        "include_stop_str_in_output": ((False,), "texts end before their stop string"),
        "spaces_between_special_tokens": ((True,), "special tokens are decoded with the text around them"),
        "flat_logprobs": ((False,), "log probs are lists"),
        "output_kind": ((0, 1, 2), "the field stream of the body decides how answers are sent"),
    }
    logprobs: int | None = Field(None, ge=0, le=MAX_INT32)
    detokenize: bool = True


class GenerateBody(Body):
    """The JSON body of a request to /inference/v1/generate: vLLM's GenerateRequest.

    Attributes:
        output_mode: Whether the answer has token ids alone, or also their text and log probs with texts.
        return_token_ids: Whether the answer has the ids of the prompt.
    """

    not_served: ClassVar[dict[str, tuple[tuple[Any, ...], str]]] = {
        "features": ((), _NO_PICTURES),
        "content_parts": (([],), _NO_PICTURES),
        "kv_transfer_params": ((), _ONE_ENGINE),
        "ec_transfer_params": ((), _ONE_ENGINE),
        "token_offsets": ((), "they have no effect on an answer; leave them out"),
        "reasoning_ended": ((True,), _OF_REASONING),
        "reasoning_parser_kwargs": ((), _OF_REASONING),
    }
    token_ids: TokenIds = Field(min_length=1)
    sampling_params: SamplingParams
    model: str | None = None
    request_id: str | None = Field(None, max_length=MAX_ID_LENGTH)
    stream: bool = False
    stream_options: StreamOptions | None = None
    output_mode: Literal["tokens", "text"] = "tokens"
    return_token_ids: bool = False
    cache_salt: str | None = Field(None, min_length=1)
    priority: int = 0
    user: str | None = None


@router.post("/inference/v1/generate")
async def generate(body: Annotated[GenerateBody, body_as(GenerateBody)], request: Request) -> Response:
    """Continue the prompt's ids `n` times."""
    context, adapter = await chosen_context(request, body.model, Task.GENERATE)
    with renamed_errors(_rename):
        prepared = await context.session.compute(partial(_prepare, context.model, body, adapter))
        writer = _GenerateWriter(
            body, prepared, f"generate-tokens-{body.request_id or request_id_of(request)}"
        )
        if body.stream:
            return await answer_stream(context, request, prepared, writer.events)
        pieces = await answer_whole(context, request, prepared)
    return await context.session.compute(lambda: JsonAnswer(writer.whole(pieces)))


def _prepare(model: ServingModel, body: GenerateBody, adapter: str) -> PreparedBody:
    if body.output_mode == "text" and not body.sampling_params.detokenize:
        raise unsupported("output_mode", 'output_mode is "text", and sampling_params.detokenize is false')
    sampling = body.sampling_params.model_dump(exclude={"detokenize"}, exclude_unset=True, by_alias=True)
    names = ("model", "request_id", "stream", "stream_options", "cache_salt", "priority", "user")
    options = body.model_dump(include=set(names), exclude_unset=True)
    names_ids = body.output_mode == "tokens"
    try:
        completion = CompletionBody.model_validate(
            {**options, **sampling, "prompt": body.token_ids, "return_tokens_as_token_ids": names_ids}
        )
    except pydantic.ValidationError as error:
        raise validation_error(error) from None
    return prepare_completion(model, completion, adapter, usual_max_tokens=None)


def _rename(error: ApiError) -> ApiError:
    """Convert an error that names fields of a completion to one that names fields of this body."""
    if error.param == "prompt":
        return ApiError(
            str(error).replace("prompt", "token_ids", 1), error.status, "token_ids", error.error_code
        )
    if error.param in SamplingParams.model_fields:
        message = str(error).replace(error.param, f"sampling_params.{error.param}", 1)
        return ApiError(message, error.status, "sampling_params", error.error_code)
    return error


class _GenerateWriter:
    """Writes one answer, whole or as a stream of chunks."""

    def __init__(self, body: GenerateBody, prepared: PreparedBody, request_id: str) -> None:
        self._body = body
        self._prepared = prepared
        self._first = {"request_id": request_id, "output_mode": body.output_mode}

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Return the body of an answer that is not streamed, vLLM's GenerateResponse."""
        prepared, num_top = self._prepared, self._body.sampling_params.prompt_logprobs
        prompt = None
        if num_top is not None and prepared.names is not None:
            first, ids = pieces[0], prepared.prompt_ids(0)
            of_prompt = first.prompt_log_probs or ()
            prompt = prompt_log_probs_json(
                prepared.names, ids, of_prompt, first.prompt_tops, num_top, first.prompt_ranks
            )
        return {
            **self._first,
            "model": prepared.model_name,
            "created": int(time.time()),
            "choices": [self._choice(piece) for piece in pieces],
            "usage": prepared.usage.as_json(),
            "prompt_logprobs": prompt,
            **self._prompt_ids(),
            "kv_transfer_params": None,
        }

    async def events(self, pieces: AsyncIterator[list[Piece]]) -> AsyncIterator[bytes]:
        """Yield the events of a stream of vLLM's GenerateStreamResponse."""
        prepared = self._prepared
        of_first = self._prompt_ids()
        async for some in pieces:
            usage = prepared.usage.of_chunk(prepared.asked.body)
            if told := await made(partial(self._events_of, some, usage, of_first), bool(of_first)):
                of_first = {}
                yield told
        if last := prepared.of_last_chunk():
            yield event({**self._first, "choices": [], **last})

    def _events_of(self, pieces: list[Piece], usage: dict[str, Any], of_first: dict[str, Any]) -> bytes:
        """Return the chunks for these pieces. The first chunk also has the fields `of_first`."""
        told: list[bytes] = []
        for piece in pieces:
            if piece.has_content(with_ids=True):
                more = {} if told else of_first
                told.append(event({**self._first, "choices": [self._choice(piece)], **usage, **more}))
        return b"".join(told)

    def _prompt_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": self._prepared.prompt_ids(0)} if self._body.return_token_ids else {}

    def _choice(self, piece: Piece) -> dict[str, Any]:
        text = {"text": piece.text} if self._body.output_mode == "text" else {}
        return {
            "index": piece.index,
            "token_ids": piece.token_ids,
            **text,
            "logprobs": self._log_probs(piece),
            "finish_reason": piece.finish_reason,
        }

    def _log_probs(self, piece: Piece) -> dict[str, Any] | None:
        names, num_top = self._prepared.names, self._body.sampling_params.logprobs
        if num_top is None or names is None:
            return None
        values, tops = piece.log_probs or (), piece.top_log_probs or ()
        if self._body.output_mode == "text":
            return chat_log_probs(names, num_top, piece.token_ids, values, tops)
        beside = tops or (TopLogProbs((), ()),) * len(values)
        rows = zip(piece.token_ids, values, beside, strict=True)
        return {"content": [_of_token(token_id, value, top, num_top) for token_id, value, top in rows]}


def _of_token(token_id: int, value: float, top: TopLogProbs, num_top: int) -> dict[str, Any]:
    """Return the log prob of a token, and those at its position: the token first, then the likeliest others."""
    others = zip(top.token_ids[:num_top], top.log_probs)
    entries = [_entry(token_id, value), *(_entry(*other) for other in others if other[0] != token_id)]
    return {**entries[0], "top_logprobs": entries}


def _entry(token_id: int, value: float) -> dict[str, Any]:
    # Recent versions of vLLM name a token by token_id, older ones by token.
    return {"token_id": token_id, "token": f"token_id:{token_id}", "logprob": finite(value)}

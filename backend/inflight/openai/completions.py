"""/v1/completions: continuations of prompts. Runs on the event loop, except `prepare_completion`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from inflight.openai.answers import Piece
from inflight.openai.bodies import body_as
from inflight.openai.context import Envelope, answer_stream, answer_whole, chosen_context
from inflight.openai.errors import invalid
from inflight.openai.guides import read_guide
from inflight.openai.log_probs import CompletionLogProbs, TokenNames, prompt_log_probs_json
from inflight.openai.prepared_body import PreparedBody, check_number_of_sequences, prepare_body
from inflight.openai.protocol import CompletionBody
from inflight.openai.sampling import BodySettings, choose_seed
from inflight.openai.serving_model import ServingModel
from inflight.openai.streaming import JsonAnswer, event, made
from inflight.pooling import Task

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default of max_tokens, used unless the server has --default-max-tokens."""

router = APIRouter()


@router.post("/v1/completions")
async def create_completion(
    body: Annotated[CompletionBody, body_as(CompletionBody)], request: Request
) -> Response:
    """Continue each prompt `n` times."""
    context, adapter = await chosen_context(request, body.model, Task.GENERATE)
    prepared = await context.session.compute(partial(prepare_completion, context.model, body, adapter))
    envelope = Envelope.of("cmpl", "text_completion", prepared, request)
    writer = CompletionWriter(body, prepared, envelope)
    if body.stream:
        return await answer_stream(context, request, prepared, writer.events)
    pieces = await answer_whole(context, request, prepared)
    return await context.session.compute(lambda: JsonAnswer(writer.whole(pieces)))


def prepare_completion(
    model: ServingModel, body: CompletionBody, adapter: str, usual_max_tokens: int | None = DEFAULT_MAX_TOKENS
) -> PreparedBody:
    """Return the prepared body of a completion. Errors name fields of the body. Runs on the tokenizing threads.

    Args:
        model: The served model.
        body: The body.
        adapter: Name of the LoRA adapter; "": the bare model.
        usual_max_tokens: Number of tokens to generate if neither the body nor the server sets one; None: as many
            as fit.
    """
    default = model.options.default_max_tokens
    max_tokens = usual_max_tokens if body.max_tokens is None and default is None else body.max_tokens
    asked = BodySettings(
        body,
        max_tokens,
        default,
        num_top=body.logprobs,
        num_prompt_top=_num_prompt_top(body),
        echo=body.echo,
        guide=read_guide(body),
        adapter=adapter,
        seed=choose_seed(body),
        skip_special_tokens=body.skip_special_tokens,
    )
    texts, ids = _read_prompts(model, body)
    return prepare_body(model, asked, texts, ids)


def _num_prompt_top(body: CompletionBody) -> int | None:
    """Return how many of the likeliest tokens to report at each prompt position; None: no prompt log probs."""
    wanted = [body.prompt_logprobs, body.logprobs if body.echo else None]
    return max((number for number in wanted if number is not None), default=None)


def _read_prompts(
    model: ServingModel, body: CompletionBody
) -> tuple[Sequence[str | None], Sequence[Sequence[int]]]:
    """Return (texts, token ids) of the prompts; the text of a prompt given as ids is None."""
    prompt = body.prompt
    if not prompt:
        raise invalid("prompt", "prompt is empty: send a text, token ids, or a list of either")
    is_batch = isinstance(prompt, list) and not isinstance(prompt[0], int)
    check_number_of_sequences(model, len(prompt) if is_batch else 1, body.n)  # before tokenization
    if isinstance(prompt, str):
        return [prompt], model.encode([prompt], body.add_special_tokens)
    if isinstance(prompt[0], str):
        texts = [text for text in prompt if isinstance(text, str)]
        return texts, model.encode(texts, body.add_special_tokens)
    if isinstance(prompt[0], int):
        return [None], [[token_id for token_id in prompt if isinstance(token_id, int)]]
    rows = [row for row in prompt if isinstance(row, list)]
    return [None] * len(rows), rows


class CompletionWriter:
    """Writes one completion answer, whole or as a stream of chunks."""

    def __init__(self, body: CompletionBody, prepared: PreparedBody, envelope: Envelope) -> None:
        self._body = body
        self._prepared = prepared
        self._envelope = envelope
        self._log_probs: dict[int, CompletionLogProbs] = {}

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Return the `text_completion` object of an answer that is not streamed."""
        choices = [self.choice(piece) for piece in pieces]
        prepared = self._prepared
        receipt = prepared.receipt.of_answer(self._body)
        return self._envelope.around(choices, usage=prepared.usage.as_json(), **receipt)

    def choice(self, piece: Piece) -> dict[str, Any]:
        """Return a choice with the contents of `piece`: a whole choice, or a part of one."""
        body = self._body
        choice: dict[str, Any] = {
            "index": piece.index,
            "text": piece.text,
            "logprobs": None,
            "finish_reason": piece.finish_reason,
        }
        names = self._prepared.names
        if names is not None:
            if body.logprobs is not None:
                choice["logprobs"] = self._log_probs_json(piece, names, body.logprobs)
            if body.prompt_logprobs is not None and piece.prompt_log_probs is not None:
                ids = self._prepared.prompt_ids(piece.batch_index)
                choice["prompt_logprobs"] = prompt_log_probs_json(
                    names,
                    ids,
                    piece.prompt_log_probs,
                    piece.prompt_tops,
                    body.prompt_logprobs,
                    piece.prompt_ranks,
                )
        if body.return_token_ids:
            choice["token_ids"] = piece.token_ids
            if piece.is_first:
                choice["prompt_token_ids"] = self._prepared.prompt_ids(piece.batch_index)
        return choice

    async def events(self, pieces: AsyncIterator[list[Piece]]) -> AsyncIterator[bytes]:
        """Yield the events of a stream."""
        body, prepared, around = self._body, self._prepared, self._envelope.around
        tells_prompt = body.return_token_ids or body.echo
        async for some in pieces:
            make = partial(self._events_of, some, prepared.usage.of_chunk(body))
            yield await made(make, tells_prompt and any(piece.is_first for piece in some))
        if last := prepared.of_last_chunk():
            yield event(around([], **last))

    def _events_of(self, pieces: list[Piece], usage: dict[str, Any]) -> bytes:
        return b"".join(
            [
                event(self._envelope.around([self.choice(piece)], **usage))
                for piece in pieces
                if piece.has_content(self._body.return_token_ids)
            ]
        )

    def _log_probs_json(self, piece: Piece, names: TokenNames, num_top: int) -> dict[str, Any]:
        of_choice = self._log_probs.setdefault(piece.index, CompletionLogProbs(names, num_top))
        ids: list[int] = list(piece.token_ids)
        values: list[float | None] = list(piece.log_probs or ())
        tops: list[Any] = list(piece.top_log_probs or ())
        if self._body.echo and piece.prompt_log_probs is not None:
            prompt = self._prepared.prompt_ids(piece.batch_index)
            text = self._prepared.prompts[piece.batch_index][0].options.prompt_text or ""
            of_choice.start_with(text, prompt, self._prepared.hidden_ids)
            ids = [*prompt, *ids]
            values = [None, *piece.prompt_log_probs[1:], *values]
            if num_top:
                tops = [None, *piece.prompt_tops, *tops]
        return of_choice.add(ids, values, tops, self._prepared.hidden_ids)

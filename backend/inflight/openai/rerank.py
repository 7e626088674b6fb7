"""/v1/rerank and /v1/score: how well texts answer a query.

A score is the probability of "yes" among "yes" and "no" after the prompt of Qwen3-Reranker or, of a
checkpoint for sequence classification with one class, that class's probability for both texts together. Runs
on the event loop, except the functions that prepare prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import exp
from typing import Annotated

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from inflight.core.request.request import OutputOptions
from inflight.core.request.response import SequenceResult
from inflight.errors import ConfigError
from inflight.openai.bodies import body_as
from inflight.openai.context import chosen_context, context_of
from inflight.openai.errors import ApiError, invalid, unsupported
from inflight.openai.last_positions import (
    POOLED,
    PreparedPrompts,
    compute,
    encode,
    encode_cut,
    pooled_state,
    prepare,
    truncation,
)
from inflight.openai.prepared_body import check_number_of_sequences
from inflight.openai.protocol import PoolingBody, RerankBody, ScoreBody
from inflight.openai.serving_model import ServingModel
from inflight.openai.streaming import JsonAnswer
from inflight.pooling import Task
from inflight.text.score_tokens import find_score_tokens

router = APIRouter()
_OUTPUT = OutputOptions(return_generation_logits=True)
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Pairs of texts to score.

    Attributes:
        body: The body.
        field: The body's field that has the second texts, for errors.
        texts: Query and document of each pair.
        instruction: The task that the prompts state.
    """

    body: PoolingBody
    field: str
    texts: Sequence[tuple[str, str]]
    instruction: str | None


@router.post("/v1/rerank")
@router.post("/v2/rerank")
@router.post("/rerank")
async def rerank(body: Annotated[RerankBody, body_as(RerankBody)], request: Request) -> Response:
    """Return the documents with their scores, best first."""
    documents = [each if isinstance(each, str) else each.text for each in body.documents]
    pairs = _Pairs(body, "documents", [(body.query, each) for each in documents], body.instruction)
    prepared, scores = await _scores(request, pairs)
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or None]
    results = [
        {
            "index": index,
            "relevance_score": scores[index],
            **({"document": {"text": documents[index]}} if body.return_documents else {}),
        }
        for index in order
    ]
    answer = {"results": results, **prepared.envelope("rerank", request)}
    return await context_of(request).session.compute(lambda: JsonAnswer(answer))


@router.post("/v1/score")
@router.post("/score")
async def score(body: Annotated[ScoreBody, body_as(ScoreBody)], request: Request) -> Response:
    """Return the score of each pair of texts."""
    prepared, scores = await _scores(request, _Pairs(body, "text_2", _paired(body), body.instruction))
    data = [{"object": "score", "index": index, "score": each} for index, each in enumerate(scores)]
    return JsonAnswer({"object": "list", "data": data, **prepared.envelope("score", request)})


def _paired(body: ScoreBody) -> list[tuple[str, str]]:
    first, second = ([each] if isinstance(each, str) else each for each in (body.text_1, body.text_2))
    if len(first) == 1:
        first = first * len(second)
    if not second or len(first) != len(second):
        raise invalid(
            "text_2",
            f"text_1 has {len(first)} texts and text_2 {len(second)}: expected one text in text_1, or as many "
            "as in text_2",
        )
    return list(zip(first, second, strict=True))


async def _scores(request: Request, pairs: _Pairs) -> tuple[PreparedPrompts, list[float]]:
    context, adapter = await chosen_context(request, pairs.body.model, Task.RERANK, Task.CLASSIFY)
    prepared, take = await context.session.compute(partial(_prepare, context.model, pairs, adapter))
    return prepared, await compute(context, request, prepared, take)


def _prepare(
    model: ServingModel, pairs: _Pairs, adapter: str
) -> tuple[PreparedPrompts, Callable[[SequenceResult], float]]:
    """Return the prompts, and the function that returns the score of a prompt's result."""
    check_number_of_sequences(model, len(pairs.texts), 1, pairs.field)
    if model.task() is Task.CLASSIFY:
        return _prepare_classified(model, pairs, adapter)
    return _prepare_judged(model, pairs, adapter)


def _prepare_classified(
    model: ServingModel, pairs: _Pairs, adapter: str
) -> tuple[PreparedPrompts, Callable[[SequenceResult], float]]:
    """Prepare pairs for the score of the classification head: a query and its document follow each other."""
    head = model.classification_head()
    if len(head.labels) != 1:
        raise ApiError(
            f"this model has {len(head.labels)} classes, and a score needs a model with one: send texts to "
            "/v1/classify",
            400,
            "model",
            "unsupported_model",
        )
    if pairs.instruction is not None:
        raise unsupported(
            "instruction", "instruction: this model has no prompt for it; put it into the texts"
        )
    most = truncation(pairs.body, model.describe().limits)
    texts = [query + document for query, document in pairs.texts]
    ids = encode_cut(model, texts, True, pairs.field, most)
    prepared = prepare(model, pairs.body, pairs.field, ids, POOLED, adapter)
    return prepared, lambda result: float(head.apply(pooled_state(result))[0])


def _prepare_judged(
    model: ServingModel, pairs: _Pairs, adapter: str
) -> tuple[PreparedPrompts, Callable[[SequenceResult], float]]:
    """Prepare pairs for the score of the tokens "yes" and "no"."""
    tokenizer = model.tokenizer()
    try:
        yes, no = find_score_tokens(tokenizer)
    except ConfigError as error:  # /v1 was started without the checks of `inflight serve`
        raise ApiError(str(error), 400, "model") from None
    before, after = tokenizer.encode_batch([_BEFORE, _AFTER], add_special_tokens=False)
    most = truncation(pairs.body, model.describe().limits)
    room = None if most is None else most - len(before) - len(after)
    if room is not None and room < 1:
        raise invalid(
            "truncate_prompt_tokens",
            f"truncate_prompt_tokens leaves {most} tokens, but without query and document the prompt already has "
            f"{len(before) + len(after)}",
        )
    instruction = pairs.instruction or _INSTRUCTION
    texts = [
        f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
        for query, document in pairs.texts
    ]
    ids = [[*before, *each[:room], *after] for each in encode(model, texts, True, pairs.field, most)]
    prepared = prepare(model, pairs.body, pairs.field, ids, _OUTPUT, adapter)
    return prepared, partial(_probability, yes, no)


def _probability(yes: int, no: int, result: SequenceResult) -> float:
    """Return the probability of token `yes` if the model could choose only between `yes` and `no`."""
    assert result.generation_logits is not None, "requested"
    logits = np.frombuffer(result.generation_logits[0].data, np.float32)
    return 1.0 / (1.0 + exp(min(float(logits[no]) - float(logits[yes]), 700.0)))

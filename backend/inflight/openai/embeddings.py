"""/v1/embeddings: the last hidden state of each text's last token. Runs on the event loop, except `_prepare`."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from inflight.core.request.response import SequenceResult
from inflight.openai.bodies import body_as
from inflight.openai.context import chosen_context
from inflight.openai.errors import invalid
from inflight.openai.last_positions import (
    POOLED,
    PreparedPrompts,
    compute,
    pooled_state,
    prepare,
    read_input,
    truncation,
)
from inflight.openai.protocol import EmbeddingBody
from inflight.openai.serving_model import ServingModel
from inflight.openai.streaming import JsonAnswer
from inflight.pooling import POOLED_OUTPUT, Task

router = APIRouter()


@router.post("/v1/embeddings")
async def create_embeddings(
    body: Annotated[EmbeddingBody, body_as(EmbeddingBody)], request: Request
) -> Response:
    """Return the embedding of each text."""
    context, adapter = await chosen_context(request, body.model, Task.EMBED)
    prepared = await context.session.compute(partial(_prepare, context.model, body, adapter))
    take = partial(_embedding, body.dimensions, context.model.pooling().normalizes)
    found = await compute(context, request, prepared, take)
    return await context.session.compute(lambda: JsonAnswer(_answer(body, prepared, found, request)))


def _prepare(model: ServingModel, body: EmbeddingBody, adapter: str) -> PreparedPrompts:
    description = model.describe()
    width = next(
        (each.width for each in description.limits.additional_outputs if each.name == POOLED_OUTPUT), None
    )
    if body.dimensions is not None and width is not None and body.dimensions > width:
        raise invalid(
            "dimensions", f"dimensions is {body.dimensions}, and this model's embeddings have {width} values"
        )
    ids = read_input(model, body.input, body.add_special_tokens, truncation(body, description.limits))
    return prepare(model, body, "input", ids, POOLED, adapter)


def _embedding(dimensions: int | None, normalizes: bool, result: SequenceResult) -> np.ndarray[Any, Any]:
    """Return the embedding [dimensions] float32 of a prompt, of length 1 if `normalizes`."""
    values = pooled_state(result)[:dimensions]
    if not normalizes:
        return values
    length = float(np.linalg.norm(values.astype(np.float64)))
    return (values / (length or 1.0)).astype(np.float32)


def _answer(
    body: EmbeddingBody, prepared: PreparedPrompts, found: Sequence[np.ndarray[Any, Any]], request: Request
) -> dict[str, Any]:
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": values.tolist()
            if body.encoding_format == "float"
            else b64encode(values.astype("<f4").tobytes()).decode(),
        }
        for index, values in enumerate(found)
    ]
    return {"object": "list", "data": data, **prepared.envelope("embd", request)}

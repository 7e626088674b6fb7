"""/v1/embeddings: the last hidden state of each text's last token. Runs on the event loop, except `_prepare`."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from inflight.additional_outputs import WantedOutput
from inflight.core.request.request import OutputOptions
from inflight.core.request.response import SequenceResult
from inflight.openai.bodies import body_as
from inflight.openai.context import context_of
from inflight.openai.errors import invalid
from inflight.openai.last_positions import PreparedPrompts, compute, encode, prepare, truncation
from inflight.openai.prepared_body import check_number_of_sequences
from inflight.openai.protocol import EmbeddingBody
from inflight.openai.serving_model import ServingModel
from inflight.openai.streaming import JsonAnswer
from inflight.pooling import EMBEDDING_OUTPUT, Task
from inflight.text.tokenizer import Tokenizer

router = APIRouter()
_OUTPUT = OutputOptions(additional_outputs=(WantedOutput(EMBEDDING_OUTPUT),))


@router.post("/v1/embeddings")
async def create_embeddings(
    body: Annotated[EmbeddingBody, body_as(EmbeddingBody)], request: Request
) -> Response:
    """Return the embedding of each text."""
    context = context_of(request)
    adapter = await context.adapter_of(body.model, Task.EMBED)
    prepared = await context.session.compute(partial(_prepare, context.model, body, adapter))
    take = partial(_embedding, body.dimensions, context.model.pooling().normalizes)
    found = await compute(context, request, prepared, take)
    return await context.session.compute(lambda: JsonAnswer(_answer(body, prepared, found, request)))


def _prepare(model: ServingModel, body: EmbeddingBody, adapter: str) -> PreparedPrompts:
    description = model.describe()
    width = next(
        (each.width for each in description.limits.additional_outputs if each.name == EMBEDDING_OUTPUT), None
    )
    if body.dimensions is not None and width is not None and body.dimensions > width:
        raise invalid(
            "dimensions", f"dimensions is {body.dimensions}, and this model's embeddings have {width} values"
        )
    most = truncation(body, description.limits)
    return prepare(model, body, "input", _read_input(model, body, most), _OUTPUT, adapter)


def _read_input(model: ServingModel, body: EmbeddingBody, most: int | None) -> Sequence[Sequence[int]]:
    """Return the token ids of each prompt, cut to `most` tokens if that is not None."""
    given = body.input
    if not given:
        raise invalid("input", "input is empty: send a text, token ids, or a list of either")
    if isinstance(given, str):
        given = [given]
    check_number_of_sequences(model, 1 if isinstance(given[0], int) else len(given), 1, "input")
    if isinstance(given[0], str):
        texts = [text for text in given if isinstance(text, str)]
        ids = encode(model, texts, body.add_special_tokens, "input", most)
        tail = _num_appended(model.tokenizer()) if body.add_special_tokens else 0
        return [_cut(each, most, tail) for each in ids]
    ids = [each for each in given if isinstance(each, int)]
    rows = [ids] if ids else [row for row in given if isinstance(row, list)]
    return [_cut(row, most, 0) for row in rows]


def _cut(ids: list[int], most: int | None, tail: int) -> list[int]:
    """Return the first tokens of a prompt, and its last `tail` ones, which the tokenizer has appended."""
    if most is None or len(ids) <= most:
        return ids
    tail = min(tail, most)
    return ids[: most - tail] + ids[len(ids) - tail :]


def _num_appended(tokenizer: Tokenizer) -> int:
    """Return how many special tokens the tokenizer appends to a text."""
    bare, whole = (tokenizer.encode("a", added) for added in (False, True))
    return len(whole) - len(bare) - len(tokenizer.prefix_ids)


def _embedding(dimensions: int | None, normalizes: bool, result: SequenceResult) -> np.ndarray[Any, Any]:
    """Return the embedding [dimensions] float32 of a prompt, of length 1 if `normalizes`."""
    values = np.frombuffer(result.additional_outputs[0].tensors[0].data, np.float32)[:dimensions]
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

"""/v1/classify: the class of each text, with the probabilities of all classes.

Runs on the event loop, except `_prepare`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Request
from numpy.typing import NDArray
from starlette.responses import Response

from inflight.classification import ClassificationHead
from inflight.core.request.response import SequenceResult
from inflight.openai.bodies import body_as
from inflight.openai.chat_prompts import render_messages
from inflight.openai.context import chosen_context
from inflight.openai.errors import invalid
from inflight.openai.last_positions import (
    POOLED,
    PreparedPrompts,
    compute,
    encode_cut,
    pooled_state,
    prepare,
    read_input,
    truncation,
)
from inflight.openai.protocol import ClassifyBody
from inflight.openai.serving_model import ServingModel
from inflight.openai.streaming import JsonAnswer
from inflight.pooling import Task

router = APIRouter()


@router.post("/v1/classify")
@router.post("/classify")
async def classify(body: Annotated[ClassifyBody, body_as(ClassifyBody)], request: Request) -> Response:
    """Return the class of each text, with the probabilities of all classes."""
    context, adapter = await chosen_context(request, body.model, Task.CLASSIFY)
    prepared, head = await context.session.compute(partial(_prepare, context.model, body, adapter))

    def take(result: SequenceResult) -> NDArray[Any]:
        return head.apply(pooled_state(result), body.use_activation)

    found = await compute(context, request, prepared, take)
    answer = {
        "object": "list",
        "data": [_class(index, numbers, head.labels) for index, numbers in enumerate(found)],
        **prepared.envelope("classify", request),
    }
    return await context.session.compute(lambda: JsonAnswer(answer))


def _prepare(
    model: ServingModel, body: ClassifyBody, adapter: str
) -> tuple[PreparedPrompts, ClassificationHead]:
    if (body.input is None) == (body.messages is None):
        raise invalid("input", "send either input, texts or their token ids, or messages, a chat")
    head = model.classification_head()
    most = truncation(body, model.describe().limits)
    if body.input is not None:
        special = body.add_special_tokens is not False
        ids = read_input(model, body.input, special, most)
        return prepare(model, body, "input", ids, POOLED, adapter), head
    text = render_messages(model.chat_template(), body, takes_pictures=False)
    ids = encode_cut(model, [text], bool(body.add_special_tokens), "messages", most)
    return prepare(model, body, "messages", ids, POOLED, adapter), head


def _class(index: int, numbers: NDArray[Any], labels: Sequence[str]) -> dict[str, Any]:
    return {
        "index": index,
        "label": labels[int(numbers.argmax())],
        "probs": numbers.tolist(),
        "num_classes": len(labels),
    }

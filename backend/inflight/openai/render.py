"""/v1/chat/completions/render and /v1/completions/render: the token ids and sampling parameters of a request.

The answers are bodies for /inference/v1/generate, as in vLLM. Nothing is generated, and no slot in the engine
is needed. Runs on the event loop.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from inflight.core.request.guide import GuideKind
from inflight.openai.bodies import body_as
from inflight.openai.chat_completions import prepare_chat
from inflight.openai.completions import prepare_completion
from inflight.openai.context import chosen_context
from inflight.openai.errors import unsupported
from inflight.openai.prepared_body import PreparedBody
from inflight.openai.protocol import ChatBody, CompletionBody, SamplingBody, SamplingFields
from inflight.openai.request_ids import random_id
from inflight.openai.streaming import JsonAnswer
from inflight.pooling import Task
from inflight.serving.chat.messages import picture_urls

router = APIRouter()
_FIELD_OF_GUIDE = {
    GuideKind.JSON_SCHEMA: "json",
    GuideKind.REGEX: "regex",
    GuideKind.EBNF_GRAMMAR: "grammar",
    GuideKind.STRUCTURAL_TAG: "structural_tag",
}


@router.post("/v1/chat/completions/render")
async def render_chat(body: Annotated[ChatBody, body_as(ChatBody)], request: Request) -> Response:
    """Return the body for /inference/v1/generate that has the same answers as the chat."""
    context, adapter = await chosen_context(request, body.model, Task.GENERATE)
    refuse_what_ids_lack(body)
    _, prepared = await prepare_chat(
        context, request, body, adapter, context.model.options.default_max_tokens
    )
    return await context.session.compute(lambda: JsonAnswer(_rendered(prepared, 0, "chatcmpl")))


@router.post("/v1/completions/render")
async def render_completion(
    body: Annotated[CompletionBody, body_as(CompletionBody)], request: Request
) -> Response:
    """Return for each prompt the body for /inference/v1/generate that has the same answers."""
    context, adapter = await chosen_context(request, body.model, Task.GENERATE)
    refuse_what_ids_lack(body)
    prepared = await context.session.compute(partial(prepare_completion, context.model, body, adapter))
    places = range(len(prepared.prompts))
    return await context.session.compute(
        lambda: JsonAnswer([_rendered(prepared, place, "cmpl") for place in places])
    )


def refuse_what_ids_lack(body: SamplingBody) -> None:
    """Raise ApiError if token ids and sampling parameters cannot express a chat or completion."""
    if isinstance(body, ChatBody) and picture_urls(body.messages):
        raise unsupported(
            "messages",
            "messages have pictures, which token ids alone cannot express: send them to /v1/chat/completions",
        )
    if body.use_beam_search:
        raise unsupported(
            "use_beam_search",
            "use_beam_search: /inference/v1/generate has no beams, so they are not rendered",
        )


def _rendered(prepared: PreparedBody, place: int, prefix: str) -> dict[str, Any]:
    """Return the body for one prompt; `prefix` begins its `request_id`."""
    body = prepared.asked.body
    request = prepared.prompts[place][0].request
    user = body.safety_identifier or body.user
    return {
        "request_id": f"{prefix}-{random_id()}",
        "token_ids": request.input_token_ids,
        "features": None,
        "sampling_params": _sampling_params(prepared, request.max_new_tokens),
        "model": prepared.model_name,
        "stream": body.stream,
        "stream_options": body.stream_options.model_dump() if body.stream_options else None,
        "cache_salt": body.cache_salt,
        "priority": body.priority,
        "kv_transfer_params": None,
        **({"user": user} if user else {}),
    }


def _sampling_params(prepared: PreparedBody, max_new_tokens: int) -> dict[str, Any]:
    """Return vLLM's sampling parameters of the requests: those that differ from their defaults."""
    asked = prepared.asked
    shown = asked.body.model_dump(
        include=set(SamplingFields.model_fields) - {"max_tokens", "structured_outputs"}, exclude_defaults=True
    )
    made = {"logprobs": asked.num_top, "prompt_logprobs": asked.num_prompt_top}
    shown |= {name: number for name, number in made.items() if number is not None}
    if not asked.skip_special_tokens:
        shown["skip_special_tokens"] = False
    if asked.guide is not None:
        shown["structured_outputs"] = {_FIELD_OF_GUIDE[asked.guide.type]: asked.guide.text}
    return {"max_tokens": max_new_tokens, **shown}

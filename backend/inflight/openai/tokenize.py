"""/tokenize, /detokenize and /tokenizer_info, compatible with vLLM. These routes need no slot in the engine."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from inflight.openai.bodies import body_as
from inflight.openai.chat_prompts import render_messages
from inflight.openai.context import chosen_context
from inflight.openai.errors import invalid, unsupported
from inflight.openai.protocol import DetokenizeBody, TokenizeBody
from inflight.openai.serving_model import ServingModel
from inflight.openai.streaming import JsonAnswer
from inflight.serving.chat.messages import picture_urls

router = APIRouter()


@router.post("/tokenize")
async def tokenize(body: Annotated[TokenizeBody, body_as(TokenizeBody)], request: Request) -> Response:
    """Return the token ids of a prompt, or of a chat's messages."""
    context, _ = await chosen_context(request, body.model)
    return await context.session.compute(lambda: JsonAnswer(_tokenize(context.model, body)))


@router.post("/detokenize")
async def detokenize(body: Annotated[DetokenizeBody, body_as(DetokenizeBody)], request: Request) -> Response:
    """Return the text of token ids, special tokens included."""
    context, _ = await chosen_context(request, body.model)

    return await context.session.compute(lambda: JsonAnswer(_detokenize(context.model, body)))


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> Response:
    """Return the texts of special tokens and the chat template, for clients that render chats themselves."""
    context, _ = await chosen_context(request, None)
    return await context.session.compute(lambda: JsonAnswer(context.model.tokenizer_info()))


def _detokenize(model: ServingModel, body: DetokenizeBody) -> dict[str, Any]:
    most = model.describe().limits.max_sequence_length
    if len(body.tokens) > most:
        raise invalid("tokens", f"tokens are {len(body.tokens)}: this model's texts have at most {most}")
    vocab_size = model.describe().limits.vocab_size
    for position, token in enumerate(body.tokens):
        if token >= vocab_size:
            raise invalid(
                "tokens", f"tokens must be in [0, {vocab_size - 1}], got {token} at position {position}"
            )
    return {"prompt": model.tokenizer().decode(body.tokens, skip_special_tokens=False)}


def _chat_text(model: ServingModel, body: TokenizeBody) -> str:
    text = render_messages(model.chat_template(), body, model.takes_pictures())
    if model.takes_pictures() and picture_urls(body.messages or ()):
        raise unsupported(
            "messages",
            "messages have pictures: /tokenize takes texts alone; the usage of an answer counts pictures too",
        )
    return text


def _tokenize(model: ServingModel, body: TokenizeBody) -> dict[str, Any]:
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "send either prompt, a text, or messages, a chat")
    is_chat = body.messages is not None
    text = _chat_text(model, body) if is_chat else body.prompt or ""
    special = not is_chat if body.add_special_tokens is None else body.add_special_tokens
    tokenizer = model.tokenizer()
    (ids,) = model.encode([text], special, "messages" if is_chat else "prompt")
    answer: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": model.describe().limits.max_sequence_length,
        "tokens": ids,
    }
    if body.return_token_strs:
        answer["token_strs"] = tokenizer.tokens(ids, skip_special_tokens=False)
    return answer

"""/v1/messages and /v1/messages/count_tokens. Runs on the event loop, except `_count_text`."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Request
from starlette.responses import Response

from inflight.openai.bodies import body_as
from inflight.openai.chat_completions import prepare_chat
from inflight.openai.chat_prompts import ChatPrompt, read_chat
from inflight.openai.context import answer_stream, answer_whole, chosen_context
from inflight.openai.errors import renamed_errors
from inflight.openai.messages.answers import MessageStream, MessageWriter
from inflight.openai.messages.conversion import convert
from inflight.openai.messages.protocol import CountTokensBody, MessagesBody
from inflight.openai.protocol import ChatBody
from inflight.openai.request_ids import request_id_of
from inflight.openai.serving_model import ServingModel
from inflight.openai.streaming import JsonAnswer, while_connected
from inflight.pooling import Task

router = APIRouter()


@router.post("/v1/messages")
async def create_message(body: Annotated[MessagesBody, body_as(MessagesBody)], request: Request) -> Response:
    """Generate an answer to the messages."""
    context, adapter = await chosen_context(request, body.model, Task.GENERATE)
    chat = await context.session.compute(partial(convert, context.model, body))
    with renamed_errors(chat.rename):
        # As a default, the length is reduced to what fits, as by Anthropic's models.
        prompt, prepared = await prepare_chat(context, request, chat.body, adapter, body.max_tokens)
        message_id = f"msg_{request_id_of(request)}"
        writer = MessageWriter(chat.body, prepared, prompt, message_id, body.max_tokens)
        if body.stream:
            return await answer_stream(context, request, prepared, writer.events, MessageStream)
        (piece,) = await answer_whole(context, request, prepared)
        return await context.session.compute(lambda: JsonAnswer(writer.whole(piece)))


@router.post("/v1/messages/count_tokens")
async def count_tokens(
    body: Annotated[CountTokensBody, body_as(CountTokensBody)], request: Request
) -> Response:
    """Count the tokens of the messages. Needs no slot in the engine."""
    context, _ = await chosen_context(request, body.model)
    chat = await context.session.compute(partial(convert, context.model, body))
    with renamed_errors(chat.rename):
        prompt, count = await context.session.compute(partial(_count_text, context.model, chat.body))
        if prompt.pictures:
            assert context.pictures is not None, "the model takes pictures"
            vocab_size = context.model.describe().limits.vocab_size
            encoding = context.pictures.encode(prompt.text, prompt.pictures, vocab_size)
            count = len((await while_connected(request, encoding)).token_ids)
    return JsonAnswer({"input_tokens": count})


def _count_text(model: ServingModel, body: ChatBody) -> tuple[ChatPrompt, int]:
    """Return the prompt, and the number of its tokens without those of pictures."""
    prompt = read_chat(model, body)
    (ids,) = model.encode([prompt.text], body.add_special_tokens, "messages")
    return prompt, len(ids)

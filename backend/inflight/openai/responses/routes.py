"""/v1/responses: create, read, cancel and delete responses. Runs on the event loop."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Annotated

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Message

from inflight.errors import Cancelled, TooLong
from inflight.openai.answers import Piece
from inflight.openai.bodies import body_as
from inflight.openai.chat_completions import prepare_chat
from inflight.openai.chat_prompts import ChatPrompt
from inflight.openai.context import Context, answer_stream, answer_whole, chosen_context
from inflight.openai.errors import CONTEXT_LENGTH_EXCEEDED, ApiError, invalid, renamed_errors, unsupported
from inflight.openai.listing import is_ascending, page_of
from inflight.openai.prepared_body import PreparedBody
from inflight.openai.request_ids import passage_of
from inflight.openai.responses.body import (
    ChatOfResponse,
    ResponseBody,
    echoed,
    later_turns,
    shortened,
    to_chat,
)
from inflight.openai.responses.items import named_items
from inflight.openai.responses.store import KeptResponse, KeptResponses
from inflight.openai.responses.writer import ResponseWriter
from inflight.openai.streaming import EventStream, JsonAnswer
from inflight.pooling import Task

router = APIRouter()
_MAX_LISTED = 100
_DEFAULT_LISTED = 20
_JSON = msgspec.json.Encoder()


@router.post("/v1/responses")
async def create_response(body: Annotated[ResponseBody, body_as(ResponseBody)], request: Request) -> Response:
    """Generate a response to the input."""
    kept, owner = _kept(request), _owner(request)
    context, adapter = await chosen_context(request, body.model, Task.GENERATE)
    before = _conversation(kept, owner, body.previous_response_id)
    chat, own = await context.session.compute(partial(_read, body, before))
    running = _CancellableRequest(request)
    with renamed_errors(chat.rename):
        chat, prompt, prepared = await _prepare(context, running.request, body, chat, adapter)
        response_id = f"resp_{secrets.token_hex(24)}"
        writer = ResponseWriter(response_id, chat.body, prompt, prepared, echoed(body))
        keeper = _ResponseKeeper(kept, owner, writer, running)
        if body.store:
            keeper.begin([*before, *own])
        try:
            if body.stream:
                events_of = partial(_events, writer, keeper)
                return await answer_stream(context, running.request, prepared, events_of, _ResponseEvents)
            return await _whole(context, writer, prepared, keeper, running)
        except BaseException:  # no answer has begun, so there is nothing to keep
            kept.delete(owner, response_id)
            raise


@router.get("/v1/responses/{response_id}")
async def get_response(response_id: str, request: Request) -> Response:
    """Return a response, which may be in progress."""
    if request.query_params.get("stream", "false") != "false":
        raise unsupported(
            "stream", "stream: the events of a response are sent once, to the client that made it"
        )
    return Response(_find(request, response_id).response, media_type="application/json")


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(response_id: str, request: Request) -> Response:
    """Return the items of the conversation that the response answers, the last first, in pages."""
    items = list(_find(request, response_id).items)
    if not is_ascending(request.query_params):
        items.reverse()
    named = [(msgspec.json.decode(item)["id"], msgspec.Raw(item)) for item in items]
    return JsonAnswer(page_of(named, request.query_params, _DEFAULT_LISTED, _MAX_LISTED))


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(response_id: str, request: Request) -> Response:
    """End a response in progress; its own request is answered with what has been generated."""
    found = _find(request, response_id)
    if found.cancel is not None:
        found.cancel()
        found = _find(request, response_id)
    status = msgspec.json.decode(found.response)["status"]
    if status != "cancelled":
        raise ApiError(f"response {response_id!r} has status {status}: its answer has been generated", 400)
    return Response(found.response, media_type="application/json")


@router.delete("/v1/responses/{response_id}")
async def delete_response(response_id: str, request: Request) -> Response:
    """Delete a response. One in progress goes on for its client."""
    _find(request, response_id)
    _kept(request).delete(_owner(request), response_id)
    return JsonAnswer({"id": response_id, "object": "response", "deleted": True})


class _ResponseEvents(EventStream):
    """The stream of a response, which ends with the event about its end."""

    end = b""


class _CancellableRequest:
    """A request that another request can cancel: it then looks as if its client had disconnected.

    Attributes:
        request: The request, to be used instead of the original one.
        is_cancelled: Whether it was cancelled.
    """

    def __init__(self, request: Request) -> None:
        self._receive = request.receive
        self._cancelled = asyncio.Event()
        self.request = Request(request.scope, self._receive_or_cancel)

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Make the client appear to have disconnected, which ends the generation."""
        self._cancelled.set()

    async def _receive_or_cancel(self) -> Message:
        received = asyncio.ensure_future(self._receive())
        cancelled = asyncio.ensure_future(self._cancelled.wait())
        try:
            await asyncio.wait((received, cancelled), return_when=asyncio.FIRST_COMPLETED)
            return received.result() if received.done() else {"type": "http.disconnect"}
        finally:
            received.cancel()
            cancelled.cancel()


class _ResponseKeeper:
    """Keeps one response in the store while it is in progress and after its end.

    Attributes:
        is_whole: Whether all of the answer has been generated, so that it can no longer be cancelled.
    """

    def __init__(
        self, kept: KeptResponses, owner: bytes, writer: ResponseWriter, running: _CancellableRequest
    ) -> None:
        self._kept = kept
        self._owner = owner
        self._writer = writer
        self._running = running
        self.is_whole = False

    def begin(self, items: Sequence[bytes]) -> None:
        """Keep the response, which is in progress, with the items of the conversation that led to it."""
        response = _JSON.encode(self._writer.response())
        self._kept.add(self._owner, self._writer.id, KeptResponse(response, items, cancel=self._cancel))

    def end(self) -> None:
        """Keep the end of the response if it is kept."""
        found = self._kept.get(self._owner, self._writer.id)
        if found is not None and found.cancel is not None:
            output = [_JSON.encode(item) for item in self._writer.output]
            self._kept.end(self._owner, self._writer.id, _JSON.encode(self._writer.response()), output)

    def _cancel(self) -> None:
        if not self.is_whole:
            self._writer.end("cancelled")
            self.end()
            self._running.cancel()


async def _events(
    writer: ResponseWriter, keeper: _ResponseKeeper, pieces: AsyncIterator[list[Piece]]
) -> AsyncIterator[bytes]:
    """Yield the events of a stream; before the last one the response is kept, so that a client can read it."""
    try:
        async for events in writer.events(pieces):
            if writer.status != "in_progress":
                keeper.end()
            yield events
    finally:
        writer.end("cancelled")  # no effect unless the stream was abandoned
        keeper.end()


async def _whole(
    context: Context,
    writer: ResponseWriter,
    prepared: PreparedBody,
    keeper: _ResponseKeeper,
    running: _CancellableRequest,
) -> Response:
    try:
        pieces = await answer_whole(context, running.request, prepared)
    except Cancelled:
        if not running.is_cancelled:
            raise
    else:
        keeper.is_whole = True
        await context.session.compute(lambda: [writer.add(piece) for piece in pieces])
        keeper.end()
    return JsonAnswer(writer.response())


def _conversation(kept: KeptResponses, owner: bytes, previous_id: str | None) -> list[bytes]:
    """Return the items of the conversation up to the end of a previous response."""
    if previous_id is None:
        return []
    found, name = kept.get(owner, previous_id), "previous_response_id"
    if found is None:
        raise ApiError(_not_kept(previous_id), 400, name, "previous_response_not_found")
    if found.cancel is not None:
        raise invalid(name, f"{name} is {previous_id!r}, a response in progress: expected one that has ended")
    return [*found.items, *found.output]


def _read(body: ResponseBody, before: Sequence[bytes]) -> tuple[ChatOfResponse, list[bytes]]:
    """Return the chat and the body's own items as JSON."""
    own = named_items(body.input)
    chat = to_chat(body, [msgspec.json.decode(item) for item in before], own)
    return chat, [_JSON.encode(item) for item in own]


async def _prepare(
    context: Context, request: Request, body: ResponseBody, chat: ChatOfResponse, adapter: str
) -> tuple[ChatOfResponse, ChatPrompt, PreparedBody]:
    """Prepare the chat. With `truncation: auto` its first turns are left out until it fits."""
    default = context.model.options.default_max_tokens
    turns = later_turns(chat) if body.truncation == "auto" else []
    found: tuple[ChatOfResponse, ChatPrompt, PreparedBody] | None = None
    low = place = 0
    high = len(turns) + 1
    while low < high:
        some = shortened(chat, turns[place - 1]) if place else chat
        try:
            found = some, *await prepare_chat(context, request, some.body, adapter, default)
            high = place
        except (ApiError, TooLong) as error:
            is_too_long = isinstance(error, TooLong) or error.error_code == CONTEXT_LENGTH_EXCEEDED
            if not is_too_long or (found is None and place + 1 == high):
                raise
            low = place + 1
        place = (low + high) // 2
    assert found is not None, "the last attempt has succeeded or raised"
    return found


def _kept(request: Request) -> KeptResponses:
    return request.app.state.responses


def _owner(request: Request) -> bytes:
    return passage_of(request.scope).key


def _find(request: Request, response_id: str) -> KeptResponse:
    found = _kept(request).get(_owner(request), response_id)
    if found is None:
        raise ApiError(_not_kept(response_id), 404)
    return found


def _not_kept(response_id: str) -> str:
    return (
        f"response {response_id[:100]!r} is not kept: it does not exist, was deleted or sent with store false, or "
        "newer ones have taken its place (--max-stored-responses)"
    )

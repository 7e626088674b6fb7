"""The state that all routes share, and functions that run prompts and send their outputs.

Runs on the event loop; `EngineSession` runs some calls on other threads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace

from fastapi import Request
from starlette.responses import Response

from inflight.openai.answers import Piece, Pieces
from inflight.openai.errors import ApiError
from inflight.openai.http_metrics import HttpMetrics
from inflight.openai.pictures import ChatPictures
from inflight.openai.prepared_body import PreparedBody
from inflight.openai.request_ids import passage_of, request_id_of
from inflight.openai.serving_model import ServingModel, unknown_model
from inflight.openai.streaming import EventStream, Watcher, peeked
from inflight.pooling import Task
from inflight.prompt import Prompt
from inflight.serving.engine_session import EngineSession, OutputStream
from inflight.serving.reply import NewText


@dataclass(frozen=True, slots=True)
class Context:
    """The parts of the application that routes use, for one engine.

    Attributes:
        session: Runs prompts on the engine.
        model: The model that the engine serves.
        http_metrics: Counters of HTTP requests, which all engines share.
        pictures: Prepares the pictures of messages; None: no pictures are taken.
        sleep_turn: Held while a command makes the engine sleep or wakes it.
    """

    session: EngineSession
    model: ServingModel
    http_metrics: HttpMetrics
    pictures: ChatPictures | None = None
    sleep_turn: asyncio.Lock = field(default_factory=asyncio.Lock)


def context_of(request: Request) -> Context:
    """Return the context of the application that received this HTTP request: that of the first engine."""
    return contexts_of(request)[0]


def contexts_of(request: Request) -> Sequence[Context]:
    """Return the contexts of all engines, the first one's first."""
    return request.app.state.contexts


async def chosen_context(request: Request, name: str | None, *tasks: Task) -> tuple[Context, str]:
    """Return the context of the engine that a body's `model` names, and the adapter (`ServingModel.adapter_of`).

    Must be each body's first check. Without a name it is the first engine. Raises ApiError for an unknown name, or
    if the model is served for none of `tasks`; without tasks it may be served for any.
    """
    contexts = contexts_of(request)

    def find() -> tuple[Context, str]:
        context = choose_context(contexts, name)
        adapter = context.model.adapter_of(name)
        if tasks:
            context.model.check_task(tasks)
        return context, adapter

    return await contexts[0].session.wait_for(find)


def choose_context(contexts: Sequence[Context], name: str | None) -> Context:
    """Return the context whose model or adapter has this name; of a single engine its own. May block.

    Raises ApiError (404) for a name that no engine of the server has.
    """
    if name is None or len(contexts) == 1:
        return contexts[0]
    for context in contexts:  # before the adapters of any engine are listed
        if name in context.model.known_names():
            return context
    for context in contexts:
        if context.model.has_adapter(name):
            return context
    raise unknown_model(name, [known for context in contexts for known in context.model.known_names()])


@dataclass(frozen=True, slots=True)
class Envelope:
    """The first fields of every answer and every chunk."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str

    @classmethod
    def of(cls, prefix: str, kind: str, prepared: PreparedBody, request: Request) -> Envelope:
        """Return the envelope of a new answer.

        Args:
            prefix: Prefix of the answer's id.
            kind: OpenAI's name for the object.
            prepared: The prepared body.
            request: The HTTP request; its id is the answer's id unless the body has one.
        """
        name = prepared.asked.body.request_id or request_id_of(request)
        return cls(f"{prefix}-{name}", kind, int(time.time()), prepared.model_name, prepared.fingerprint)

    def around(self, choices: Sequence[object], **more: object) -> dict[str, object]:
        """Return the answer or chunk: these first fields, then `choices`, then the fields in `more`."""
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
            "choices": choices,
            **more,
        }


def refuse_other_sites(request: Request) -> None:
    """Raise ApiError for a request of a web page that the server does not know.

    For routes whose requests have no JSON body: browsers send such requests without asking the server.
    """
    origin = request.headers.get("origin")
    is_foreign = request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
    allowed = context_of(request).model.options.cors_origins
    if origin is not None and is_foreign and origin not in allowed and "*" not in allowed:
        raise ApiError(f"requests from {origin[:80]} are not allowed here (--allowed-origins)", 403)


def open_stream(
    context: Context, request: Request, prompts: Sequence[tuple[Prompt, NewText | None]], model_name: str
) -> OutputStream:
    """Return the stream of a request's outputs, with what log lines say about the request."""
    origin = replace(passage_of(request.scope).origin, model=model_name)
    return context.session.open(prompts, origin)


async def start_stream(request: Request, stream: OutputStream) -> None:
    """Submit the stream's requests, and note for the access log whether they have reached the engine."""
    try:
        await stream.start()
    finally:
        passage_of(request.scope).reaches_engine = stream.is_submitted


async def answer_whole(context: Context, request: Request, prepared: PreparedBody) -> list[Piece]:
    """Run the prompts to their end; return one piece for each choice, in order."""
    stream = open_stream(context, request, prepared.prompts, prepared.model_name)
    watcher = Watcher(request, stream)  # before the start: submitting many prompts takes long
    parts: dict[int, list[Piece]] = {}
    try:
        await start_stream(request, stream)
        async for pieces in Pieces(prepared.asked, prepared.usage, prepared.receipt).read(stream):
            for piece in pieces:
                parts.setdefault(piece.index, []).append(piece)
    finally:
        watcher.close()
    return [Piece.joined(parts[index]) for index in sorted(parts)]


async def answer_stream(
    context: Context,
    request: Request,
    prepared: PreparedBody,
    events_of: Callable[[AsyncIterator[list[Piece]]], AsyncIterator[bytes]],
    response: type[EventStream] = EventStream,
) -> Response:
    """Start the prompts; return a response that sends the events of their answers while they are generated.

    Args:
        context: The context of the application.
        request: The HTTP request.
        prepared: The prepared body.
        events_of: Function that converts the pieces to the events that the response sends.
        response: Class of the response.
    """
    stream = open_stream(context, request, prepared.prompts, prepared.model_name)
    watcher = Watcher(request, stream)
    try:
        await start_stream(request, stream)
        pieces = Pieces(prepared.asked, prepared.usage, prepared.receipt).read(stream)
        return response(await peeked(events_of(pieces)), watcher)
    except BaseException:  # any error is raised again after the stream is closed
        watcher.close()
        raise

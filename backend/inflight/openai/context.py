"""The state that every route needs, kept in the application; and the way from prompts to a watched stream.

Knows no route's JSON. The event loop, but for what `EngineSession` runs on other threads.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from fastapi import Request
from starlette.responses import Response

from inflight.openai.answers import Piece, Pieces
from inflight.openai.planning import AnswerPlan
from inflight.openai.request_ids import request_id_of
from inflight.openai.serving_model import ServingModel
from inflight.openai.streaming import EventStream, Watcher, peeked
from inflight.serving.engine_session import EngineSession


@dataclass(frozen=True, slots=True)
class Context:
    """The parts of the application that routes use."""

    session: EngineSession
    model: ServingModel

    async def adapter_of(self, model: str | None) -> str:
        """`ServingModel.adapter_of`: what is asked first for every body."""
        return await self.session.wait_for(partial(self.model.adapter_of, model))


def context_of(request: Request) -> Context:
    """The context of the application that got this HTTP request."""
    return request.app.state.context


@dataclass(frozen=True, slots=True)
class Envelope:
    """The fields that every answer and every chunk begins with."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str

    @classmethod
    def of(cls, prefix: str, kind: str, plan: AnswerPlan, request: Request) -> Envelope:
        """The envelope of a new answer.

        Args:
            prefix: Of its id.
            kind: What OpenAI calls the object.
            plan: Whose answer it is.
            request: The HTTP request, whose id the answer has unless the body names another.
        """
        name = plan.asked.body.request_id or request_id_of(request)
        return cls(f"{prefix}-{name}", kind, int(time.time()), plan.model_name, plan.fingerprint)

    def around(self, choices: Sequence[object], **more: object) -> dict[str, object]:
        """The whole object."""
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
            "choices": choices,
            **more,
        }


async def answer_whole(context: Context, request: Request, plan: AnswerPlan) -> list[Piece]:
    """All of every choice, as one piece each, in order."""
    stream = context.session.open(plan.prompts)
    watcher = Watcher(request, stream)  # from before the start: many prompts take long to submit
    parts: dict[int, list[Piece]] = {}
    try:
        await stream.start()
        async for pieces in Pieces(plan.asked, plan.usage).read(stream):
            for piece in pieces:
                parts.setdefault(piece.index, []).append(piece)
    finally:
        watcher.close()
    return [Piece.joined(parts[index]) for index in sorted(parts)]


async def answer_stream(
    context: Context,
    request: Request,
    plan: AnswerPlan,
    events_of: Callable[[AsyncIterator[list[Piece]]], AsyncIterator[bytes]],
) -> Response:
    """A response that sends `events_of` the pieces as they come."""
    stream = context.session.open(plan.prompts)
    watcher = Watcher(request, stream)
    try:
        await stream.start()
        pieces = Pieces(plan.asked, plan.usage).read(stream)
        return EventStream(await peeked(events_of(pieces)), watcher)
    except BaseException:  # whatever it is, it is raised again, and nothing runs on
        watcher.close()
        raise

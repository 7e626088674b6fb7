"""Send answers, whole or as server-sent events, and detect clients that disconnect. Runs on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, ClassVar, TypeVar

import msgspec
from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from inflight.errors import Cancelled
from inflight.openai.errors import describe_error
from inflight.serving.engine_session import OutputStream

_ENCODER = msgspec.json.Encoder()
_T = TypeVar("_T")


def event(chunk: Any, name: str = "") -> bytes:
    """Return one server-sent event with `chunk` as JSON, and with a name if `name` is given."""
    named = f"event: {name}\n".encode() if name else b""
    return named + b"data: " + _ENCODER.encode(chunk) + b"\n\n"


async def made(make: Callable[[], bytes], grows_with_prompt: bool) -> bytes:
    """Return the events that `make` returns.

    If their size grows with the prompt, as for the first events of a stream, `make` runs on another thread,
    so that other streams do not wait.
    """
    return await asyncio.to_thread(make) if grows_with_prompt else make()


class JsonAnswer(Response):
    """A response with a whole answer as JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Return the content as JSON."""
        return _ENCODER.encode(content)


class EventStream(Response):
    """A streamed answer: the events of an iterator. If an error occurs, the last event reports it.

    Unlike Starlette's class, this one does not watch for the client's disconnection: `Watcher` does, from
    the start of the request.
    """

    media_type = "text/event-stream"
    end: ClassVar[bytes] = b"data: [DONE]\n\n"
    """The last bytes of every stream."""

    def __init__(self, events: AsyncIterator[bytes], watcher: Watcher) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._watcher = watcher

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the headers and the events to the client, by ASGI."""
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        await send(start)
        failure: BaseException | None = None
        try:
            async for events in self._events:
                await send({"type": "http.response.body", "body": events, "more_body": True})
        except (Exception, asyncio.CancelledError) as error:
            failure = error
            # The status has been sent, so the error is sent as an event.
            last = self.error_event(error)
            await send({"type": "http.response.body", "body": last, "more_body": True})
        finally:
            self._watcher.close()
        await send({"type": "http.response.body", "body": self.end, "more_body": False})
        if isinstance(failure, asyncio.CancelledError):
            raise failure

    def error_event(self, error: BaseException) -> bytes:
        """Return the event that reports an error."""
        return event(describe_error(error)[1])


class Watcher:
    """Task that cancels a stream when its client disconnects, until `close`."""

    def __init__(self, request: Request, stream: OutputStream) -> None:
        self._stream = stream
        self._task = asyncio.create_task(self._watch(request.receive))

    def close(self) -> None:
        """Stop watching, and cancel requests that still run. Idempotent."""
        self._task.cancel()
        self._stream.close()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._stream.cancel()


async def while_connected(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """Return the result of `work`; cancel it and raise Cancelled if the client disconnects before."""

    async def wait_for_end() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(wait_for_end())
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise Cancelled("the request was cancelled by its client")
    finally:
        working.cancel()
        gone.cancel()


async def peeked(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Wait for the first event, then return all `events`.

    So an error before the first event is raised here, and can be answered with its own HTTP status.
    """
    try:
        first = await anext(events)
    except StopAsyncIteration:
        first = b""

    async def rest() -> AsyncIterator[bytes]:
        yield first
        async for each in events:
            yield each

    return rest()

"""Who still waits for an answer: Triton's request ids, the engine's ids, and the clients behind them.

Owns the requests in flight of one model instance and what may be done to them: start, stop, cancel, finish.
Does not know tensors or how answers are sent. Any thread; one lock, never held while sending a response.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from enum import Enum

from inflight.core.ports import EngineClient, SendResponseCallback
from inflight.core.request import Request
from inflight.core.stop import StopReason
from inflight.errors import AlreadyExists, InvalidArgument, Unavailable
from inflight.triton.client_stream import ClientStream
from inflight.triton.completion_text import CompletionText
from inflight.triton.requests import FrontEndOptions


class Ending(Enum):
    """Why this front end ended a request early, where that changes the last response."""

    NONE = "not ended here, or by a stop request, which gets a normal last response"
    CLIENT_GONE = "the client cancelled or went away"
    SEND_FAILED = "a response could not be sent: what would follow has a gap"
    UNLOAD = "the model is being unloaded"


@dataclass(slots=True, eq=False)
class InFlightRequest:
    """One request between execute and its final response.

    Attributes:
        triton_id: The client's request id, "" if it gave none.
        stream: The way back to the client.
        options: What it wants back.
        text: Makes its text; None if no text is wanted. Touched by the sender thread only.
        engine_id: The id it runs under. Written once, by InFlight.
        ending: Written by InFlight.
    """

    triton_id: str
    stream: ClientStream
    options: FrontEndOptions
    text: CompletionText | None = None
    engine_id: int = -1
    ending: Ending = Ending.NONE


class InFlight:
    """The registry. A Triton id is unique among requests in flight; the empty one is no id at all."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._changed = threading.Condition(threading.Lock())
        self._by_engine_id: dict[int, InFlightRequest] = {}
        self._by_triton_id: dict[str, InFlightRequest] = {}
        self._closed = False

    def start(self, entry: InFlightRequest, request: Request, on_response: SendResponseCallback) -> None:
        """Submit `request` and register `entry` for its responses.

        Raises AlreadyExists if the id is in flight, unless the client that sent it is gone: that request is
        cancelled then. Raises Unavailable when closed, and what the engine client raises; then nothing is
        registered.
        """
        with self._changed:
            if self._closed:
                raise Unavailable("the model is being unloaded")
            self._make_room_for(entry.triton_id)
            # Under the lock, so that a response that comes before submit returns finds its entry.
            entry.engine_id = self._client.submit(request, on_response)
            self._by_engine_id[entry.engine_id] = entry
            if entry.triton_id:
                self._by_triton_id[entry.triton_id] = entry
            self._changed.notify()

    def stop(self, triton_id: str) -> None:
        """End the request with this id, which gets a normal last response; an unknown id is ignored."""
        if not triton_id:
            raise InvalidArgument("Cannot send stop request without specifying a request_id")
        with self._changed:
            entry = self._by_triton_id.get(triton_id)
        if entry is not None:
            self._client.stop(entry.engine_id, StopReason.CANCELLED)

    def cancel(self, entry: InFlightRequest, ending: Ending = Ending.CLIENT_GONE) -> None:
        """End `entry`, whose last response then is an error; does nothing the second time."""
        with self._changed:
            if entry.ending is not Ending.NONE:
                return
            entry.ending = ending
        self._client.stop(entry.engine_id, StopReason.CANCELLED)

    def find(self, engine_id: int) -> InFlightRequest | None:
        """The request that runs under this id."""
        with self._changed:
            return self._by_engine_id.get(engine_id)

    def finish(self, engine_id: int) -> InFlightRequest | None:
        """Forget the request, and return it for its last response: from now on its id may be used again."""
        with self._changed:
            entry = self._by_engine_id.pop(engine_id, None)
            # The id may be another's by now: the client of this one was gone when it came.
            if entry is not None and self._by_triton_id.get(entry.triton_id) is entry:
                del self._by_triton_id[entry.triton_id]
            return entry

    def wait_for_requests(self) -> tuple[InFlightRequest, ...]:
        """Everything in flight, as soon as there is something; empty once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._by_engine_id)
            return () if self._closed else tuple(self._by_engine_id.values())

    def close(self) -> tuple[InFlightRequest, ...]:
        """Take no more requests; returns what is still in flight."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            return tuple(self._by_engine_id.values())

    def _make_room_for(self, triton_id: str) -> None:
        earlier = self._by_triton_id.get(triton_id)
        if earlier is None:
            return
        if earlier.ending is Ending.NONE:
            if not earlier.stream.is_cancelled():
                raise AlreadyExists(f"requestId {triton_id} is already in progress, request is ignored.")
            earlier.ending = Ending.CLIENT_GONE
            self._client.stop(earlier.engine_id, StopReason.CANCELLED)

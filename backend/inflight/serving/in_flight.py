"""The requests in flight of one front end: the clients' request ids, the engine's ids, and the clients.

Owns the requests in flight of one front end and what may be done to them: start, stop, cancel. Does not know
protocols or how answers are sent. Any thread; one lock, never held while sending a response.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from inflight.core.ports import EngineClient, SendResponseCallback
from inflight.core.request.handle import RequestHandle
from inflight.core.request.request import Request
from inflight.errors import (
    AlreadyExists,
    Cancelled,
    InflightError,
    InvalidArgument,
    StepFailed,
    Unavailable,
)
from inflight.serving.reply import Reply


class ClientStream(Protocol):
    """One client's end of one request, in its protocol."""

    def send(self, response: Any) -> None:
        """Send one response of several."""
        ...

    def finish(self, response: Any = None) -> None:
        """Send the last response, or none, and end the request. Only the first call does anything."""
        ...

    def fail(self, error: InflightError) -> None:
        """Send an error as the last response, and end the request, as `finish` does."""
        ...

    def is_cancelled(self) -> bool:
        """Whether the client cancelled or went away; false once the request is finished."""
        ...


class Ending(Enum):
    """The reason why this front end ended a request early, where it changes the last response."""

    NONE = "not ended here, or by a stop request, which gets a normal last response"
    CLIENT_GONE = "the client cancelled or went away"
    SEND_FAILED = "a response could not be sent: what would follow has a gap"
    UNLOAD = "the model is being unloaded"


def error_of_ending(ending: Ending) -> InflightError:
    """The error for the client of a request that was ended here."""
    if ending is Ending.CLIENT_GONE:
        return Cancelled("the request was cancelled by its client")
    if ending is Ending.UNLOAD:
        return Unavailable("the model was unloaded before the request was done")
    return StepFailed("a response could not be sent")  # where there is no better reason


@dataclass(slots=True, eq=False)
class InFlightRequest:
    """One client's request between its arrival and its final response: a prompt, or a batch of them.

    Attributes:
        client_request_id: The id that the client gave it, "" if it gave none.
        stream: The way back to the client.
        reply: Makes its outputs. Touched by the sender thread only, once the engine knows of the request.
        shown_name: The client's own name for an input, for errors of the engine.
        ticket: Of `ResponseBudget`, to release when it is answered; 0 until the engine knows of the request.
        handles: Of its prompts, in the order of the batch. Written once, by InFlight.
        num_unfinished: Prompts whose final response has not come. Written by InFlight.
        ending: Why it was ended early. Written by InFlight.
        is_stopped: Whether a stop request came before the engine knew of it. Written by InFlight.
        send_failure: Why a response could not be sent. Touched by the sender thread only.
    """

    client_request_id: str
    stream: ClientStream
    reply: Reply
    shown_name: Callable[[str], str] = str
    ticket: int = 0
    handles: tuple[RequestHandle, ...] = ()
    num_unfinished: int = 0
    ending: Ending = Ending.NONE
    is_stopped: bool = False
    send_failure: InflightError | None = None

    @property
    def engine_ids(self) -> tuple[int, ...]:
        """The engine's request ids of its prompts."""
        return tuple(handle.request_id for handle in self.handles)

    def __str__(self) -> str:
        """For log lines."""
        return self.client_request_id or "/".join(map(str, self.engine_ids))


@dataclass(frozen=True, slots=True)
class Arrival:
    """The request and prompt that an arrived response belongs to.

    Attributes:
        entry: The client's request.
        batch_index: Which of its prompts.
        is_last: Whether nothing more comes for any of them; then the request is forgotten already, and its id may
            be used again.
    """

    entry: InFlightRequest
    batch_index: int
    is_last: bool


class InFlight:
    """The registry. A client's request id is unique among requests in flight; the empty one is no id at all."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._changed = threading.Condition(threading.Lock())
        self._entries: dict[InFlightRequest, None] = {}  # in order of arrival
        self._by_engine_id: dict[int, tuple[InFlightRequest, int]] = {}
        self._by_client_request_id: dict[str, InFlightRequest] = {}
        self._closed = False

    def register(self, entry: InFlightRequest) -> None:
        """Register `entry` before it is known what the engine is to do for it; `start` or `withdraw` follows.

        Its id is in flight from here on. A stop or a cancellation that comes meanwhile counts when it starts.
        Raises AlreadyExists if the id is in flight, unless the client that sent it is gone: that request is
        cancelled then. Raises Unavailable after `stop_admitting`.
        """
        with self._changed:
            self._register(entry)

    def withdraw(self, entry: InFlightRequest) -> None:
        """Forget an entry that does not start."""
        with self._changed:
            self._forget(entry)

    def start(
        self, entry: InFlightRequest, requests: Sequence[Request], on_response: SendResponseCallback
    ) -> None:
        """Submit `requests`, in the order of the batch, and register `entry` if that has not happened yet.

        Raises what `register` and the engine client raise, and the error of its ending for an entry that has been
        ended meanwhile; then nothing of it runs on, and nothing is registered that was not before.
        """
        with self._changed:
            is_known = entry in self._entries
            if is_known:
                self._check_goes_on(entry)
            else:
                self._register(entry)
            # Under the lock, so that a response that comes before submit returns finds its entry.
            try:
                entry.handles = self._submit(requests, on_response)
            except Exception:  # whatever it is, it is raised again, and nothing may stay registered
                if not is_known:
                    self._forget(entry)
                raise
            entry.num_unfinished = len(requests)
            for batch_index, engine_id in enumerate(entry.engine_ids):
                self._by_engine_id[engine_id] = (entry, batch_index)
        if entry.is_stopped:
            _stop_all(entry.handles)

    def stop(self, client_request_id: str) -> None:
        """End the request with this id, which gets a normal last response; an unknown id is ignored."""
        if not client_request_id:
            raise InvalidArgument("Cannot send stop request without specifying a request_id")
        with self._changed:
            entry = self._by_client_request_id.get(client_request_id)
            if entry is not None and not entry.handles:
                entry.is_stopped = True
        if entry is not None:
            _stop_all(entry.handles)

    def cancel(self, entry: InFlightRequest, ending: Ending = Ending.CLIENT_GONE) -> None:
        """End `entry`, whose last response then is an error; does nothing the second time."""
        with self._changed:
            if entry.ending is not Ending.NONE:
                return
            entry.ending = ending
        _stop_all(entry.handles)

    def abandon(self, entry: InFlightRequest) -> None:
        """Forget `entry` and end what still runs for it: it gets its last response now."""
        with self._changed:
            running = [handle for handle in entry.handles if handle.request_id in self._by_engine_id]
            for handle in running:
                del self._by_engine_id[handle.request_id]
            self._forget(entry)
        _stop_all(running)

    def arrive(self, engine_id: int, is_final: bool) -> Arrival | None:
        """Count a final response; returns whose response has come, None if nobody waits for it."""
        with self._changed:
            found = self._by_engine_id.get(engine_id)
            if found is None:
                return None
            entry, batch_index = found
            if is_final:
                del self._by_engine_id[engine_id]
                entry.num_unfinished -= 1
                if not entry.num_unfinished:
                    self._forget(entry)
            return Arrival(entry, batch_index, is_last=not entry.num_unfinished)

    def wait_for_requests(self) -> tuple[InFlightRequest, ...]:
        """Everything in flight, as soon as there is something; empty after `stop_admitting`."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._entries)
            return () if self._closed else tuple(self._entries)

    def stop_admitting(self) -> tuple[InFlightRequest, ...]:
        """Refuse new requests from now on; returns what is still in flight."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            return tuple(self._entries)

    def _check_goes_on(self, entry: InFlightRequest) -> None:
        if entry.ending is not Ending.NONE:
            raise error_of_ending(entry.ending)
        if self._closed:
            raise error_of_ending(Ending.UNLOAD)

    def _register(self, entry: InFlightRequest) -> None:
        if self._closed:
            raise Unavailable("the model is being unloaded")
        self._make_room_for(entry.client_request_id)
        self._entries[entry] = None
        if entry.client_request_id:
            self._by_client_request_id[entry.client_request_id] = entry
        self._changed.notify()

    def _make_room_for(self, client_request_id: str) -> None:
        earlier = self._by_client_request_id.get(client_request_id)
        if earlier is None:
            return
        if earlier.ending is Ending.NONE:
            if not earlier.stream.is_cancelled():
                raise AlreadyExists(
                    f"requestId {client_request_id} is already in progress, request is ignored."
                )
            earlier.ending = Ending.CLIENT_GONE
            _stop_all(earlier.handles)

    def _submit(
        self, requests: Sequence[Request], on_response: SendResponseCallback
    ) -> tuple[RequestHandle, ...]:
        handles: list[RequestHandle] = []
        try:
            for request in requests:
                handles.append(self._client.submit(request, on_response))
        except Exception:  # whatever it is, it is raised again, and nothing submitted may run on
            _stop_all(handles)
            raise
        return tuple(handles)

    def _forget(self, entry: InFlightRequest) -> None:
        self._entries.pop(entry, None)
        # The id may be another's by now: the client of this one was gone when it came.
        if self._by_client_request_id.get(entry.client_request_id) is entry:
            del self._by_client_request_id[entry.client_request_id]


def _stop_all(handles: Sequence[RequestHandle]) -> None:
    for handle in handles:
        handle.stop()

"""The requests in flight of one front end, with the clients' request ids, engine ids and client streams.

Starts, stops and cancels these requests. Any thread; one lock, which is never held while a response is sent.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from inflight.core.ports import EngineClient, SendResponseCallback
from inflight.core.request.handle import RequestHandle
from inflight.core.request.request import Origin, Request
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
    """The connection to one client for one request, in the client's protocol."""

    def send(self, response: Any) -> None:
        """Send one response that is not the last."""
        ...

    def finish(self, response: Any = None) -> None:
        """Send the last response, or none, and end the request. Later calls do nothing."""
        ...

    def fail(self, error: InflightError) -> None:
        """Send an error as the last response, and end the request; later calls do nothing."""
        ...

    def is_cancelled(self) -> bool:
        """Return whether the client cancelled or disconnected; false after the request was finished."""
        ...


class Ending(Enum):
    """The reason why this front end ended a request early, if it changes the last response."""

    NONE = "not ended by this front end, or ended by a stop request, after which the last response is normal"
    CLIENT_GONE = "the client cancelled or went away"
    SEND_FAILED = "a response could not be sent, so that later responses would follow a gap"
    UNLOAD = "the model is being unloaded"


def error_of_ending(ending: Ending) -> InflightError:
    """Return the error for the client of a request that this front end ended."""
    if ending is Ending.CLIENT_GONE:
        return Cancelled("the request was cancelled by its client")
    if ending is Ending.UNLOAD:
        return Unavailable("the model was unloaded before the request was done")
    return StepFailed("a response could not be sent")  # without a more specific reason


@dataclass(slots=True, eq=False)
class InFlightRequest:
    """One client's request, with one prompt or a batch, between its arrival and its final response.

    Attributes:
        client_request_id: The client's id of the request; "": none.
        stream: The connection to the client.
        reply: Makes the outputs. Used by the sender thread only, once the request has been submitted.
        shown_name: Returns the name that the client used for an input, for errors of the engine.
        origin: The request's origin, for log lines.
        ticket: Ticket of `ResponseBudget`, to release after the answer; 0 until the request is submitted.
        handles: Handles of the prompts' engine requests, in the order of the batch. Written once, by
            InFlight.
        num_unfinished: Number of prompts without a final response. Written by InFlight.
        ending: Reason why this front end ended the request early. Written by InFlight.
        is_stopped: Whether a stop request came before the request was submitted. Written by InFlight.
        send_failure: Reason why a response could not be sent. Used by the sender thread only.
    """

    client_request_id: str
    stream: ClientStream
    reply: Reply
    shown_name: Callable[[str], str] = str
    origin: Origin | None = None
    ticket: int = 0
    handles: tuple[RequestHandle, ...] = ()
    num_unfinished: int = 0
    ending: Ending = Ending.NONE
    is_stopped: bool = False
    send_failure: InflightError | None = None

    @property
    def engine_ids(self) -> tuple[int, ...]:
        """Return the engine's request ids of the prompts."""
        return tuple(handle.request_id for handle in self.handles)

    @property
    def log_extra(self) -> dict[str, str] | None:
        """The argument `extra` of log lines about this request."""
        return None if self.origin is None else self.origin.log_extra

    def __str__(self) -> str:
        """Return a description for log lines."""
        return self.client_request_id or "/".join(map(str, self.engine_ids))


@dataclass(frozen=True, slots=True)
class Arrival:
    """The request and prompt of an arrived response.

    Attributes:
        entry: The client's request.
        batch_index: Index of the prompt in the batch.
        is_last: Whether no further response of any prompt of the request will come. The request is then no
            longer in flight, and its id may be used again.
    """

    entry: InFlightRequest
    batch_index: int
    is_last: bool


class InFlight:
    """Registry of requests in flight. Their client request ids are unique; "" means no id."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._changed = threading.Condition(threading.Lock())
        self._entries: dict[InFlightRequest, None] = {}  # in order of arrival
        self._by_engine_id: dict[int, tuple[InFlightRequest, int]] = {}
        self._by_client_request_id: dict[str, InFlightRequest] = {}
        self._closed = False

    def register(self, entry: InFlightRequest) -> None:
        """Register `entry` before its requests are converted. `start` or `withdraw` must follow.

        The entry's id is in flight from now on. A stop or cancellation before `start` takes effect in
        `start`. If the id is already in flight, raises AlreadyExists; but if the client of the earlier
        request has gone, cancels the earlier request instead. Raises Unavailable after `stop_admitting`.
        """
        with self._changed:
            self._register(entry)

    def withdraw(self, entry: InFlightRequest) -> None:
        """Remove a registered entry that will not be started."""
        with self._changed:
            self._forget(entry)

    def start(
        self, entry: InFlightRequest, requests: Sequence[Request], on_response: SendResponseCallback
    ) -> None:
        """Submit `requests`, in the order of the batch; register `entry` first unless it is registered.

        Raises the errors of `register` and of the engine client, and `error_of_ending` if the entry was
        ended before. After an error none of the requests runs, and an entry that this call registered is
        removed.
        """
        with self._changed:
            is_known = entry in self._entries
            if is_known:
                self._check_goes_on(entry)
            else:
                self._register(entry)
            # Under the lock, so that a response that arrives before submit returns finds its entry.
            try:
                entry.handles = self._submit(requests, on_response)
            except Exception:  # any error is raised again after the entry is removed
                if not is_known:
                    self._forget(entry)
                raise
            entry.num_unfinished = len(requests)
            for batch_index, engine_id in enumerate(entry.engine_ids):
                self._by_engine_id[engine_id] = (entry, batch_index)
        if entry.is_stopped:
            _stop_all(entry.handles)

    def stop(self, client_request_id: str) -> None:
        """Stop the request with this id; its last response is a normal one. Unknown ids are ignored."""
        if not client_request_id:
            raise InvalidArgument("Cannot send stop request without specifying a request_id")
        with self._changed:
            entry = self._by_client_request_id.get(client_request_id)
            if entry is not None and not entry.handles:
                entry.is_stopped = True
        if entry is not None:
            _stop_all(entry.handles)

    def cancel(self, entry: InFlightRequest, ending: Ending = Ending.CLIENT_GONE) -> None:
        """Cancel `entry`, so that its last response is an error. Does nothing if it was ended before."""
        with self._changed:
            if entry.ending is not Ending.NONE:
                return
            entry.ending = ending
        _stop_all(entry.handles)

    def abandon(self, entry: InFlightRequest) -> None:
        """Remove `entry`, whose last response is being sent, and cancel its prompts that still run."""
        with self._changed:
            running = [handle for handle in entry.handles if handle.request_id in self._by_engine_id]
            for handle in running:
                del self._by_engine_id[handle.request_id]
            self._forget(entry)
        _stop_all(running)

    def find_arrival(self, engine_id: int, is_final: bool) -> Arrival | None:
        """Return the request and prompt of a response; None if the request is no longer in flight.

        If the response is final, the prompt counts as finished.
        """
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
        """Wait for and return the requests in flight; return () after `stop_admitting`."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._entries)
            return () if self._closed else tuple(self._entries)

    def stop_admitting(self) -> tuple[InFlightRequest, ...]:
        """Refuse new requests from now on; return the requests in flight."""
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
        self._free_request_id(entry.client_request_id)
        self._entries[entry] = None
        if entry.client_request_id:
            self._by_client_request_id[entry.client_request_id] = entry
        self._changed.notify()

    def _free_request_id(self, client_request_id: str) -> None:
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
        except Exception:  # any error is raised again after the submitted requests are stopped
            _stop_all(handles)
            raise
        return tuple(handles)

    def _forget(self, entry: InFlightRequest) -> None:
        self._entries.pop(entry, None)
        # The id may belong to a later request, which arrived after the client of this request had gone.
        if self._by_client_request_id.get(entry.client_request_id) is entry:
            del self._by_client_request_id[entry.client_request_id]


def _stop_all(handles: Sequence[RequestHandle]) -> None:
    for handle in handles:
        handle.stop()

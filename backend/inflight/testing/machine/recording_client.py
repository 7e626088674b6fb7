"""An engine client for a simulated front end that notes what the front end submits and stops, and what it gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from inflight.core.ports import SendResponseCallback
from inflight.core.request.handle import RequestHandle
from inflight.core.request.request import Request
from inflight.core.request.response import Response
from inflight.core.request.stop import StopReason
from inflight.endpoint.client import SocketEngineClient
from inflight.errors import InflightError

from .answers import Ticket
from .scheduler import Machine

if TYPE_CHECKING:
    _Client = SocketEngineClient
else:
    _Client = object


class RecordingClient(_Client):
    """An engine client whose requests are noted.

    Args:
        machine: The machine.
        client: The client that does the work.
        note: Called with the ticket of each request before it is sent.
    """

    def __init__(self, machine: Machine, client: SocketEngineClient, note: Callable[[Ticket], None]) -> None:
        self._machine, self._client, self._note = machine, client, note

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            return getattr(self._client, name)

    def submit(self, request: Request, on_response: SendResponseCallback) -> RequestHandle:
        machine = self._machine
        ticket = Ticket(request, machine.now_ns)
        self._note(ticket)

        def take(response: Response) -> None:
            ticket.responses.append(response)
            if response.is_final:
                ticket.answered_ns = machine.now_ns
            on_response(response)

        try:
            handle = self._client.submit(request, take)
        except InflightError as error:
            ticket.refusal, ticket.answered_ns = error, machine.now_ns
            raise

        def stop(request_id: int, reason: StopReason, sequence_index: int | None = None) -> None:
            ticket.stops.append((reason, sequence_index))
            handle.stop(reason, sequence_index)

        return RequestHandle(handle.request_id, stop)

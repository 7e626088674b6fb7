"""A submitted request, as whoever submitted it holds it. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from inflight.core.request.stop import StopReason

StopRequest = Callable[[int, StopReason, int | None], None]
"""Takes a request id, a reason, and which of the request's sequences to end, None for all; `EngineClient.stop`."""


@dataclass(frozen=True, slots=True)
class RequestHandle:
    """A request that an engine client has taken, until its final response has come.

    Attributes:
        request_id: The id that it runs under, and that its responses have.
        stop_request: Ends requests of its client.
    """

    request_id: int
    stop_request: StopRequest = field(repr=False)

    def stop(self, reason: StopReason = StopReason.CANCELLED, sequence_index: int | None = None) -> None:
        """End the request early, or one of its sequences; nothing happens if that has ended."""
        self.stop_request(self.request_id, reason, sequence_index)

"""The handle of a submitted request, for the code that submitted it. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from inflight.core.request.stop import StopReason

StopRequest = Callable[[int, StopReason, int | None], None]
"""The type of `EngineClient.stop`: a function of a request id, a reason, and the index of the sequence to end,
None for all sequences."""


@dataclass(frozen=True, slots=True)
class RequestHandle:
    """A submitted request, until its final response has come.

    Attributes:
        request_id: The engine's id of the request, which its responses have too.
        stop_request: The client's `stop`.
    """

    request_id: int
    stop_request: StopRequest = field(repr=False)

    def stop(self, reason: StopReason = StopReason.CANCELLED, sequence_index: int | None = None) -> None:
        """End the request, or one of its sequences, early. Does nothing if it has already ended."""
        self.stop_request(self.request_id, reason, sequence_index)

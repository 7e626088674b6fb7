"""A request's life: its state machine as a table, and the few counters everything else derives from.

    event      WAITING    RUNNING    PAUSED     FINISHED
    START      RUNNING    -          RUNNING    -
    PAUSE      -          PAUSED     -          -
    FINISH     FINISHED   FINISHED   FINISHED   -

A dash is an illegal transition: it raises and changes nothing. There is no context or generation state: the
phase follows from how many of the known tokens are computed. Written by the scheduler alone.
"""

from __future__ import annotations

from enum import Enum, auto

from inflight.core.request import Request
from inflight.core.stop import FinishReason
from inflight.errors import InflightError


class RequestState(Enum):
    """Where a request stands."""

    WAITING = auto()
    RUNNING = auto()
    PAUSED = auto()
    FINISHED = auto()


class RequestEvent(Enum):
    """What can happen to a request."""

    START = auto()
    PAUSE = auto()
    FINISH = auto()


TRANSITIONS: dict[tuple[RequestState, RequestEvent], RequestState] = {
    (RequestState.WAITING, RequestEvent.START): RequestState.RUNNING,
    (RequestState.PAUSED, RequestEvent.START): RequestState.RUNNING,
    (RequestState.RUNNING, RequestEvent.PAUSE): RequestState.PAUSED,
    (RequestState.WAITING, RequestEvent.FINISH): RequestState.FINISHED,
    (RequestState.RUNNING, RequestEvent.FINISH): RequestState.FINISHED,
    (RequestState.PAUSED, RequestEvent.FINISH): RequestState.FINISHED,
}


class IllegalTransition(AssertionError):
    """The scheduler asked for something that cannot happen: a defect, not a user's mistake."""


class LlmRequest:
    """One request from arrival to its final response.

    Attributes:
        request: What was asked.
        state: Where it stands.
        tokens: Prompt and generated tokens.
        slot: The device's index for it while RUNNING, else -1.
        context_length: How many of `tokens` this run has to compute as context: the prompt, and after a pause
            what had been generated as well.
        num_computed_tokens: Tokens whose keys and values are confirmed to be in the cache.
        num_scheduled_tokens: Tokens in batches whose update has not come yet.
        num_streamed_tokens: Generated tokens that responses have carried.
        finish_reason: Why it ended.
        error: Why it failed, if it did.
    """

    __slots__ = (
        "context_length",
        "error",
        "finish_reason",
        "num_computed_tokens",
        "num_scheduled_tokens",
        "num_streamed_tokens",
        "request",
        "slot",
        "state",
        "tokens",
    )

    def __init__(self, request: Request) -> None:
        self.request = request
        self.state = RequestState.WAITING
        self.tokens = list(request.input_token_ids)
        self.slot = -1
        self.context_length = len(self.tokens)
        self.num_computed_tokens = 0
        self.num_scheduled_tokens = 0
        self.num_streamed_tokens = 0
        self.finish_reason = FinishReason.NOT_FINISHED
        self.error: InflightError | None = None

    @property
    def request_id(self) -> int:
        """The request's id."""
        return self.request.request_id

    @property
    def next_position(self) -> int:
        """Position of the next token to be computed."""
        return self.num_computed_tokens + self.num_scheduled_tokens

    @property
    def in_context(self) -> bool:
        """Whether known tokens are still to be scheduled; otherwise the device feeds its own last token."""
        return self.num_computed_tokens + self.num_scheduled_tokens < self.context_length

    def apply(self, event: RequestEvent) -> None:
        """Move along the table; IllegalTransition, with nothing changed, where it has no entry."""
        target = TRANSITIONS.get((self.state, event))
        if target is None:
            raise IllegalTransition(f"request {self.request_id} is {self.state.name}: cannot {event.name}")
        self.state = target

    def start(self, slot: int, num_reused_tokens: int) -> None:
        """Take a slot; the first `num_reused_tokens` tokens are in its block table already."""
        self.apply(RequestEvent.START)
        self.slot = slot
        self.context_length = len(self.tokens)
        self.num_computed_tokens = num_reused_tokens

    def pause(self) -> None:
        """Give up slot and blocks; every token known so far is computed again on resumption."""
        self.apply(RequestEvent.PAUSE)
        self.slot = -1
        self.num_computed_tokens = 0

    def finish(self, reason: FinishReason) -> None:
        """End for `reason`. The slot stays until the batches in flight have come back."""
        self.apply(RequestEvent.FINISH)
        self.finish_reason = reason

    def fail(self, error: InflightError) -> None:
        """End with an error; one that has ended already keeps its reason."""
        if self.state is not RequestState.FINISHED:
            self.apply(RequestEvent.FINISH)
            self.error = error

"""Where a loop's iterations get their inputs: from callbacks, or from the rank that has the callbacks.

Everything that enters an iteration and is not a function of earlier state comes from here, the time included, so
that the schedulers of all ranks decide the same. Called on the loop thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from inflight.core.ports import GetInferenceRequestsCallback, PollStopSignalCallback, Ranks
from inflight.core.request.request import IterationInput, Request
from inflight.core.request.stop import StopSignal
from inflight.core.scheduler import Scheduler


class Inputs(Protocol):
    """What a loop asks. `next` and `end` raise Unavailable once a rank is known to be lost."""

    @property
    def are_over(self) -> bool:
        """Whether `next` has returned None."""

    @property
    def taken(self) -> tuple[Request, ...]:
        """Requests that this rank has to answer and that its scheduler has not been given."""

    def next(self) -> IterationInput | None:
        """Of the next iteration; None: there is none."""

    def now_ns(self) -> int:
        """The time, by the clock of `IterationInput.now_ns`."""

    def look_ahead(self) -> bool:
        """At the end of an iteration: whether there is something for the next one already."""

    def end(self) -> None:
        """The loop has ended in order."""


class OwnInputs:
    """Of a loop whose callbacks face clients; other ranks, if there are any, are told.

    Args:
        scheduler: Knows what is active.
        get_inference_requests, poll_stop_signal, clock_ns: As GptManager has them.
        ranks: The others.
    """

    are_over = False

    def __init__(
        self,
        scheduler: Scheduler,
        get_inference_requests: GetInferenceRequestsCallback,
        poll_stop_signal: PollStopSignalCallback | None,
        clock_ns: Callable[[], int],
        ranks: Ranks | None,
    ) -> None:
        self.taken: tuple[Request, ...] = ()
        self.now_ns = clock_ns
        self._scheduler = scheduler
        self._get_inference_requests = get_inference_requests
        self._poll_stop_signal = poll_stop_signal
        self._ranks = ranks
        self._iteration = 0
        self._stops: tuple[StopSignal, ...] = ()

    def next(self) -> IterationInput:
        """Fetches requests. Others are told of iterations with active or new ones."""
        requests = tuple(self._get_inference_requests(self._scheduler.room))
        inputs = IterationInput(self._iteration, self.now_ns(), requests, self._stops)
        self._iteration += 1
        is_active = self._scheduler.num_active > 0
        if self._ranks is not None and (is_active or requests):
            self.taken = requests
            self._ranks.share(inputs, are_asleep=not is_active)
            self.taken = ()
        return inputs

    def look_ahead(self) -> bool:
        """Polls stop signals; those of requests that are not active mean nothing."""
        signals = self._poll_stop_signal() if self._poll_stop_signal else ()
        self._stops = tuple(signal for signal in signals if self._scheduler.is_active(signal.request_id))
        return bool(self._stops)

    def end(self) -> None:
        """Tells the others."""
        if self._ranks is not None:
            self._ranks.end(are_asleep=not self._scheduler.num_active)


class LeadersInputs:
    """Of a follower: what its leader shares. Its time is the leader's too, as of the last iteration.

    Args:
        scheduler: Knows what is active, and so whether the leader is to wake this rank.
        ranks: The leader among them.
    """

    taken = ()

    def __init__(self, scheduler: Scheduler, ranks: Ranks) -> None:
        self.are_over = False
        self._scheduler = scheduler
        self._ranks = ranks
        self._now_ns = 0

    def next(self) -> IterationInput | None:
        """Waits for the leader; None once it has ended."""
        if self.are_over:
            return None
        inputs = self._ranks.follow(is_asleep=not self._scheduler.num_active)
        if inputs is None:
            self.are_over = True
        else:
            self._now_ns = inputs.now_ns
        return inputs

    def now_ns(self) -> int:
        """As the leader told; clocks of other machines begin elsewhere."""
        return self._now_ns

    def look_ahead(self) -> bool:
        """Whether there is more is for the leader to say."""
        return True

    def end(self) -> None:
        """Nobody follows a follower."""

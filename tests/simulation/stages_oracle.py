"""What batches in flight on a pipeline may have in common, and how they share the sequences between them."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from inflight.core.llm_request import LlmRequest, RequestState
from inflight.core.scheduler import Scheduler

from .blame import Flight


class StagesOracle:
    """Looks at every batch of one scheduler; where there is one stage only, at its number."""

    def __init__(self, scheduler: Scheduler, num_stages: int) -> None:
        self._scheduler = scheduler
        self._num_stages = num_stages
        self._num_batches = 0

    def check(self, flight: Flight, ahead: Sequence[Flight]) -> None:
        """A batch has been made, with others in flight ahead of it."""
        assert flight.batch.micro_batch_id == self._num_batches % self._num_stages
        self._num_batches += 1
        if self._num_stages == 1:
            return
        assert len(ahead) < self._num_stages
        generating = _generating(flight)
        for other in ahead:
            assert not any(r in other.rows for r in generating), "it generates before its last token is known"
        going_on = [
            r
            for r in self._scheduler.running_sequences
            if r.state is not RequestState.FINISHED and r.next_position >= r.context_length
        ]
        assert len(generating) <= ceil(len(going_on) / self._num_stages), (
            "the other stages have too little work"
        )


def _generating(flight: Flight) -> list[LlmRequest]:
    """Sequences with a row that is no context."""
    batch = flight.batch
    slots = {*batch.generation_slots, *(chunk.slot for chunk in batch.context if chunk.is_generation)}
    return [r for r in flight.rows if slots.intersection(r.slots)]

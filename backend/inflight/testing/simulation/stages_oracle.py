"""Oracle of batches in flight: which sequences two of them may share, and how many each stage gets."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from inflight.core.request.llm_request import LlmRequest, RequestState
from inflight.core.request.request import Request
from inflight.core.schedule.batch import EngineLimits
from inflight.core.scheduler import Scheduler

from .blame import BatchInFlight


class StagesOracle:
    """Oracle of every batch of one scheduler."""

    def __init__(self, scheduler: Scheduler, limits: EngineLimits) -> None:
        self._scheduler = scheduler
        self._num_stages = limits.num_micro_batches
        self._overlaps_iterations = limits.overlaps_iterations
        self._num_batches = 0

    def check(self, flight: BatchInFlight, ahead: Sequence[BatchInFlight]) -> None:
        """Check a new batch against the batches in flight."""
        assert flight.batch.micro_batch_id == self._num_batches % self._num_stages
        self._num_batches += 1
        self._check_overlap(flight, ahead)
        if self._num_stages == 1:
            return
        assert len(ahead) < self._num_stages
        generating = _generating(flight)
        for other in ahead:
            assert not any(r in other.rows for r in generating), (
                "a sequence generates before its last token is known"
            )
        going_on = [
            r
            for r in self._scheduler.running_sequences
            if r.state is not RequestState.FINISHED and r.next_position >= r.context_length
        ]
        assert len(generating) <= ceil(len(going_on) / self._num_stages), (
            "the other stages have too little work"
        )

    def _check_overlap(self, flight: BatchInFlight, ahead: Sequence[BatchInFlight]) -> None:
        """Check where a batch samples on a device that overlaps iterations.

        It samples on the device if a sequence can continue before the host sees its token. Otherwise the batch
        must come back before the next one begins.
        """
        sampled = _sampled(flight)
        goes_on = not sampled or any(not waits_for_host(r.request) for r in sampled)
        assert flight.batch.samples_on_device == (self._overlaps_iterations and goes_on)
        if self._overlaps_iterations:
            assert len(ahead) < 2 and all(other.batch.samples_on_device for other in ahead)
            waiting = [r for other in ahead for r in _sampled(other) if waits_for_host(r.request)]
            assert not any(r in waiting for r in flight.rows), (
                "a sequence has a row before the host has seen its last token"
            )


def _sampled(flight: BatchInFlight) -> list[LlmRequest]:
    """Return the sequences that get a token."""
    slots = set(flight.batch.sampled_slots())
    return [r for r in flight.rows if slots.intersection(r.slots)]


def waits_for_host(request: Request) -> bool:
    """Return whether the host must see each token of a request before its next one is computed.

    Considers only the options that the simulation's requests use.
    """
    sampling, output = request.sampling, request.output
    describes = output.return_log_probs or output.num_top_log_probs or output.return_generation_logits
    guesses = request.draft is not None or request.prompt_lookup_num_tokens
    return bool(sampling.beam_width > 1 or sampling.repetition_penalty != 1.0 or describes or guesses)


def _generating(flight: BatchInFlight) -> list[LlmRequest]:
    """Return the sequences with a row in generation."""
    batch = flight.batch
    slots = {*batch.generation_slots, *(chunk.slot for chunk in batch.context if chunk.is_generation)}
    return [r for r in flight.rows if slots.intersection(r.slots)]

"""A device that fails when it computes certain positions of certain requests, and a run on it to the end."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from inflight.core.request.request import IterationInput, Request
from inflight.core.request.response import Response
from inflight.core.schedule.batch import EngineLimits, ModelOutput, ScheduledBatch
from inflight.core.scheduler import Scheduler
from inflight.errors import InflightError, StepFailed
from inflight.testing.fake_engine import FakeEngine
from inflight.testing.simulation.integrity import check_integrity


def at_token(request: Request, number: int) -> int:
    """The position whose logits would choose the `number`th generated token, counted from 1."""
    return request.prompt_length + number - 2


class FaultyDevice:
    """A fake engine that raises.

    Args:
        limits: Limits of the engine.
        faults: By request id, the first position whose computation fails the iteration.
        applies: Whether a failing iteration still changes the device's state.
        error: The exception to raise.
    """

    def __init__(
        self,
        limits: EngineLimits,
        faults: dict[int, int],
        applies: bool = True,
        error: InflightError | None = None,
    ) -> None:
        self._engine = FakeEngine(limits)
        self._faults = faults
        self._applies = applies
        self._error = error or StepFailed("boom")
        self.once: set[int] = set()  # iterations that fail with any requests
        self.num_failures = 0

    def run(self, batch: ScheduledBatch) -> ModelOutput | InflightError:
        """Return the output of a batch, or the error it fails with."""
        fails = batch.iteration in self.once or self._is_at_fault(batch)
        try:
            if fails and not self._applies:
                raise self._error
            logits = self._engine.forward(batch)
            if fails:
                raise self._error
            return self._engine.decode(batch, logits)
        except InflightError as error:
            self.num_failures += 1
            return error
        except Exception as error:  # the failed batch should have written this slot's state
            return StepFailed(repr(error))

    def _is_at_fault(self, batch: ScheduledBatch) -> bool:
        slots = self._engine._slots
        owners = {slot: held.start.request for slot, held in slots.items()}
        owners.update({start.slot: start.request for start in batch.starts})
        owners.update(
            {move.slot: owners[move.parent_slot] for move in batch.moves if move.parent_slot in owners}
        )
        ends = {chunk.slot: chunk.start + len(chunk.token_ids) - 1 for chunk in batch.context}
        moved = {move.slot: move.parent_slot for move in batch.moves}
        for slot in batch.generation_slots:
            held = slots.get(moved.get(slot, slot))
            ends[slot] = held.num_tokens if held else 0
        return any(
            slot in owners and position >= self._faults.get(owners[slot].request_id, 1 << 62)
            for slot, position in ends.items()
        )


@dataclass
class Outcome:
    """Result of a run: the responses by request, and the requests being retried, if any."""

    responses: dict[int, list[Response]] = field(default_factory=dict)
    trials: list[tuple[int, ...]] = field(default_factory=list)
    num_iterations: int = 0

    def tokens(self, request_id: int, sequence_index: int = 0) -> list[int]:
        """All tokens of a sequence, streamed or not, without the prompt."""
        results = [r.result for r in self.responses[request_id] if r.result]
        return [
            token
            for result in results
            if result.sequence_index == sequence_index
            for token in result.output_token_ids[0]
        ]

    def failed(self) -> dict[int, str]:
        """Messages of requests that ended with an error."""
        return {
            request_id: str(responses[-1].error)
            for request_id, responses in self.responses.items()
            if responses[-1].error is not None
        }


def run(
    scheduler: Scheduler, device: FaultyDevice, arrivals: dict[int, list[Request]], depth: int = 1
) -> Outcome:
    """Run until idle, with up to `depth` batches in flight.

    Check that each request's last response is final.
    """
    outcome = Outcome()
    in_flight: deque[tuple[ScheduledBatch, ModelOutput | InflightError]] = deque()
    while outcome.num_iterations <= max(arrivals) or scheduler.num_active:
        iteration = outcome.num_iterations
        assert iteration < 2000, "the scheduler makes no progress"
        inputs = IterationInput(iteration, iteration + 1, tuple(arrivals.get(iteration, ())))
        responses = scheduler.accept(inputs)
        batch = scheduler.schedule()
        if batch is not None:
            in_flight.append((batch, device.run(batch)))
            _note_trial(outcome, scheduler)
        if in_flight and (batch is None or len(in_flight) == depth):
            responses += _come_back(scheduler, *in_flight.popleft())
        for response in responses:
            earlier = outcome.responses.setdefault(response.request_id, [])
            assert not (earlier and earlier[-1].is_final), "a response after the final one"
            earlier.append(response)
        check_integrity(scheduler)
        outcome.num_iterations += 1
    assert all(responses[-1].is_final for responses in outcome.responses.values())
    assert scheduler.kv_cache.pool.num_held == scheduler.kv_cache.num_reserved == 0
    return outcome


def _note_trial(outcome: Outcome, scheduler: Scheduler) -> None:
    state = scheduler.state()
    if state.suspects:
        outcome.trials.append(
            tuple(dict.fromkeys(one.request_id for one in state.running if one.scheduled_tokens))
        )


def _come_back(
    scheduler: Scheduler, batch: ScheduledBatch, answer: ModelOutput | InflightError
) -> list[Response]:
    if isinstance(answer, InflightError):
        return scheduler.fail(batch, answer)
    return scheduler.update(batch, answer, now_ns=batch.iteration + 2)

"""Parts of an engine that raise on command, and a server that survives it."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from inflight.config import SchedulingConfig
from inflight.core.ports import Engine
from inflight.core.request.request import IterationInput, Request
from inflight.core.request.response import Response, SequenceResult, merge_responses
from inflight.core.schedule.batch import ScheduledBatch
from inflight.core.scheduler import Scheduler
from inflight.engine.engine import ModelEngine, RowOutputs
from inflight.errors import StepFailed
from inflight.testing.simulation.integrity import check_integrity


class Fault(Exception):
    """Raised by a `Saboteur`."""


class Saboteur:
    """Makes a function raise at its next call after `arm`, before or after its work.

    Args:
        monkeypatch: Undoes the change.
        owner: An object or a module.
        name: Name of its function.
        after: Whether the function does its work first.
        skipped_calls: Number of calls, counted from `arm`, that succeed first.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, after: bool, skipped_calls: int = 0
    ) -> None:
        self.num_faults = 0
        self._skipped_calls = skipped_calls
        self._calls_left: int | None = None
        self._batch: ScheduledBatch | None = None
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            is_meant = self._batch is None or any(arg is self._batch for arg in args)
            is_due = is_meant and self._is_due()
            if is_due and not after:
                self._raise()
            result = original(*args, **kwargs)
            if is_due:
                self._raise()
            return result

        monkeypatch.setattr(owner, name, call)

    def arm(self, batch: ScheduledBatch | None = None) -> None:
        """Raise at the next call; with a batch, at a call that gets it, as earlier batches may be in flight."""
        self._batch = batch
        self._calls_left = self._skipped_calls

    def disarm(self) -> None:
        """Stop raising."""
        self._calls_left = None

    @property
    def is_armed(self) -> bool:
        return self._calls_left is not None

    def _is_due(self) -> bool:
        if self._calls_left is None:
            return False
        self._calls_left -= 1
        return self._calls_left < 0

    def _raise(self) -> None:
        self.disarm()
        self.num_faults += 1
        raise Fault("on command")


def spoil(engine: ModelEngine, faulty_id: int, num_tokens: int) -> None:
    """Make a request's logits NaN once it has more than `num_tokens` tokens, in every batch."""
    original, slots = engine.runner.run, engine.sampler._slots

    def forward(batch: ScheduledBatch, hidden: torch.Tensor | None) -> RowOutputs:
        outputs = original(batch, hidden)
        logits = outputs.rows
        for row, slot in enumerate(batch.sampled_slots()):
            found = slots.requests[slot]
            is_faulty = found is not None and found.request.request_id == faulty_id
            if is_faulty and engine.runner.slots.num_tokens[slot] > num_tokens:
                logits = logits.clone()  # the engine owns its own
                logits[row] = torch.nan
        return replace(outputs, rows=logits)

    engine.runner.run = forward


def serve_through_faults(
    engine: Engine,
    config: SchedulingConfig,
    requests: Sequence[Request],
    saboteur: Saboteur | None = None,
    period: int = 7,
    faulty_id: int | None = None,
) -> dict[tuple[int, int], SequenceResult]:
    """Serve and return every sequence's whole result, by request id and sequence index.

    Args:
        engine: The engine under test.
        config: Configuration of the scheduler.
        requests: The requests, two of which arrive per iteration.
        saboteur: If given, it is armed at the start and every `period` iterations, until a batch of several
            requests has failed: a request that fails alone would be ended.
        period: Number of iterations.
        faulty_id: The only request that ends with an error, which it causes itself.
    """
    server = _FaultyServer(engine, config, saboteur)
    responses: dict[tuple[int, int], list[Response]] = {}
    errors: list[Exception] = []
    for iteration in itertools.count():
        if iteration % period == 0:
            server.wants_fault = True
        new = server.step(iteration, tuple(requests[2 * iteration : 2 * iteration + 2]))
        if new is None:
            break
        for response in new:
            if response.error is not None:
                assert response.request_id == faulty_id, response.error
                errors.append(response.error)
                continue
            responses.setdefault((response.request_id, response.sequence_index), []).append(response)
    assert server.scheduler.num_active == 0
    assert len(errors) == (faulty_id is not None)
    return {key: merge_responses(found).result for key, found in responses.items()}


class _FaultyServer:
    """A loop around an engine that fails now and then.

    Attributes:
        wants_fault: Whether to arm the saboteur for the next batch of several requests.
    """

    def __init__(self, engine: Engine, config: SchedulingConfig, saboteur: Saboteur | None) -> None:
        self.scheduler = Scheduler(config, engine.limits)
        self.wants_fault = False
        self._engine = engine
        self._saboteur = saboteur
        self._armed_for: ScheduledBatch | None = None
        self._of_slot: dict[int, int] = {}
        self._in_flight: deque[tuple[ScheduledBatch, Any]] = deque()

    def step(self, iteration: int, arriving: tuple[Request, ...]) -> list[Response] | None:
        """Run one iteration and return its responses; None if nothing is left to do."""
        new = self.scheduler.accept(IterationInput(iteration, 0, arriving))
        batch = self.scheduler.schedule()
        if batch is None and not self._in_flight:
            return None
        if batch is not None:
            self._arm(batch)
            self._in_flight.append((batch, self._launch(batch)))
        for _ in range(self._engine.limits.num_due(len(self._in_flight), batch)):
            new += self._finish(*self._in_flight.popleft())
        check_integrity(self.scheduler)
        return new

    def _arm(self, batch: ScheduledBatch) -> None:
        """Arm the saboteur for this batch if a fault is wanted and the batch has several requests."""
        for slot in batch.released_slots:
            self._of_slot.pop(slot, None)
        self._of_slot.update({start.slot: start.request.request_id for start in batch.starts})
        rows = (*(chunk.slot for chunk in batch.context), *batch.generation_slots)
        num_requests = len({self._of_slot[slot] for slot in rows if slot in self._of_slot})
        if self._saboteur and self.wants_fault and not self._saboteur.is_armed and num_requests > 1:
            limits = self._engine.limits
            has_several = limits.num_micro_batches > 1 or limits.overlaps_iterations
            self._saboteur.arm(batch if has_several else None)
            self._armed_for = batch

    def _launch(self, batch: ScheduledBatch) -> Any:
        """Return the logits, or the exception that the forward pass raised."""
        try:
            return self._engine.forward(batch)
        except (Fault, StepFailed) as fault:
            return fault
        except ValueError as refusal:  # the batch continues one in flight that has failed
            assert any(isinstance(ahead, Exception) for _, ahead in self._in_flight), refusal
            return refusal

    def _finish(self, batch: ScheduledBatch, logits: Any) -> list[Response]:
        try:
            if isinstance(logits, Exception):
                raise logits
            output = self._engine.decode(batch, logits)
        except (Fault, ValueError, FloatingPointError, StepFailed) as fault:
            self.wants_fault = False
            new = self.scheduler.fail(batch, StepFailed(str(fault)))
        else:
            new = self.scheduler.update(batch, output)
        if self._saboteur and batch is self._armed_for:
            self._saboteur.disarm()
        return new

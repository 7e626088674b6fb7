"""Parts of an engine that raise on command, and a server that has to live with it."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from inflight.core.batch import ScheduledBatch
from inflight.core.config import SchedulerConfig
from inflight.core.ports import Engine
from inflight.core.request import IterationInput, Request
from inflight.core.response import Result, merge_responses
from inflight.core.scheduler import Scheduler
from inflight.engine.torch import TorchEngine
from inflight.errors import StepFailed


class Fault(Exception):
    """Raised by a `Saboteur`."""


class Saboteur:
    """Lets a function raise when it is called next after `arm`: before it does anything, or when it is done.

    Args:
        monkeypatch: Undoes it.
        owner: An object or a module.
        name: Which function of it.
        after: Whether it does its work first.
        skipped_calls: So many calls come first, counted from `arm`.
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
        """Be ready to raise; with a batch, in a call that it is handed to: earlier ones may be in flight."""
        self._batch = batch
        self._calls_left = self._skipped_calls

    def disarm(self) -> None:
        """Raise no more."""
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


def spoil(engine: TorchEngine, guilty_id: int, num_tokens: int) -> None:
    """Let a request's logits be nan once it has more than so many tokens, whatever batch it is in."""
    original, slots = engine._forward, engine._decoding._slots

    def forward(batch: ScheduledBatch, hidden: torch.Tensor | None) -> tuple[torch.Tensor, Any]:
        logits, context = original(batch, hidden)
        for row, slot in enumerate(batch.sampled_slots()):
            found = slots.requests[slot]
            is_guilty = found is not None and found.request.request_id == guilty_id
            if is_guilty and engine._slots.num_tokens[slot] > num_tokens:
                logits = logits.clone()  # those that the engine made are its own
                logits[row] = torch.nan
        return logits, context

    engine._forward = forward


def serve_through_faults(
    engine: Engine,
    config: SchedulerConfig,
    requests: Sequence[Request],
    saboteur: Saboteur | None = None,
    period: int = 7,
    guilty_id: int | None = None,
) -> dict[tuple[int, int], Result]:
    """Every sequence's whole result, by request id and sequence index.

    Args:
        engine: Under test.
        config: Of the scheduler.
        requests: Two arrive in an iteration.
        saboteur: If there is one, armed at the start and every `period` iterations, until a batch of several
            requests has failed: one that fails alone is ended.
        period: In iterations.
        guilty_id: The one request that ends with an error, by its own fault.
    """
    scheduler = Scheduler(config, engine.limits)
    responses: dict[tuple[int, int], list] = {}
    errors: list[Exception] = []
    wants_fault = False
    of_slot: dict[int, int] = {}
    in_flight: deque[tuple[ScheduledBatch, Any]] = deque()
    armed_for: ScheduledBatch | None = None
    limits = engine.limits
    for iteration in itertools.count():
        arriving = tuple(requests[2 * iteration : 2 * iteration + 2])
        new = scheduler.accept(IterationInput(iteration, 0, arriving))
        batch = scheduler.schedule()
        if batch is None and not in_flight:
            break
        if batch is not None:
            wants_fault = wants_fault or iteration % period == 0
            for slot in batch.released_slots:
                of_slot.pop(slot, None)
            of_slot.update({start.slot: start.request.request_id for start in batch.starts})
            rows = (*(chunk.slot for chunk in batch.context), *batch.generation_slots)
            num_requests = len({of_slot[slot] for slot in rows if slot in of_slot})
            if saboteur and wants_fault and not saboteur.is_armed and num_requests > 1:
                saboteur.arm(batch if limits.num_micro_batches > 1 or limits.runs_ahead else None)
                armed_for = batch
            try:
                logits = engine.forward(batch)
            except Fault as fault:
                logits = fault
            except ValueError as refusal:  # it carries on where one in flight has failed
                assert any(isinstance(ahead, Exception) for _, ahead in in_flight), refusal
                logits = refusal
            in_flight.append((batch, logits))
        for _ in range(limits.num_due(len(in_flight), batch)):
            oldest, logits = in_flight.popleft()
            try:
                if isinstance(logits, Exception):
                    raise logits
                output = engine.decode(oldest, logits)
            except (Fault, ValueError, FloatingPointError, StepFailed) as fault:
                wants_fault = False
                new += scheduler.fail(oldest, StepFailed(str(fault)))
            else:
                new += scheduler.update(oldest, output)
            if saboteur and oldest is armed_for:
                saboteur.disarm()
        scheduler.check_integrity()
        for response in new:
            if response.error is not None:
                assert response.request_id == guilty_id, response.error
                errors.append(response.error)
                continue
            responses.setdefault((response.request_id, response.sequence_index), []).append(response)
    assert scheduler.num_active == 0
    assert len(errors) == (guilty_id is not None)
    return {key: merge_responses(found).result for key, found in responses.items()}

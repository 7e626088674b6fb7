"""A fake engine that fails when it is told to, anywhere between the batch's first change and its last token.

Its state after a failure is random: it may have applied nothing, a part or all of the batch. It usually
forgets the batch's slots, as `core/schedule/batch.py` describes. If it has computed the whole batch it may also
keep its state, and then computes the next batch in flight as if nothing had failed.
"""

from __future__ import annotations

import random
from dataclasses import replace
from enum import Enum, auto
from typing import TypeVar

from inflight.core.schedule.batch import EngineLimits, ScheduledBatch
from inflight.testing.fake_engine import FakeEngine, FakeLogits

_T = TypeVar("_T")


class Breakdown(Exception):
    """The device failed on request."""


class _FailureStage(Enum):
    HEARD_NOTHING = auto()
    HEARD_SOME = auto()
    COMPUTED = auto()
    CARRIES_ON = auto()


_COMPUTED = (_FailureStage.COMPUTED, _FailureStage.CARRIES_ON)
_LATE = 0.4  # share of failures that are raised in `decode`, if it chooses the tokens


class SimulatedDevice(FakeEngine):
    """A fake device with planned failures.

    Args:
        limits: Its declared limits.
        seed: Seed of its state after failures.
    """

    def __init__(self, limits: EngineLimits, seed: int) -> None:
        super().__init__(limits)
        self._rng = random.Random(seed)
        self._unheard: set[int] = set()  # slots released by failed batches

    def begin(self, batch: ScheduledBatch, is_behind_failure: bool) -> FakeLogits:
        """Run the forward pass.

        After a failure a batch may start slots whose release the device has missed.
        """
        if is_behind_failure:
            for start in batch.starts:
                if start.slot in self._unheard:
                    self._slots.pop(start.slot, None)
        self._unheard.difference_update(batch.released_slots)
        return self.forward(batch)

    def breaks_down_late(self) -> bool:
        """Whether a failure is raised after the forward pass."""
        return self._rng.random() < _LATE

    def break_down_late(self, batch: ScheduledBatch, logits: FakeLogits) -> None:
        """Raise Breakdown in `decode`, before or after the tokens are chosen."""
        with self._forgotten_on_failure(batch, self._still_there(batch.starts)):
            if self._rng.random() < 0.5:
                self._decode(batch, logits)
            raise Breakdown

    def break_down(self, batch: ScheduledBatch) -> None:
        """Raise Breakdown after a random part of the iteration's work."""
        self._unheard.update(batch.released_slots)
        kind = self._rng.choice([_FailureStage.HEARD_NOTHING, _FailureStage.HEARD_SOME, *_COMPUTED])
        with self._forgotten_on_failure(batch, batch.starts, batch.adapter_loads):
            if kind is _FailureStage.HEARD_SOME:
                self._apply(self._some_of(batch))
            elif kind in _COMPUTED:
                logits = self._forward(batch)
                if self._rng.random() < 0.3:
                    self._decode(batch, logits)
            if kind is not _FailureStage.CARRIES_ON:
                raise Breakdown
        raise Breakdown

    def _some_of(self, batch: ScheduledBatch) -> ScheduledBatch:
        """Return the batch with a random part of its changes."""

        def some(values: tuple[_T, ...]) -> tuple[_T, ...]:
            return values[: self._rng.randint(0, len(values))]

        return replace(
            batch,
            adapter_loads=some(batch.adapter_loads),
            released_slots=some(batch.released_slots),
            starts=some(batch.starts),
            block_copies=some(batch.block_copies),
            moves=(),
            replaced_blocks=(),
            new_blocks=some(batch.new_blocks),
        )

"""A fake engine that fails when it is told to, somewhere between the first delta and the last token.

What it does then is chosen at random: it may have heard nothing, a part or all of the batch. Mostly it forgets the
batch's slots, as `core/schedule/batch.py` has it; but one that had computed everything when it failed may as well
carry on with what it has, and answer a batch that was in flight behind as if nothing had happened.
"""

from __future__ import annotations

import random
from dataclasses import replace
from enum import Enum, auto

from inflight.core.schedule.batch import EngineLimits, ScheduledBatch
from inflight.testing.fake_engine import FakeEngine, FakeLogits


class Breakdown(Exception):
    """The device failed as it was told to."""


class _Breakdown(Enum):
    HEARD_NOTHING = auto()
    HEARD_SOME = auto()
    COMPUTED = auto()
    CARRIES_ON = auto()


_COMPUTED = (_Breakdown.COMPUTED, _Breakdown.CARRIES_ON)
_LATE = 0.4  # of the failures where tokens are chosen later


class SimulatedDevice(FakeEngine):
    """A device that breaks down.

    Args:
        limits: What it declares.
        seed: Of what it does then.
    """

    def __init__(self, limits: EngineLimits, seed: int) -> None:
        super().__init__(limits)
        self._rng = random.Random(seed)
        self._unheard: set[int] = set()  # slots that batches released that failed

    def begin(self, batch: ScheduledBatch, is_behind_failure: bool) -> FakeLogits:
        """The forward pass; behind a failure it may start slots of whose release the device has not heard."""
        if is_behind_failure:
            for start in batch.starts:
                if start.slot in self._unheard:
                    self._slots.pop(start.slot, None)
        self._unheard.difference_update(batch.released_slots)
        return self.forward(batch)

    def breaks_down_late(self) -> bool:
        """Whether a failure is one that is noticed after the forward pass."""
        return self._rng.random() < _LATE

    def break_down_late(self, batch: ScheduledBatch, logits: FakeLogits) -> None:
        """Raise where tokens are chosen."""
        with self._forgotten_on_failure(batch, self._still_there(batch.starts)):
            if self._rng.random() < 0.5:
                self._decode(batch, logits)
            raise Breakdown

    def break_down(self, batch: ScheduledBatch) -> None:
        """Raise, somewhere in an iteration."""
        self._unheard.update(batch.released_slots)
        kind = self._rng.choice([_Breakdown.HEARD_NOTHING, _Breakdown.HEARD_SOME, *_COMPUTED])
        with self._forgotten_on_failure(batch, batch.starts, batch.adapter_loads):
            if kind is _Breakdown.HEARD_SOME:
                self._apply(self._some_of(batch))
            elif kind in _COMPUTED:
                logits = self._forward(batch)
                if self._rng.random() < 0.3:
                    self._decode(batch, logits)
            if kind is not _Breakdown.CARRIES_ON:
                raise Breakdown
        raise Breakdown

    def _some_of(self, batch: ScheduledBatch) -> ScheduledBatch:
        """A batch with fewer deltas."""

        def some(values: tuple) -> tuple:
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

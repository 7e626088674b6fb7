"""A fake engine that fails when it is told to, somewhere between the first delta and the last token.

What it does then is chosen at random: it may have heard nothing, a part or all of the batch. Mostly it forgets the
batch's slots, as `core/batch.py` has it; but one that had computed everything when it failed may as well carry on
with what it has, and answer a batch that was in flight behind as if nothing had happened.
"""

from __future__ import annotations

import random
from dataclasses import replace
from enum import Enum, auto

from inflight.core.batch import EngineLimits, ModelOutput, ScheduledBatch
from inflight.testing.fake_engine import FakeEngine


class Breakdown(Exception):
    """The device failed as it was told to."""


class _Breakdown(Enum):
    HEARD_NOTHING = auto()
    HEARD_SOME = auto()
    COMPUTED = auto()
    CARRIES_ON = auto()


_COMPUTED = (_Breakdown.COMPUTED, _Breakdown.CARRIES_ON)


class SimulatedDevice(FakeEngine):
    """A device that breaks down.

    Args:
        limits: What it declares.
        seed: Of what it does then.
    """

    def __init__(self, limits: EngineLimits, seed: int) -> None:
        super().__init__(limits)
        self._rng = random.Random(seed)
        self._unheard: set[int] = set()  # slots that the last batch that failed released

    def run(self, batch: ScheduledBatch, is_behind_failure: bool) -> ModelOutput:
        """One iteration; behind a failure it may start slots of whose release the device has not heard."""
        if is_behind_failure:
            for start in batch.starts:
                if start.slot in self._unheard:
                    self._slots.pop(start.slot, None)
        return self.decode(batch, self.forward(batch))

    def break_down(self, batch: ScheduledBatch) -> None:
        """Raise, somewhere in an iteration."""
        self._unheard = set(batch.released_slots)
        kind = self._rng.choice([_Breakdown.HEARD_NOTHING, _Breakdown.HEARD_SOME, *_COMPUTED])
        with self._forgotten_on_failure(batch):
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
            released_slots=some(batch.released_slots),
            starts=some(batch.starts),
            block_copies=some(batch.block_copies),
            moves=(),
            replaced_blocks=(),
            new_blocks=some(batch.new_blocks),
        )

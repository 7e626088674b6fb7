"""Slots of failed batches: what is remembered of them may be anything, until a sequence starts in them again.

A batch may have been made before an earlier one was known to have failed, and then carry on sequences of that one.
Where that failed before the forward pass, their block tables may be those of the slots' earlier owners, so that
running such a batch would write into blocks that are others' by now. It is refused before anything is touched.
Called by the loop thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from inflight.core.schedule.batch import ScheduledBatch


class VoidSlots:
    """Which slots are void; none, as long as nothing fails."""

    def __init__(self) -> None:
        self._slots: set[int] = set()
        self._last: ScheduledBatch | None = None  # that has begun

    @contextmanager
    def watch(self, batch: ScheduledBatch) -> Iterator[None]:
        """Around what may fail of a batch: if it does, all slots that the batch names are void.

        But for those that the batch behind it, if that has begun, has started anew.
        """
        try:
            yield
        except BaseException:
            self.add(batch, [self._last] if self._last is not None and self._last is not batch else [])
            raise

    def add(self, batch: ScheduledBatch, since: Iterable[ScheduledBatch]) -> None:
        """A batch turns out to have failed when others, `since`, have begun: void is what they did not start anew.

        A sequence may take a slot, get no row and end before its batch is back; the next has the slot by then.
        """
        self._slots |= _named(batch) - {start.slot for later in since for start in later.starts}

    def refuse(self, batch: ScheduledBatch) -> None:
        """Raise ValueError if the batch carries on in a void slot. Starts and moves from sound ones mend slots."""
        self._last = batch
        if not self._slots:
            return
        void = self._slots - {start.slot for start in batch.starts}
        parents = {move.parent_slot for move in batch.moves}
        if not void & parents:
            void -= {move.slot for move in batch.moves}
        if carried_on := void & (_named(batch) | parents):
            raise ValueError(
                f"the batch carries on in slot {min(carried_on)}, whose last batch failed; expected a start first"
            )
        self._slots = void


def _named(batch: ScheduledBatch) -> set[int]:
    """Slots of which a batch changes what is remembered; a moved beam's slot has a row."""
    return {
        *(start.slot for start in batch.starts),
        *(slot for slot, _ in batch.new_blocks),
        *(chunk.slot for chunk in batch.context),
        *batch.generation_slots,
    }

"""Batches that may and may not run after one whose failure was noticed when later ones had started."""

from __future__ import annotations

import pytest

from inflight.core.request.request import Request
from inflight.core.schedule.batch import BeamMove, ContextChunk, ScheduledBatch, SlotStart
from inflight.engine.slots import VoidSlots


def start(slot: int) -> SlotStart:
    return SlotStart(slot, Request(slot, (1, 2), 5))


FAILED = ScheduledBatch(
    0, starts=(start(1), start(2)), context=(ContextChunk(1, 0, (1, 2), True),), generation_slots=(3,)
)


@pytest.mark.parametrize("slot", [1, 2, 3])
def test_slots_of_a_failed_batch_are_refused(slot: int) -> None:
    slots = VoidSlots()
    slots.add(FAILED, since=[ScheduledBatch(1, generation_slots=(4,))])
    slots.refuse(ScheduledBatch(2, generation_slots=(4,)))
    with pytest.raises(ValueError, match=f"continues in slot {slot}, whose last batch failed"):
        slots.refuse(ScheduledBatch(3, generation_slots=(slot,)))
    with pytest.raises(ValueError, match=f"continues in slot {slot}, whose last batch failed"):
        slots.refuse(ScheduledBatch(4, moves=(BeamMove(0, slot, 9),), generation_slots=(0,)))
    slots.refuse(ScheduledBatch(5, starts=(start(slot),), generation_slots=(slot,)))
    slots.refuse(ScheduledBatch(6, generation_slots=(slot,)))


def test_a_slot_that_a_later_batch_has_started_is_accepted() -> None:
    """Slot 2's sequence had no row and ended; another sequence has the slot."""
    slots = VoidSlots()
    later = ScheduledBatch(1, starts=(start(2),), context=(ContextChunk(2, 0, (1, 2), True),))
    slots.refuse(later)
    slots.add(FAILED, since=[later])
    slots.refuse(ScheduledBatch(2, generation_slots=(2,)))
    with pytest.raises(ValueError, match="continues in slot 3"):
        slots.refuse(ScheduledBatch(3, generation_slots=(2, 3)))

"""Slots: the lowest is taken first, released ones are reported once."""

from __future__ import annotations

import pytest

from inflight.core.schedule.running import Slots
from inflight.testing.simulation.integrity import check_integrity

from .factories import make_sequence


def test_the_lowest_free_slots_are_taken_and_have_an_owner():
    slots, first, second = Slots(4), make_sequence(), make_sequence()
    assert slots.take(first, 2) == (0, 1)
    assert slots.take(second, 1) == (2,)
    assert slots.owners == {0: first, 1: first, 2: second} and slots.num_free == 1
    slots.release((0, 1))
    assert slots.take(second, 2) == (0, 1)
    check_integrity(slots)


def test_released_slots_are_reported_once():
    slots = Slots(3)
    slots.release(slots.take(make_sequence(), 2))
    assert slots.collect_released() == (0, 1)
    assert slots.collect_released() == ()


def test_slot_changes_of_a_failed_batch_are_repeated():
    """Reported slots are reported again, unless they have an owner or a pending report."""
    slots = Slots(4)
    slots.release(slots.take(make_sequence(), 3))
    told = slots.collect_released()
    slots.take(make_sequence(), 1)
    slots.release(slots.take(make_sequence(), 1))
    slots.release_again(told)
    assert told == (0, 1, 2) and slots.collect_released() == (1, 2)


def test_more_owners_than_slots_are_detected():
    slots = Slots(2)
    slots.take(make_sequence(), 1)
    slots.owners[1] = make_sequence()
    with pytest.raises(AssertionError):
        check_integrity(slots)

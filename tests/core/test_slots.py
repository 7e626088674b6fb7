"""Slots: the lowest first, given back ones told once."""

from __future__ import annotations

from inflight.core.slots import Slots

from .test_llm_request import make_llm_request


def test_the_lowest_free_slots_are_taken_and_have_an_owner():
    slots, first, second = Slots(4), make_llm_request(), make_llm_request()
    assert slots.take(first, 2) == (0, 1)
    assert slots.take(second, 1) == (2,)
    assert slots.owners == {0: first, 1: first, 2: second} and slots.num_free == 1
    slots.release((0, 1))
    assert slots.take(second, 2) == (0, 1)
    slots.check_integrity()


def test_slots_given_back_are_told_once():
    slots = Slots(3)
    slots.release(slots.take(make_llm_request(), 2))
    assert slots.collect_released() == (0, 1)
    assert slots.collect_released() == ()

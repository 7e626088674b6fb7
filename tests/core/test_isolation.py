"""Halves tried apart: exact sets, and that a faulty one is found in so many failures as the docstring says."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.core.recover.recovery import Isolation


def test_nobody_is_under_suspicion_at_first():
    isolation = Isolation()
    assert (isolation.is_active, isolation.retrying, isolation.suspects) == (False, (), ())


def test_a_failed_set_is_split_and_its_first_half_is_tried_first():
    isolation = Isolation()
    assert isolation.failed((1, 2, 3, 4, 5), was_alone=False) is None
    assert (isolation.retrying, isolation.suspects) == ((1, 2, 3), (1, 2, 3, 4, 5))
    assert isolation.failed((1, 2, 3), was_alone=False) is None
    assert (isolation.retrying, isolation.suspects) == ((1, 2), (1, 2, 3, 4, 5))


def test_the_cleared_are_left_out_and_the_next_are_tried():
    isolation = Isolation()
    isolation.failed((1, 2, 3, 4), was_alone=False)
    isolation.clear()
    assert (isolation.retrying, isolation.suspects) == ((3, 4), (3, 4))
    isolation.clear()
    assert not isolation.is_active and isolation.retrying == ()


def test_some_can_be_tried_again():
    isolation = Isolation()
    isolation.failed((1, 2, 3, 4), was_alone=False)
    isolation.clear(but=(2,))
    assert isolation.suspects == (2, 3, 4) and isolation.retrying == (2,)


def test_one_that_was_alone_is_faulty_and_nothing_more_is_held_against_it():
    isolation = Isolation()
    isolation.failed((1, 2), was_alone=False)
    assert isolation.failed((1,), was_alone=True) == 1
    assert isolation.suspects == (2,)


def test_one_that_was_with_others_is_tried_alone():
    """Beside it were rows that cannot be blamed: they had ended, or followed from an earlier failure."""
    isolation = Isolation()
    assert isolation.failed((1,), was_alone=False) is None
    assert isolation.retrying == (1,)
    assert isolation.failed((1,), was_alone=True) == 1
    assert not isolation.is_active


@pytest.mark.parametrize(
    ("num_requests", "most"), [(1, 1), (2, 2), (3, 3), (4, 3), (8, 4), (64, 7), (100, 8)]
)
def test_the_faulty_one_is_found_by_halving(num_requests, most):
    """As often as one fails with it: log2(n) rounded up, and the first time."""
    everybody = tuple(range(num_requests))
    failures = [find(everybody, {faulty})[0] for faulty in everybody]
    assert max(failures) == most


@settings(deadline=None, derandomize=True)
@given(num_requests=st.integers(1, 40), data=st.data())
def test_any_number_of_faulty_ones_are_found_and_nobody_else(num_requests, data):
    faulty = data.draw(st.sets(st.integers(0, num_requests - 1)))
    _, found = find(tuple(range(num_requests)), faulty)
    assert found == faulty


def find(everybody: tuple[int, ...], faulty: set[int]) -> tuple[int, set[int]]:
    """Run requests that fail whenever a faulty one is among them; how often that was, and who was found."""
    isolation, found = Isolation(), set()
    num_failures = num_iterations = 0
    present = everybody
    while isolation.is_active or faulty - found:
        tried = isolation.retrying or present
        num_iterations += 1
        assert num_iterations < 1000
        if faulty & set(tried):
            num_failures += 1
            certain = isolation.failed(tried, was_alone=len(tried) == 1)
            if certain is not None:
                found.add(certain)
                present = tuple(request_id for request_id in present if request_id != certain)
        else:
            isolation.clear()
    return num_failures, found

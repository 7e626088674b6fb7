"""Retries of failed requests in halves: exact sets, and the number of failures."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.core.recover.recovery import Isolation


def test_no_request_is_suspected_at_first():
    isolation = Isolation()
    assert (isolation.is_active, isolation.retrying, isolation.suspects) == (False, (), ())


def test_a_failed_set_is_split_and_its_first_half_is_tried_first():
    isolation = Isolation()
    assert isolation.failed((1, 2, 3, 4, 5), was_alone=False) is None
    assert (isolation.retrying, isolation.suspects) == ((1, 2, 3), (1, 2, 3, 4, 5))
    assert isolation.failed((1, 2, 3), was_alone=False) is None
    assert (isolation.retrying, isolation.suspects) == ((1, 2), (1, 2, 3, 4, 5))


def test_cleared_requests_are_left_out_and_the_next_half_is_tried():
    isolation = Isolation()
    isolation.failed((1, 2, 3, 4), was_alone=False)
    isolation.clear()
    assert (isolation.retrying, isolation.suspects) == ((3, 4), (3, 4))
    isolation.clear()
    assert not isolation.is_active and isolation.retrying == ()


def test_a_part_of_a_failed_set_can_be_retried():
    isolation = Isolation()
    isolation.failed((1, 2, 3, 4), was_alone=False)
    isolation.clear(but=(2,))
    assert isolation.suspects == (2, 3, 4) and isolation.retrying == (2,)


def test_a_request_that_fails_alone_is_faulty_and_no_longer_suspected():
    isolation = Isolation()
    isolation.failed((1, 2), was_alone=False)
    assert isolation.failed((1,), was_alone=True) == 1
    assert isolation.suspects == (2,)


def test_a_request_that_failed_beside_others_is_retried_alone():
    """The other rows are not suspected: they had ended, or followed from an earlier failure."""
    isolation = Isolation()
    assert isolation.failed((1,), was_alone=False) is None
    assert isolation.retrying == (1,)
    assert isolation.failed((1,), was_alone=True) == 1
    assert not isolation.is_active


@pytest.mark.parametrize(
    ("num_requests", "most"), [(1, 1), (2, 2), (3, 3), (4, 3), (8, 4), (64, 7), (100, 8)]
)
def test_the_faulty_request_is_found_by_halving(num_requests, most):
    """The number of failures is log2(n) rounded up, plus the first one."""
    everybody = tuple(range(num_requests))
    failures = [find(everybody, {faulty})[0] for faulty in everybody]
    assert max(failures) == most


@settings(deadline=None, derandomize=True)
@given(num_requests=st.integers(1, 40), data=st.data())
def test_exactly_the_faulty_requests_are_found(num_requests, data):
    faulty = data.draw(st.sets(st.integers(0, num_requests - 1)))
    _, found = find(tuple(range(num_requests)), faulty)
    assert found == faulty


def find(everybody: tuple[int, ...], faulty: set[int]) -> tuple[int, set[int]]:
    """Run sets that fail if a faulty request is among them.

    Return the number of failures and the found ones.
    """
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

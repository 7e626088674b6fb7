"""Failure detection of ranks, with a clock set by the test."""

from __future__ import annotations

import pytest

from inflight.ranks.failure_detector import NEVER, FailureDetector, Loss


@pytest.fixture
def failure_detector() -> FailureDetector:
    failure_detector = FailureDetector([1, 2], timeout_s=5.0)
    failure_detector.record_message(1, 100.0, 0)
    failure_detector.record_message(2, 100.0, 0)
    return failure_detector


def test_silence_is_a_loss_after_the_timeout(failure_detector):
    failure_detector.record_message(1, 103.0)
    assert failure_detector.loss(105.0, 0) is None
    assert failure_detector.loss(105.1, 0) == Loss(2, "it has been silent for 5.1 s")


def test_a_peer_that_has_not_begun_is_not_lost():
    failure_detector = FailureDetector([1], timeout_s=5.0)
    assert failure_detector.loss(1000.0, 0) is None
    failure_detector.record_message(1, 1000.0, 0)
    assert failure_detector.loss(1005.1, 0) is not None


def test_a_peer_that_left_is_not_lost(failure_detector):
    failure_detector.left(1)
    failure_detector.record_message(2, 200.0)
    assert failure_detector.loss(201.0, 0) is None


def test_forgiving_a_rank_restarts_its_timeout(failure_detector):
    failure_detector.failed(1, 7, 100.0)
    failure_detector.forgive(160.0)
    assert failure_detector.loss(165.0, 7) is None
    assert failure_detector.loss(165.1, 7) == Loss(1, "it has been silent for 5.1 s")


def beat(failure_detector: FailureDetector, now_s: float, *progress: int) -> None:
    for rank, done in enumerate(progress, 1):
        failure_detector.record_message(rank, now_s, done)


@pytest.mark.parametrize(
    ("own", "others", "is_lost"),
    [(18, (18, 18), False), (18, (20, 19), False), (17, (18, 18), True), (18, (18, 17), True)],
)
def test_a_failed_rank_is_lost_if_another_rank_does_not_pass_its_iteration(
    failure_detector, own, others, is_lost
):
    failure_detector.failed(2, 17, 100.0)
    beat(failure_detector, 104.9, *others)
    assert failure_detector.loss(105.0, own) is None
    beat(failure_detector, 105.1, *others)
    loss = failure_detector.loss(105.1, own)
    assert loss == (Loss(2, "it failed alone in iteration 17: the others wait for it") if is_lost else None)


def test_a_failure_is_forgotten_when_all_ranks_are_in_later_iterations(failure_detector):
    failure_detector.failed(2, 17, 100.0)
    beat(failure_detector, 106.0, 18, 18)
    assert failure_detector.loss(106.0, 18) is None
    beat(failure_detector, 120.0, 0, 0)
    assert failure_detector.loss(120.0, 0) is None


def test_this_process_may_be_the_failed_rank(failure_detector):
    failure_detector.failed(0, 3, 100.0)
    beat(failure_detector, 105.1, 3, 3)
    assert failure_detector.loss(105.1, 4) == Loss(
        0, "it failed alone in iteration 3: the others wait for it"
    )


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_is_out_of_step_is_lost_at_once(failure_detector, rank):
    failure_detector.failed(rank, NEVER, 100.0)
    assert failure_detector.loss(100.0, 99) == Loss(rank, "it is no longer in lockstep with the others")


def test_progress_of_a_rank_that_left_is_not_waited_for(failure_detector):
    failure_detector.failed(2, 17, 100.0)
    failure_detector.left(1)
    failure_detector.record_message(2, 105.1, 18)
    assert failure_detector.loss(105.1, 18) is None

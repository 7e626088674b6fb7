"""Joining waiting responses of one stream."""

from __future__ import annotations

from inflight.core.response import Response, Result, merge_responses
from inflight.core.stop import FinishReason
from inflight.errors import StepFailed


def test_deltas_are_joined_and_the_later_one_decides():
    earlier = Response(1, Result((5, 6), 3, 2))
    later = Response(1, Result((7,), 3, 1, FinishReason.LENGTH), is_final=True)
    assert merge_responses([earlier, later]) == Response(
        1, Result((5, 6, 7), 3, 3, FinishReason.LENGTH), is_final=True
    )


def test_an_error_is_the_last_word():
    failed = Response(1, error=StepFailed("boom"), is_final=True)
    assert merge_responses([Response(1, Result((5,), 3, 1)), failed]) is failed


def test_a_cancellation_is_the_last_word_and_carries_no_tokens():
    cancelled = Response(1, Result((), 3, 0, FinishReason.CANCELLED), is_final=True)
    assert merge_responses([Response(1, Result((5,), 3, 1)), cancelled]) is cancelled

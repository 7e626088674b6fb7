"""The stream interval: how many tokens a response of a stream waits for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.core.request.response import Response
from inflight.endpoint.delivery import Delivery
from inflight.errors import StepFailed
from tests.endpoint.factories import delta


def handed_on(interval: int, responses: list[Response]) -> list[list[Response]]:
    """Return the responses that can be taken after each one is put."""
    delivery: Delivery[Response] = Delivery(interval=interval, merges=False)
    steps = []
    for response in responses:
        delivery.put(response)
        steps.append(delivery.take(0))
    assert not delivery._held, "nothing is kept of requests that have ended"
    return steps


def test_every_token_is_sent_at_once_by_default() -> None:
    responses = [delta(1, 0), delta(1, 1), delta(1, 2, final=True)]
    assert handed_on(1, responses) == [[response] for response in responses]


def test_the_first_and_the_last_token_never_wait() -> None:
    tokens = [delta(1, token) for token in range(6)] + [delta(1, 6, final=True)]
    sizes = [len(step) for step in handed_on(4, tokens)]
    assert sizes == [1, 0, 0, 0, 4, 0, 2]


def test_accepted_draft_tokens_count_individually() -> None:
    tokens = [delta(1, 0), delta(1, 1, 2, 3), delta(1, 4, 5), delta(1, 6, final=True)]
    assert [len(step) for step in handed_on(4, tokens)] == [1, 0, 2, 1]


def test_each_sequence_is_held_back_separately() -> None:
    tokens = [
        delta(1, 0),
        delta(1, 1, sequence_index=1),
        delta(2, 2),
        delta(1, 3),
        delta(1, 4, sequence_index=1),
        delta(1, 5),
        delta(2, 6, final=True),
        delta(1, 7, final=True),
    ]
    assert [len(step) for step in handed_on(3, tokens)] == [1, 1, 1, 0, 0, 0, 1, 4]


def test_an_error_does_not_wait() -> None:
    error = Response(1, error=StepFailed("boom"), is_final=True)
    assert handed_on(3, [delta(1, 0), delta(1, 1), error])[-1][-1] == error


def test_held_back_tokens_are_merged_with_waiting_responses() -> None:
    delivery: Delivery[Response] = Delivery(interval=3)
    for token in range(4):
        delivery.put(delta(1, token))
    assert delivery.take() == [delta(1, 0, 1, 2, 3)]
    delivery.put(delta(1, 4))
    assert delivery.take(0) == [] and delivery.count() == 0


@pytest.mark.parametrize("interval", [1, 2, 3, 7])
@given(st.lists(st.integers(0, 3), max_size=40))
def test_no_token_is_lost_and_each_sequence_keeps_its_order(interval: int, counts: list[int]) -> None:
    responses = [delta(1, *range(10 * i, 10 * i + count)) for i, count in enumerate(counts)]
    responses.append(delta(1, 999, final=True))
    assert [each for step in handed_on(interval, responses) for each in step] == responses

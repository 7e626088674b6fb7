from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from inflight.core.response import Response
from inflight.endpoint.mailbox import Mailbox
from inflight.errors import StepFailed
from tests.endpoint.factories import PATIENCE_S, delta


def test_responses_of_one_request_are_joined() -> None:
    mailbox = Mailbox()
    for token in range(5):
        mailbox.put(delta(7, token))
    mailbox.put(delta(7, 5, final=True))
    assert mailbox.get() == [delta(7, 0, 1, 2, 3, 4, 5, final=True)]
    assert len(mailbox) == 0


def test_whoever_waits_longest_is_served_first() -> None:
    mailbox = Mailbox()
    for request_id in (3, 1, 2, 3, 1):
        mailbox.put(delta(request_id, request_id))
    assert [response.request_id for response in mailbox.get(limit=2)] == [3, 1]
    mailbox.put(delta(3, 9))  # has just been served: goes behind 2
    assert [response.request_id for response in mailbox.get(limit=1)] == [2]
    assert mailbox.get() == [delta(3, 9)]


def test_an_error_is_the_last_word() -> None:
    mailbox = Mailbox()
    error = Response(1, error=StepFailed("boom"), is_final=True)
    mailbox.put(delta(1, 4))
    mailbox.put(error)
    assert mailbox.get() == [error]


def test_nothing_to_get() -> None:
    mailbox = Mailbox()
    assert mailbox.get(timeout=0) == []


def test_close_delivers_what_waits_and_then_nothing() -> None:
    mailbox = Mailbox()
    mailbox.put(delta(1, 4))
    mailbox.close()
    mailbox.put(delta(1, 5))
    assert mailbox.get() == [delta(1, 4)]
    assert mailbox.get() == []


def test_close_wakes_every_consumer() -> None:
    mailbox = Mailbox()
    consumers = [threading.Thread(target=mailbox.get) for _ in range(3)]
    for consumer in consumers:
        consumer.start()
    mailbox.close()
    for consumer in consumers:
        consumer.join(PATIENCE_S)
        assert not consumer.is_alive()


@given(st.integers(1, 5), st.lists(st.integers(0, 4), min_size=1, max_size=200), st.integers(0, 3))
def test_no_token_is_lost_or_reordered(num_consumers: int, requests: list[int], limit: int) -> None:
    mailbox = Mailbox()
    received: list[list[Response]] = [[] for _ in range(num_consumers)]

    def consume(mine: list[Response]) -> None:
        while taken := mailbox.get(limit, PATIENCE_S):
            mine.extend(taken)

    threads = [threading.Thread(target=consume, args=(mine,)) for mine in received]
    for thread in threads:
        thread.start()
    for position, request_id in enumerate(requests):
        mailbox.put(delta(request_id, position))
    mailbox.close()
    for thread in threads:
        thread.join(PATIENCE_S)

    tokens = sorted(t for mine in received for r in mine for t in r.result.output_token_ids)
    assert tokens == list(range(len(requests)))
    for mine in received:
        for request_id in set(requests):
            own = [t for r in mine if r.request_id == request_id for t in r.result.output_token_ids]
            assert own == sorted(own)

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.core.request.request import FloatTensor
from inflight.core.request.response import Response
from inflight.endpoint.mailbox import MAX_JOINED_LOGITS_BYTES, Mailbox
from inflight.errors import StepFailed
from tests.endpoint.factories import PATIENCE_S, delta, make_result


def drained(mailbox: Mailbox, limit: int) -> list[Response]:
    """Everything that waits, taken `limit` at a time."""
    taken: list[Response] = []
    while len(mailbox):
        some = mailbox.get(limit)
        assert some and (not limit or len(some) <= limit)
        taken += some
    return taken


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


def test_sequences_of_a_request_are_joined_apart() -> None:
    mailbox = Mailbox()
    for index, token in ((0, 1), (1, 2), (0, 3), (1, 4)):
        mailbox.put(delta(7, token, sequence_index=index))
    assert mailbox.get() == [delta(7, 1, 3), delta(7, 2, 4, sequence_index=1)]
    assert len(mailbox) == 0


@pytest.mark.parametrize("limit", [0, 1, 2])
@pytest.mark.parametrize("last", [0, 1, 2])
def test_a_final_response_comes_out_last(last: int, limit: int) -> None:
    mailbox = Mailbox()
    mailbox.put(delta(7, 5, sequence_index=last))
    mailbox.put(delta(8, 1))
    for index in {0, 1, 2} - {last}:
        mailbox.put(delta(7, index, sequence_index=index))
    mailbox.put(delta(7, 6, final=True, sequence_index=last))
    taken = drained(mailbox, limit)
    assert taken[-1] == delta(7, 5, 6, final=True, sequence_index=last)
    assert len(taken) == 4


def test_an_error_drops_what_waits_of_every_sequence() -> None:
    mailbox = Mailbox()
    error = Response(7, error=StepFailed("boom"), is_final=True)
    for index in (2, 0, 1):
        mailbox.put(delta(7, index, sequence_index=index))
    mailbox.put(delta(8, 1))
    mailbox.put(error)
    assert drained(mailbox, limit=1) == [error, delta(8, 1)]


def test_large_logits_are_not_joined_without_end() -> None:
    mailbox = Mailbox()
    row = FloatTensor((1, MAX_JOINED_LOGITS_BYTES // 12), bytes(4 * (MAX_JOINED_LOGITS_BYTES // 12)))
    for token in range(7):
        result = make_result(token, generation_logits=(row,))
        mailbox.put(Response(1, result, is_final=token == 6))
    taken = drained(mailbox, limit=1)
    assert [r.result.output_token_ids[0] for r in taken] == [(0, 1, 2), (3, 4, 5), (6,)]
    assert [r.result.generation_logits[0].shape[0] for r in taken] == [3, 3, 1]
    assert [r.is_final for r in taken] == [False, False, True]


def test_what_is_left_of_large_logits_comes_before_the_final_response() -> None:
    mailbox = Mailbox()
    rows = FloatTensor((1, MAX_JOINED_LOGITS_BYTES // 4), bytes(MAX_JOINED_LOGITS_BYTES))
    for token in range(3):
        mailbox.put(Response(1, make_result(token, generation_logits=(rows,))))
    mailbox.put(delta(1, 9, final=True, sequence_index=1))
    tokens = [r.result.output_token_ids[0] for r in drained(mailbox, limit=0)]
    assert tokens == [(0,), (1,), (2,), (9,)]


def test_logits_larger_than_that_still_come() -> None:
    mailbox = Mailbox()
    rows = FloatTensor((1, MAX_JOINED_LOGITS_BYTES // 2), bytes(2 * MAX_JOINED_LOGITS_BYTES))
    mailbox.put(Response(1, make_result(5, generation_logits=(rows,))))
    assert [r.result.output_token_ids for r in mailbox.get()] == [((5,),)]


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


# Requests of up to three sequences; every put is one token of one of them.
PUTS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), min_size=1, max_size=60)


@given(PUTS, st.lists(st.integers(0, 3), max_size=60))
def test_order_holds_whenever_the_consumer_comes(puts: list[tuple[int, int]], limits: list[int]) -> None:
    mailbox = Mailbox()
    taken: list[Response] = []
    lasts = {request_id: position for position, (request_id, _) in enumerate(puts)}
    for position, (request_id, index) in enumerate(puts):
        final = lasts[request_id] == position
        mailbox.put(delta(request_id, position, final=final, sequence_index=index))
        if position < len(limits):
            taken += mailbox.get(limits[position], timeout=0)
    taken += drained(mailbox, 1)

    for request_id, index in set(puts):
        own = [r for r in taken if (r.request_id, r.sequence_index) == (request_id, index)]
        wanted = [p for p, put in enumerate(puts) if put == (request_id, index)]
        assert [token for r in own for token in r.result.output_token_ids[0]] == wanted
    for request_id in lasts:
        finals = [r.is_final for r in taken if r.request_id == request_id]
        assert finals.count(True) == 1 and finals[-1]


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

    tokens = sorted(t for mine in received for r in mine for t in r.result.output_token_ids[0])
    assert tokens == list(range(len(requests)))
    for mine in received:
        for request_id in set(requests):
            own = [t for r in mine if r.request_id == request_id for t in r.result.output_token_ids[0]]
            assert own == sorted(own)

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.core.request.request import FloatTensor
from inflight.core.request.response import Response
from inflight.endpoint.delivery import MAX_MERGED_LOGITS_BYTES, Delivery
from inflight.errors import StepFailed
from tests.endpoint.factories import PATIENCE_S, delta, make_result


def drained(delivery: Delivery, limit: int = 0) -> list[Response]:
    """Take responses until none waits; `limit` is the delivery's."""
    taken: list[Response] = []
    while delivery.count():
        some = delivery.take()
        assert some and (not limit or len(some) <= limit)
        taken += some
    return taken


def test_responses_of_one_request_are_merged() -> None:
    delivery = Delivery()
    for token in range(5):
        delivery.put(delta(7, token))
    delivery.put(delta(7, 5, final=True))
    assert delivery.take() == [delta(7, 0, 1, 2, 3, 4, 5, final=True)]
    assert delivery.count() == 0


def test_the_longest_waiting_consumer_is_served_first() -> None:
    delivery = Delivery(limit=2)
    for request_id in (3, 1, 2, 3, 1):
        delivery.put(delta(request_id, request_id))
    assert [response.request_id for response in delivery.take()] == [3, 1]
    delivery.put(delta(3, 9))  # has just been served: goes behind 2
    assert delivery.take() == [delta(2, 2), delta(3, 9)]


def test_an_error_replaces_waiting_responses() -> None:
    delivery = Delivery()
    error = Response(1, error=StepFailed("boom"), is_final=True)
    delivery.put(delta(1, 4))
    delivery.put(error)
    assert delivery.take() == [error]


def test_each_sequences_responses_are_merged_separately() -> None:
    delivery = Delivery()
    for index, token in ((0, 1), (1, 2), (0, 3), (1, 4)):
        delivery.put(delta(7, token, sequence_index=index))
    assert delivery.take() == [delta(7, 1, 3), delta(7, 2, 4, sequence_index=1)]
    assert delivery.count() == 0


@pytest.mark.parametrize("limit", [0, 1, 2])
@pytest.mark.parametrize("last", [0, 1, 2])
def test_the_final_response_is_delivered_last(last: int, limit: int) -> None:
    delivery = Delivery(limit)
    delivery.put(delta(7, 5, sequence_index=last))
    delivery.put(delta(8, 1))
    for index in {0, 1, 2} - {last}:
        delivery.put(delta(7, index, sequence_index=index))
    delivery.put(delta(7, 6, final=True, sequence_index=last))
    taken = drained(delivery, limit)
    assert taken[-1] == delta(7, 5, 6, final=True, sequence_index=last)
    assert len(taken) == 4


def test_an_error_drops_waiting_responses_of_every_sequence() -> None:
    delivery = Delivery(limit=1)
    error = Response(7, error=StepFailed("boom"), is_final=True)
    for index in (2, 0, 1):
        delivery.put(delta(7, index, sequence_index=index))
    delivery.put(delta(8, 1))
    delivery.put(error)
    assert drained(delivery, limit=1) == [error, delta(8, 1)]


def test_merged_logits_have_a_size_limit() -> None:
    delivery = Delivery(limit=1)
    row = FloatTensor((1, MAX_MERGED_LOGITS_BYTES // 12), bytes(4 * (MAX_MERGED_LOGITS_BYTES // 12)))
    for token in range(7):
        result = make_result(token, generation_logits=(row,))
        delivery.put(Response(1, result, is_final=token == 6))
    taken = drained(delivery, limit=1)
    assert [r.result.output_token_ids[0] for r in taken] == [(0, 1, 2), (3, 4, 5), (6,)]
    assert [r.result.generation_logits[0].shape[0] for r in taken] == [3, 3, 1]
    assert [r.is_final for r in taken] == [False, False, True]


def test_remaining_pieces_of_large_logits_come_before_the_final_response() -> None:
    delivery = Delivery()
    rows = FloatTensor((1, MAX_MERGED_LOGITS_BYTES // 4), bytes(MAX_MERGED_LOGITS_BYTES))
    for token in range(3):
        delivery.put(Response(1, make_result(token, generation_logits=(rows,))))
    delivery.put(delta(1, 9, final=True, sequence_index=1))
    tokens = [r.result.output_token_ids[0] for r in drained(delivery)]
    assert tokens == [(0,), (1,), (2,), (9,)]


def test_logits_beyond_the_size_limit_are_delivered() -> None:
    delivery = Delivery()
    rows = FloatTensor((1, MAX_MERGED_LOGITS_BYTES // 2), bytes(2 * MAX_MERGED_LOGITS_BYTES))
    delivery.put(Response(1, make_result(5, generation_logits=(rows,))))
    assert [r.result.output_token_ids for r in delivery.take()] == [((5,),)]


def test_unmerged_responses_are_delivered_as_they_were_put() -> None:
    delivery = Delivery(merges=False)
    error = Response(7, error=StepFailed("boom"), is_final=True)
    of_7 = [delta(7, 1, sequence_index=1), delta(7, 2), delta(7, 3, sequence_index=1), error]
    for response in (*of_7[:2], delta(8, 1), *of_7[2:]):
        delivery.put(response)
    assert (delivery.count(), delivery.count(7), delivery.count(9)) == (5, 4, 0)
    assert delivery.take() == [*of_7, delta(8, 1)]


@pytest.mark.parametrize("merges", [True, False])
def test_responses_of_one_request_can_be_taken(merges: bool) -> None:
    delivery = Delivery(limit=1, merges=merges)
    of_2 = [delta(2, 2), delta(2, 3, sequence_index=1)]
    for response in (delta(1, 1), *of_2, delta(3, 4)):
        delivery.put(response)
    assert delivery.take(request_id=2) == of_2
    assert delivery.take(0, request_id=2) == []
    assert drained(delivery) == [delta(1, 1), delta(3, 4)]


def test_a_consumer_of_one_request_is_not_kept_awake_by_another() -> None:
    delivery, taken = Delivery(), []
    consumer = threading.Thread(target=lambda: taken.extend(delivery.take(PATIENCE_S, request_id=2)))
    consumer.start()
    delivery.put(delta(1, 1))
    delivery.put(delta(2, 2))
    consumer.join(PATIENCE_S)
    assert taken == [delta(2, 2)] and delivery.take() == [delta(1, 1)]


def test_on_news_is_called_for_the_first_waiting_response() -> None:
    told: list[int] = []
    delivery = Delivery(limit=1, interval=2, on_news=lambda: told.append(delivery.count()))
    for token in range(3):  # the second one is held back
        delivery.put(delta(1, token))
    delivery.put(delta(2, 5))
    assert told == [1]
    assert drained(delivery) == [delta(1, 0, 1, 2), delta(2, 5)]
    delivery.put(delta(1, 3))
    assert told == [1]
    delivery.put(delta(1, 4))
    assert told == [1, 1 + 1]


def test_run_delivers_every_response_until_the_delivery_is_closed() -> None:
    delivery, got = Delivery(limit=2), []
    for request_id in (1, 2, 3):
        delivery.put(delta(request_id, request_id))
    delivery.close()
    delivery.run(got.append)
    assert got == [[delta(1, 1), delta(2, 2)], [delta(3, 3)]]


def test_taking_from_an_empty_delivery_returns_nothing() -> None:
    delivery = Delivery()
    assert delivery.take(0) == []


def test_close_delivers_waiting_responses_and_then_none() -> None:
    delivery = Delivery()
    delivery.put(delta(1, 4))
    delivery.close()
    delivery.put(delta(1, 5))
    assert delivery.take() == [delta(1, 4)]
    assert delivery.take() == []


def test_close_wakes_every_consumer() -> None:
    delivery = Delivery()
    consumers = [threading.Thread(target=delivery.take) for _ in range(3)]
    for consumer in consumers:
        consumer.start()
    delivery.close()
    for consumer in consumers:
        consumer.join(PATIENCE_S)
        assert not consumer.is_alive()


# Requests of up to three sequences; every put is one token of one of them.
PUTS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), min_size=1, max_size=60)


@given(PUTS, st.integers(0, 3), st.lists(st.booleans(), max_size=60))
def test_responses_keep_their_order_whenever_the_consumer_takes_them(
    puts: list[tuple[int, int]], limit: int, comes: list[bool]
) -> None:
    delivery = Delivery(limit)
    taken: list[Response] = []
    lasts = {request_id: position for position, (request_id, _) in enumerate(puts)}
    for position, (request_id, index) in enumerate(puts):
        final = lasts[request_id] == position
        delivery.put(delta(request_id, position, final=final, sequence_index=index))
        if position < len(comes) and comes[position]:
            taken += delivery.take(0)
    taken += drained(delivery, limit)

    for request_id, index in set(puts):
        own = [r for r in taken if (r.request_id, r.sequence_index) == (request_id, index)]
        wanted = [p for p, put in enumerate(puts) if put == (request_id, index)]
        assert [token for r in own for token in r.result.output_token_ids[0]] == wanted
    for request_id in lasts:
        finals = [r.is_final for r in taken if r.request_id == request_id]
        assert finals.count(True) == 1 and finals[-1]


@given(st.integers(1, 5), st.lists(st.integers(0, 4), min_size=1, max_size=200), st.integers(0, 3))
def test_several_consumers_lose_and_reorder_no_token(
    num_consumers: int, requests: list[int], limit: int
) -> None:
    delivery = Delivery(limit)
    received: list[list[Response]] = [[] for _ in range(num_consumers)]

    def consume(mine: list[Response]) -> None:
        while taken := delivery.take(PATIENCE_S):
            mine.extend(taken)

    threads = [threading.Thread(target=consume, args=(mine,)) for mine in received]
    for thread in threads:
        thread.start()
    for position, request_id in enumerate(requests):
        delivery.put(delta(request_id, position))
    delivery.close()
    for thread in threads:
        thread.join(PATIENCE_S)

    tokens = sorted(t for mine in received for r in mine for t in r.result.output_token_ids[0])
    assert tokens == list(range(len(requests)))
    for mine in received:
        for request_id in set(requests):
            own = [t for r in mine if r.request_id == request_id for t in r.result.output_token_ids[0]]
            assert own == sorted(own)

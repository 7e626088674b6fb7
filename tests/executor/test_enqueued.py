"""The answers that a program takes, and which requests have ended."""

from __future__ import annotations

from inflight.core.request.request import OutputOptions
from inflight.core.request.response import Response
from inflight.errors import Unavailable
from inflight.executor.enqueued import EnqueuedRequests
from inflight.executor.results import Answers, EngineAnswer, ResponseOptions


def answer(request_id: int, answers: Answers | None = None) -> EngineAnswer:
    """Return a final answer."""
    answers = answers or Answers(ResponseOptions(False, False, 1, 8, None, OutputOptions()), 1)
    return answers.add(Response(request_id, error=Unavailable("no"), is_final=True))


def test_answers_can_be_taken_of_one_request_or_of_all() -> None:
    enqueued = EnqueuedRequests()
    one, other = answer(1), answer(2)
    for each in (one, other):
        enqueued.open(each.request_id, each.answers)
        enqueued.put(each)
    assert enqueued.count() == 2 and enqueued.count(2) == 1
    assert enqueued.take(0.0, 2) == [other]
    assert enqueued.take(0.0) == [one]
    assert enqueued.take(0.0) == [] and enqueued.take(0.0, 1) == []


def test_a_request_has_ended_once_its_final_answer_is_taken() -> None:
    enqueued = EnqueuedRequests()
    final = answer(3)
    enqueued.open(3, final.answers)
    enqueued.put(final)
    assert not enqueued.is_ended(3)
    enqueued.take(None, 3)
    assert enqueued.is_ended(3) and not enqueued.is_ended(4)


def test_an_answer_may_be_taken_before_the_request_is_opened() -> None:
    enqueued = EnqueuedRequests()
    final = answer(1)
    enqueued.put(final)
    enqueued.take(None)
    enqueued.open(1, final.answers)
    assert enqueued.is_ended(1)


def test_the_queue_limit_counts_unfinished_sequences() -> None:
    enqueued = EnqueuedRequests()
    assert enqueued.reserve(2, most=3)
    assert not enqueued.reserve(2, most=3)
    assert enqueued.reserve(1, most=3)
    enqueued.release(2)
    assert enqueued.reserve(2, most=3)
    assert enqueued.reserve(100, most=None)


def test_take_returns_at_once_after_close() -> None:
    enqueued = EnqueuedRequests()
    enqueued.close()
    assert enqueued.take(None) == [] and enqueued.take(None, 1) == []

"""The mailbox: who waits for what, and which requests have ended."""

from __future__ import annotations

from inflight.core.request.request import OutputConfig
from inflight.core.request.response import Response
from inflight.errors import Unavailable
from inflight.executor.mailbox import Mailbox
from inflight.executor.results import Answer, Answers, Asked


def answer(request_id: int, answers: Answers | None = None) -> Answer:
    """A final one."""
    answers = answers or Answers(Asked(False, False, 1, 8, None, OutputConfig()), 1)
    return answers.add(Response(request_id, error=Unavailable("no"), is_final=True))


def test_answers_of_one_request_or_of_all() -> None:
    mailbox = Mailbox()
    one, other = answer(1), answer(2)
    for each in (one, other):
        mailbox.open(each.request_id, each.answers)
        mailbox.put(each)
    assert mailbox.count() == 2 and mailbox.count(2) == 1
    assert mailbox.take(2, 0.0) == [other]
    assert mailbox.take_all(0.0) == [one]
    assert mailbox.take_all(0.0) == [] and mailbox.take(1, 0.0) == []


def test_a_request_has_ended_once_its_final_answer_is_taken() -> None:
    mailbox = Mailbox()
    final = answer(3)
    mailbox.open(3, final.answers)
    mailbox.put(final)
    assert not mailbox.is_ended(3)
    mailbox.take(3, None)
    assert mailbox.is_ended(3) and not mailbox.is_ended(4)


def test_an_answer_may_be_taken_before_the_request_is_opened() -> None:
    mailbox = Mailbox()
    final = answer(1)
    mailbox.put(final)
    mailbox.take_all(None)
    mailbox.open(1, final.answers)
    assert mailbox.is_ended(1)


def test_the_bound_counts_what_has_not_ended() -> None:
    mailbox = Mailbox()
    assert mailbox.announce(2, most=3)
    assert not mailbox.announce(2, most=3)
    assert mailbox.announce(1, most=3)
    mailbox.retract(2)
    assert mailbox.announce(2, most=3)
    assert mailbox.announce(100, most=None)


def test_nobody_waits_once_it_is_closed() -> None:
    mailbox = Mailbox()
    mailbox.close()
    assert mailbox.take_all(None) == [] and mailbox.take(1, None) == []

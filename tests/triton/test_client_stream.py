"""The final flag is sent once, and the sender is not used afterwards."""

from __future__ import annotations

import threading

import pytest

from tests.triton.factories import make_stream
from tests.triton.fake_pb_utils import InferenceResponse, ResponseSender


def test_responses_are_sent_before_the_final_flag() -> None:
    sender = ResponseSender()
    stream = make_stream(sender)
    first, last = InferenceResponse(), InferenceResponse()
    stream.send(first)
    stream.finish(last)
    assert [(sent.response, sent.is_final) for sent in sender.sent] == [(first, False), (last, True)]


def test_the_final_flag_can_be_sent_without_a_response() -> None:
    sender = ResponseSender()
    make_stream(sender).finish()
    assert [(sent.response, sent.is_final) for sent in sender.sent] == [(None, True)]


def test_only_the_first_finish_counts() -> None:
    sender = ResponseSender()
    stream = make_stream(sender)
    stream.finish(InferenceResponse())
    stream.finish(InferenceResponse())
    assert len(sender.sent) == 1


def test_no_cancellation_check_after_the_final_flag() -> None:
    sender = ResponseSender()
    sender.cancelled = True
    stream = make_stream(sender)
    assert stream.is_cancelled()
    stream.finish()
    assert not stream.is_cancelled()
    assert sender.times_asked == 1


def test_a_final_response_that_cannot_be_sent_still_ends_the_request() -> None:
    sender = ResponseSender()
    sender.failures = [ValueError("bad tensor")]
    with pytest.raises(ValueError, match="bad tensor"):
        make_stream(sender).finish(InferenceResponse())
    assert [(sent.response, sent.is_final) for sent in sender.sent] == [(None, True)]


def test_cancellation_checks_and_finish_exclude_each_other() -> None:
    """A thread that finishes waits for a cancellation check, because the final flag frees the checked data."""
    asking, may_answer = threading.Event(), threading.Event()

    class SlowSender(ResponseSender):
        def is_cancelled(self) -> bool:
            asking.set()
            may_answer.wait()
            return super().is_cancelled()

    sender = SlowSender()
    stream = make_stream(sender)
    asker = threading.Thread(target=stream.is_cancelled)
    finisher = threading.Thread(target=stream.finish)
    asker.start()
    asking.wait()
    finisher.start()
    finisher.join(0.01)
    assert finisher.is_alive() and not sender.sent
    may_answer.set()
    asker.join()
    finisher.join()
    assert sender.sent and sender.times_asked == 1

"""The fake behaves as the tests rely on; tests on the real server check that the real module agrees."""

from __future__ import annotations

import numpy as np
import pytest

from tests.triton.fake_pb_utils import (
    COMPLETE_FINAL,
    FakePbUtils,
    InferenceRequest,
    InferenceResponse,
    ResponseSender,
    Tensor,
)


def test_nothing_can_be_sent_after_the_final_flag() -> None:
    sender = ResponseSender()
    sender.send(InferenceResponse())
    sender.send(flags=COMPLETE_FINAL)
    with pytest.raises(RuntimeError, match="has been closed"):
        sender.send(InferenceResponse())
    assert [sent.is_final for sent in sender.wait_final()] == [False, True]


def test_a_send_needs_a_response_or_the_final_flag() -> None:
    with pytest.raises(RuntimeError, match="must be provided"):
        ResponseSender().send()


def test_a_cancellation_check_after_the_final_flag_is_an_error() -> None:
    sender = ResponseSender()
    assert not sender.is_cancelled()
    sender.send(flags=COMPLETE_FINAL)
    with pytest.raises(AssertionError, match="after the final flag"):
        sender.is_cancelled()


def test_planned_failures_of_a_sender_come_before_its_responses() -> None:
    sender = ResponseSender()
    sender.failures = [OSError("full")]
    with pytest.raises(OSError, match="full"):
        sender.send(InferenceResponse())
    sender.send(InferenceResponse())
    assert len(sender.sent) == 1


def test_fake_requests_and_tensors_return_their_values() -> None:
    request = InferenceRequest({"a": np.zeros([1])}, ["x"], "id")
    (tensor,) = request.inputs()
    assert (tensor.name(), tensor.as_numpy().tolist()) == ("a", [0.0])
    assert (request.requested_output_names(), request.request_id()) == (["x"], "id")
    assert request.get_response_sender() is request.sender
    with pytest.raises(TypeError, match="needs a numpy array, got list"):
        Tensor("a", [1])


def test_every_fake_module_has_its_own_log() -> None:
    one, other = FakePbUtils(), FakePbUtils()
    one.Logger.log_warn("hm")
    assert one.Logger.lines == [("warn", "hm")] and not other.Logger.lines

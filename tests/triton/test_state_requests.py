"""The state is read on a thread of its own for all waiting requests, and never on execute's thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from inflight.errors import Unavailable
from inflight.tensors.output_table import OUTPUTS
from inflight.tensors.spec import Vocabulary
from tests.lines_of import lines_of
from tests.tensors.factories import make_description, token_inputs
from tests.triton.factories import make_triton_request
from tests.triton.fake_pb_utils import ResponseSender, TritonError
from tests.triton.stage import Stage, error_of, value_of

PATIENCE_S = 60.0
Build = Callable[..., Stage]


class Patient:
    """A state that cannot be read until the test allows it; counts the reads."""

    def __init__(self) -> None:
        self.times = 0
        self.asked, self.may = threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self, timeout_s: float) -> str:
        self.times += 1
        number = self.times
        self.asked.release()
        if not self.may.acquire(timeout=PATIENCE_S):
            raise Unavailable("no iteration has ended")
        return f'{{"number": {number}}}'


@pytest.fixture
def build() -> Iterator[Build]:
    stages: list[Stage] = []

    def make(*args: object, enabled: bool = True, **kwargs: object) -> Stage:
        stage = Stage(*args, **kwargs)
        stage.client.description = make_description(tokenizer_dir="letters", state_enabled=enabled)
        stages.append(stage)
        return stage

    yield make
    for stage in stages:
        stage.front_end.close()


def ask(stage: Stage) -> ResponseSender:
    return stage.take(make_triton_request({"state": np.array([True])}))


@pytest.mark.parametrize("vocabulary", Vocabulary)
@pytest.mark.parametrize("decoupled", [True, False])
def test_a_state_request_has_one_response_with_the_state(
    build: Build, vocabulary: Vocabulary, decoupled: bool
) -> None:
    stage = build(vocabulary, decoupled)
    stage.client.read_state = lambda timeout_s: '{"è": 1}'
    (sent,) = ask(stage).wait_final()
    assert value_of(sent, "state") == ['{"è": 1}'.encode()]
    assert sent.response is not None
    assert sent.response.arrays()["state"].ndim == len(OUTPUTS["state"].dims) + 1
    assert not stage.client.submitted


def test_state_requests_are_refused_unless_enabled(build: Build) -> None:
    code, message = error_of(ask(build(enabled=False)).wait_final()[0])
    assert code == TritonError.UNSUPPORTED and "parameter enable_state_requests" in message


def test_state_false_is_not_a_state_request(build: Build) -> None:
    stage = build(enabled=False)
    sender = stage.take(make_triton_request(token_inputs(state=False)))
    stage.finish([8])
    assert "state" not in sender.wait_final()[0].response.arrays()


def test_execute_does_not_wait_for_the_state_and_waiting_requests_share_it(build: Build) -> None:
    stage = build()
    stage.client.read_state = patient = Patient()
    first = ask(stage)
    assert patient.asked.acquire(timeout=PATIENCE_S)
    later = [ask(stage) for _ in range(3)]
    other = stage.take(make_triton_request())
    stage.finish([8])
    assert value_of(other.wait_final()[0], "output_ids") == [8]
    assert not first.sent
    patient.may.release(2)
    assert value_of(first.wait_final()[0], "state") == [b'{"number": 1}']
    for sender in later:
        assert value_of(sender.wait_final()[0], "state") == [b'{"number": 2}']
    assert patient.times == 2


@pytest.mark.parametrize(
    ("error", "code"),
    [(Unavailable("hangs"), TritonError.UNAVAILABLE), (OSError("hangs"), TritonError.INTERNAL)],
)
def test_a_state_request_gets_the_error_of_reading_the_state(
    build: Build, error: Exception, code: int
) -> None:
    def read_state(timeout_s: float) -> str:
        raise error

    stage = build()
    stage.client.read_state = read_state
    for _ in range(2):  # the thread survives an error
        found, message = error_of(ask(stage).wait_final()[0])
        assert found == code and "hangs" in message


def test_a_failed_reading_of_the_state_is_logged_with_the_request(build: Build) -> None:
    stage = build()
    stage.client.read_state = lambda timeout_s: 1 / 0
    with lines_of("inflight.triton.front_end") as lines:
        stage.take(make_triton_request({"state": np.array([True])}, request_id="a")).wait_final()
    assert lines == ["the state could not be read request_id=a"]


def test_a_disconnected_client_does_not_keep_others_from_the_state(build: Build) -> None:
    stage = build()
    broken = make_triton_request({"state": np.array([True])})
    broken.sender.failures = [RuntimeError("gone"), RuntimeError("gone")]
    stage.take(broken)
    assert value_of(ask(stage).wait_final()[0], "state") == [b"{}"]


def test_waiting_state_requests_are_answered_when_the_front_end_closes() -> None:
    stage = Stage()
    stage.client.description = make_description(state_enabled=True)
    stage.client.read_state = patient = Patient()
    senders = [ask(stage) for _ in range(3)]
    patient.may.release(3)
    stage.front_end.close()
    assert all(sender.sent for sender in senders)

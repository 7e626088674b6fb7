"""Questions for the engine's state and their answers, over the socket; the batcher is played by the test."""

from __future__ import annotations

import json
import socket
import threading

import pytest

from inflight.core.request.stop import StopSignal
from inflight.endpoint import client as endpoint_client
from inflight.endpoint import frames
from inflight.endpoint.client import SocketEngineClient
from inflight.errors import StepFailed, Unavailable, Unsupported
from tests.endpoint.factories import DESCRIPTION, PATIENCE_S, Inbox, make_request
from tests.lines_of import call_for, lines_of


class Asked:
    """A thread that asks for the state; `answer` has the text or the error."""

    def __init__(self, client: SocketEngineClient, timeout_s: float = PATIENCE_S) -> None:
        self._answer: str | Exception | None = None
        self._thread = threading.Thread(target=self._ask, args=(client, timeout_s))
        self._thread.start()

    def _ask(self, client: SocketEngineClient, timeout_s: float) -> None:
        try:
            self._answer = client.state(timeout_s)
        except Exception as error:
            self._answer = error

    @property
    def answer(self) -> str | Exception | None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        return self._answer


class Patient:
    """A batcher that returns its state only after an event."""

    def __init__(self) -> None:
        self.asked, self.may = threading.Event(), threading.Event()

    def __call__(self, timeout_s: float) -> str:
        self.asked.set()
        if not self.may.wait(timeout_s):
            raise Unavailable("no iteration has ended")
        return "{}"


def test_the_state_crosses_the_socket(front_end, batcher) -> None:
    front_end.submit(make_request(), Inbox())
    batcher.take()
    assert json.loads(front_end.state(3.5)) == {
        "queued_requests": 0,
        "unanswered_requests": 1,
        "batcher": {"timeout_s": 3.5},
    }


@pytest.mark.parametrize("error", [Unavailable("no iteration has ended"), Unsupported("nothing to say")])
def test_the_reason_for_a_missing_state_crosses_the_socket(front_end, batcher, error) -> None:
    def read_state(timeout_s: float) -> str:
        raise error

    batcher.read_state = read_state
    with pytest.raises(type(error), match=str(error)):
        front_end.state(1.0)


def test_the_log_line_about_a_missing_state_names_the_clients_request(front_end, batcher) -> None:
    batcher.read_state = lambda timeout_s: "no JSON"
    with lines_of("inflight.endpoint.server") as lines, pytest.raises(StepFailed):
        call_for("a", front_end.state, 1.0)
    assert lines == ["the state could not be read request_id=a"]


def test_an_exception_in_read_state_does_not_end_the_connection(front_end, batcher) -> None:
    batcher.read_state = lambda timeout_s: "no JSON"
    with pytest.raises(StepFailed, match="the state could not be read"):
        front_end.state(1.0)
    inbox = Inbox()
    front_end.submit(make_request(), inbox)
    batcher.answer(batcher.take(), 5)
    assert inbox.final().error is None and inbox.tokens == [5]


def test_stops_and_responses_overtake_a_slow_question(front_end, batcher) -> None:
    batcher.read_state = patient = Patient()
    asked = Asked(front_end)
    assert patient.asked.wait(PATIENCE_S)
    inbox = Inbox()
    handle = front_end.submit(make_request(), inbox)
    request = batcher.take()
    handle.stop()
    assert batcher.stops(1) == {StopSignal(request.request_id)}
    batcher.answer(request)
    assert inbox.final().error is None
    patient.may.set()
    assert json.loads(asked.answer)["batcher"] == {}


def test_a_question_for_the_state_is_answered_when_the_engine_disconnects(front_end, server, batcher) -> None:
    batcher.read_state = patient = Patient()
    asked = Asked(front_end)
    assert patient.asked.wait(PATIENCE_S)
    server.close()
    assert isinstance(asked.answer, Unavailable) and "was lost" in str(asked.answer)
    patient.may.set()  # the socket is closed


def test_a_question_to_a_silent_engine_times_out(path, monkeypatch) -> None:
    monkeypatch.setattr(endpoint_client, "_MARGIN_S", 0.0)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        client = SocketEngineClient(path)
        asked = Asked(client, timeout_s=0.01)
        connected, _ = listening.accept()
        with connected:
            connected.sendall(frames.encode(frames.Hello(DESCRIPTION)))
            assert isinstance(asked.answer, Unavailable) and "did not report its state" in str(asked.answer)
            connected.sendall(frames.encode(frames.State(1, "too late")))
        client.close()

"""Shutdown of a hanging loop: it does not wait for the loop, and all requests are answered."""

from __future__ import annotations

import threading

import pytest

from inflight.batch_manager import GptManager
from inflight.config import SchedulingConfig
from inflight.core.request.request import Request
from inflight.core.request.response import Response
from inflight.core.schedule.batch import EngineLimits, ScheduledBatch
from inflight.core.scheduler import Scheduler
from inflight.endpoint import local
from inflight.endpoint.local import LocalEngineClient
from inflight.errors import Unavailable
from inflight.testing.fake_engine import FakeEngine, FakeLogits
from tests.endpoint.factories import DESCRIPTION, PATIENCE_S, Inbox, delta, make_request

LIMITS = EngineLimits(
    vocab_size=50, max_sequence_length=100, max_num_sequences=4, num_blocks=64, tokens_per_block=4
)


class HangingEngine(FakeEngine):
    """Engine whose first forward pass hangs until it is released."""

    def __init__(self) -> None:
        super().__init__(LIMITS)
        self.begun, self.let_go, self.closed = threading.Event(), threading.Event(), threading.Event()

    def forward(self, batch: ScheduledBatch) -> FakeLogits:
        self.begun.set()
        assert self.let_go.wait(PATIENCE_S)
        return super().forward(batch)

    def close(self) -> None:
        super().close()
        self.closed.set()


def start(engine: FakeEngine) -> tuple[LocalEngineClient, GptManager]:
    client = LocalEngineClient(DESCRIPTION, lambda: manager.notify())
    manager = GptManager(
        engine,
        Scheduler(SchedulingConfig(), LIMITS),
        client.get_inference_requests,
        client.send_response,
        client.poll_stop_signals,
        on_death=client.fail_all,
    )
    return client, manager


def test_shutdown_does_not_close_an_engine_in_which_the_loop_hangs(caplog):
    """Freeing memory under a running kernel would be worse than keeping it."""
    engine = HangingEngine()
    client, manager = start(engine)
    inbox = Inbox()
    client.submit(make_request(new=5), inbox)
    assert engine.begun.wait(PATIENCE_S)
    assert manager.shutdown(timeout_s=0.0) is False
    assert not engine.closed.is_set()
    assert "waits for the device" in caplog.text
    engine.let_go.set()
    assert manager.shutdown(timeout_s=PATIENCE_S) is True
    assert engine.closed.is_set()
    assert inbox.final().error is None  # the active request was finished, as the specification requires


def test_the_state_of_a_hanging_loop_is_unavailable_after_shutdown():
    engine = HangingEngine()
    client, manager = start(engine)
    client.submit(make_request(), Inbox())
    assert engine.begun.wait(PATIENCE_S)
    assert manager.shutdown(timeout_s=0.0) is False
    with pytest.raises(Unavailable):
        manager.state(PATIENCE_S)
    engine.let_go.set()
    assert manager.shutdown() is True


def test_shutdown_without_a_timeout_waits_for_the_active_requests():
    client, manager = start(FakeEngine(LIMITS))
    inbox = Inbox()
    client.submit(make_request(new=50), inbox)
    assert manager.shutdown() is True
    assert manager.shutdown() is True
    assert len(inbox.tokens) == 50


def test_a_drain_answers_all_requests_of_a_hanging_loop(monkeypatch, caplog):
    """Running, fetched and queued requests are answered; later responses of the loop are dropped."""
    monkeypatch.setattr(local, "_PATIENCE_S", 0.0)
    engine = HangingEngine()
    client, manager = start(engine)
    inboxes = [Inbox() for _ in range(4)]
    client.submit(make_request(new=5), inboxes[0])
    assert engine.begun.wait(PATIENCE_S)
    for inbox in inboxes[1:]:
        client.submit(make_request(new=5), inbox)
    client.drain(0.0, "because it hangs")
    assert [str(inbox.final().error) for inbox in inboxes] == ["because it hangs"] * 4
    assert "4 requests are answered without it" in caplog.text
    engine.let_go.set()
    assert manager.shutdown() is True
    assert [len(inbox.responses) for inbox in inboxes] == [1] * 4


def test_no_response_follows_the_final_one():
    """A response is being sent on the loop's thread while another thread answers all requests."""
    client = LocalEngineClient(DESCRIPTION, lambda: None)
    order: list[bool] = []
    failed = threading.Event()

    def fail_all() -> None:
        client.fail_all(Unavailable("no more"))
        failed.set()

    failing = threading.Thread(target=fail_all)

    def on_response(response: Response) -> None:
        if not response.is_final:
            failing.start()
            # `fail_all` must wait until this response is sent. A `fail_all` that does not wait ends at once.
            assert not failed.wait(0.05)
        order.append(response.is_final)

    handle = client.submit(Request(0, (1, 2, 3), 4, True), on_response)
    client.get_inference_requests(-1)
    client.send_response(delta(handle.request_id, 7))
    failing.join(PATIENCE_S)
    client.send_response(delta(handle.request_id, 8))
    assert order == [False, True]

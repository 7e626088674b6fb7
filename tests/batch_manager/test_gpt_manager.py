"""The loop: the order of callbacks, one final response on every path, no processor time when idle."""

from __future__ import annotations

import asyncio
import json
import queue
import threading

import pytest

from inflight.batch_manager import GptManager
from inflight.batch_manager.instruments import NO_INSTRUMENTS, Instruments
from inflight.config import SchedulingConfig
from inflight.core.request.request import Origin, Request
from inflight.core.request.response import Response
from inflight.core.request.stop import FinishReason, StopSignal
from inflight.core.schedule.batch import EngineLimits
from inflight.core.scheduler import Scheduler
from inflight.errors import Unavailable
from inflight.testing.fake_engine import FakeEngine
from inflight.testing.fake_model import expected_tokens

LIMITS = EngineLimits(
    vocab_size=50, max_sequence_length=100, max_num_sequences=4, num_blocks=64, tokens_per_block=4
)


class Harness:
    """A manager whose callbacks use lists, stepped by the test unless `start`."""

    def __init__(
        self, engine=None, config=None, start: bool = False, instruments: Instruments = NO_INSTRUMENTS
    ) -> None:
        self.pending: list[Request] = []
        self.stops: list[StopSignal] = []
        self.calls: list[str] = []
        self.asked_for: list[int] = []
        self.stats: list[dict] = []
        self.responses: list[Response] = []
        self.finals = threading.Semaphore(0)
        self.engine = engine or FakeEngine(LIMITS)
        self.deaths: list[Exception] = []
        self.manager = GptManager(
            self.engine,
            Scheduler(config or SchedulingConfig(), LIMITS),
            self._get,
            self._send,
            self._poll,
            self._stats,
            on_death=self.deaths.append,
            instruments=instruments,
            clock_ns=lambda: 0,
            start=start,
        )

    def _get(self, max_num_requests: int) -> list[Request]:
        self.calls.append("get")
        self.asked_for.append(max_num_requests)
        count = len(self.pending) if max_num_requests < 0 else max_num_requests
        taken, self.pending = self.pending[:count], self.pending[count:]
        return taken

    def _send(self, response: Response) -> None:
        self.calls.append("send")
        self.responses.append(response)
        if response.is_final:
            self.finals.release()

    def _poll(self) -> list[StopSignal]:
        self.calls.append("poll")
        stops, self.stops = self.stops, []
        return stops

    def _stats(self, text: str) -> None:
        self.calls.append("stats")
        self.stats.append(json.loads(text))


def test_callbacks_are_called_in_the_documented_order():
    harness = Harness()
    harness.pending.append(Request(1, (1, 2), 1))
    harness.manager.step()
    assert harness.calls == ["get", "send", "poll", "stats"]


def test_statistics_have_the_documented_keys_and_stop_when_idle():
    harness = Harness()
    harness.manager.step()
    assert harness.stats == []
    harness.pending += [Request(1, (1, 2, 3, 4, 5), 3), Request(2, (1, 2), 3)]
    harness.manager.step()
    harness.manager.step()
    assert list(harness.stats[0]) == [
        "Timestamp", "Iteration Counter", "Active Request Count", "Max Request Count", "Max KV cache blocks",
        "Free KV cache blocks", "Used KV cache blocks", "Tokens per KV cache block", "Scheduled Requests",
        "Context Requests", "Generation Requests", "Total Context Tokens", "MicroBatch ID",
    ]  # fmt: skip
    first, second = harness.stats
    assert (first["Context Requests"], first["Generation Requests"], first["Total Context Tokens"]) == (
        2,
        0,
        7,
    )
    assert (second["Context Requests"], second["Generation Requests"], second["Scheduled Requests"]) == (
        0,
        2,
        2,
    )
    assert first["Used KV cache blocks"] + first["Free KV cache blocks"] == first["Max KV cache blocks"] == 64
    assert second["Iteration Counter"] == first["Iteration Counter"] + 1


def test_the_get_callback_gets_the_number_of_requests_that_fit():
    harness = Harness(config=SchedulingConfig(max_num_requests=2))
    harness.pending += [Request(number, (1,), 5) for number in range(3)]
    harness.manager.step()
    harness.manager.step()
    assert harness.asked_for == [2, 0] and len(harness.pending) == 1
    unbounded = Harness()
    unbounded.manager.step()
    assert unbounded.asked_for == [-1]


def test_a_stop_signal_ends_the_request_in_the_next_iteration():
    harness = Harness()
    harness.pending.append(Request(1, (1, 2), 50, streaming=True))
    harness.manager.step()
    harness.stops.append(StopSignal(1))
    harness.manager.step()
    harness.manager.step()
    assert harness.responses[-1].is_final
    assert harness.responses[-1].result.finish_reasons[0] is FinishReason.CANCELLED


def test_an_id_can_be_used_again_after_its_final_response():
    harness = Harness()
    for _ in range(2):
        harness.pending.append(Request(1, (1, 2), 1))
        harness.manager.step()
    assert [response.error for response in harness.responses] == [None, None]


def test_a_stop_that_comes_after_the_end_does_not_touch_the_next_request_of_that_id():
    harness = Harness()
    harness.pending.append(Request(1, (1, 2), 1))
    harness.stops.append(StopSignal(1))
    harness.manager.step()
    harness.pending.append(Request(1, (1, 2), 3))
    for _ in range(3):
        harness.manager.step()
    reasons = [response.result.finish_reasons[0] for response in harness.responses]
    assert reasons == [FinishReason.LENGTH, FinishReason.LENGTH]


class FailingEngine(FakeEngine):
    def __init__(self) -> None:
        super().__init__(LIMITS)
        self.failures = 1

    def forward(self, batch):
        digests = super().forward(batch)
        if self.failures:
            self.failures -= 1
            raise RuntimeError("device on fire")
        return digests


def test_a_failed_iteration_ends_its_requests_and_later_ones_succeed():
    harness = Harness(engine=FailingEngine())
    harness.pending.append(Request(1, (1, 2), 4))
    harness.manager.step()
    (failed,) = harness.responses
    assert failed.is_final and failed.error.code == "INTERNAL"
    assert "device on fire" in str(failed.error)
    harness.pending.append(Request(2, (1, 2), 4))
    for _ in range(4):
        harness.manager.step()
    assert list(harness.responses[-1].result.output_token_ids[0][2:]) == expected_tokens((1, 2), 4, 50)


def test_the_thread_finishes_active_requests_before_it_ends():
    harness = Harness(start=True)
    for round_ in range(3):
        harness.pending.append(Request(round_, (1, 2, 3), 5))
        harness.manager.notify()
        assert harness.finals.acquire(timeout=60)
    iterations = len(harness.asked_for)
    harness.pending.append(Request(9, (1, 2, 3), 20))
    harness.manager.shutdown()
    assert harness.responses[-1].request_id == 9 and harness.responses[-1].is_final
    assert len(harness.asked_for) < iterations + 30
    harness.manager.shutdown()


def test_requests_beyond_the_bound_are_fetched_without_another_notification():
    harness = Harness(config=SchedulingConfig(max_num_requests=2))
    harness.pending += [Request(number, (1, 2), 3) for number in range(5)]
    harness.manager._thread.start()
    assert all(harness.finals.acquire(timeout=60) for _ in range(5))
    harness.manager.shutdown()


def test_shutdown_takes_waiting_requests_beyond_the_bound():
    harness = Harness(config=SchedulingConfig(max_num_requests=1), start=True)
    harness.pending += [Request(number, (1, 2), 3) for number in range(3)]
    harness.manager.shutdown()
    assert sorted(response.request_id for response in harness.responses) == [0, 1, 2]


class Work(threading.Event):
    """The loop's event; the timeouts of its waits are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.timeouts: queue.Queue[float | None] = queue.Queue()

    def wait(self, timeout: float | None = None) -> bool:
        self.timeouts.put(timeout)
        return super().wait(timeout)


def test_an_idle_loop_does_not_iterate():
    """After the request it asks once more, and waits without a timeout until it is notified."""
    harness = Harness()
    harness.manager._work = work = Work()
    harness.pending.append(Request(1, (1,), 1))
    harness.manager._thread.start()
    for num_iterations in (2, 3):
        assert work.timeouts.get(timeout=60) is None
        assert len(harness.asked_for) == num_iterations and work.timeouts.empty()
        harness.manager.notify()
    harness.manager.shutdown()
    assert harness.responses[-1].is_final


@pytest.mark.parametrize("error", [ZeroDivisionError(), asyncio.CancelledError()])
def test_every_request_is_answered_when_the_loop_dies(error: BaseException):
    def die(_):
        raise error

    harness = Harness()
    harness.pending.append(Request(1, (1, 2), 9))
    harness.manager.step()
    harness.manager._scheduler.accept = die
    harness.manager._loop()
    assert isinstance(harness.responses[-1].error, Unavailable) and harness.responses[-1].is_final
    assert len(harness.deaths) == 1


def test_a_callback_that_raises_does_not_affect_other_requests(caplog):
    harness = Harness()
    taken = harness.manager._send_response

    def send(response: Response) -> None:
        if response.request_id == 1:
            raise ConnectionError("gone")
        taken(response)

    harness.manager._send_response = send
    origin = Origin("openai", "a")
    harness.pending += [Request(1, (1, 2), 3, streaming=True, origin=origin), Request(2, (1, 2), 3)]
    for _ in range(3):
        harness.manager.step()
    assert [(response.request_id, response.error) for response in harness.responses] == [(2, None)]
    assert [getattr(record, "request_id", "") for record in caplog.records] == ["a"] * 3


def test_the_loops_death_is_reported_although_a_callback_raises():
    harness = Harness()
    harness.pending.append(Request(1, (1, 2), 9))
    harness.manager.step()
    harness.manager._send_response = harness.manager._scheduler.accept = lambda *_: 1 / 0
    harness.manager._loop()
    assert len(harness.deaths) == 1

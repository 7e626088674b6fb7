"""The cancellation watch on a manual clock: when each request is checked, and with what share of the time."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass

import pytest

from inflight.core.request.stop import StopReason
from inflight.serving.in_flight import Ending, InFlight
from inflight.triton.cancellation import CancellationWatch, CancellationWatcher
from tests.tensors.factories import make_request
from tests.triton.factories import FakeEngineClient, make_entry
from tests.triton.fake_pb_utils import ResponseSender


@dataclass
class ManualClock:
    """Time that advances only when something takes or waits for it."""

    now: float = 0.0
    paused: float = 0.0

    def __call__(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        self.now += seconds
        self.paused += seconds


class AskedSender(ResponseSender):
    """A sender whose cancellation check takes `cost` seconds; records the times of the checks."""

    def __init__(self, clock: ManualClock, cost: float) -> None:
        super().__init__()
        self.clock = clock
        self.cost = cost
        self.asked_at: list[float] = []

    def is_cancelled(self) -> bool:
        self.clock.now += self.cost
        self.asked_at.append(self.clock.now)
        return super().is_cancelled()


class WatchedRequests:
    def __init__(self, num_requests: int, cost: float, period: float = 0.02) -> None:
        self.clock = ManualClock()
        self.client = FakeEngineClient(answers_stops=False)
        self.in_flight = InFlight(self.client)
        self.senders = [AskedSender(self.clock, cost) for _ in range(num_requests)]
        for sender in self.senders:
            self.in_flight.start(make_entry(sender=sender), [make_request()], lambda response: None)
        self.watch = CancellationWatch(self.in_flight, period, self.clock.pause, self.clock)

    def round(self) -> None:
        self.watch.round(self.in_flight.wait_for_requests())


def longest_silence(num_requests: int, cost: float) -> float:
    scene = WatchedRequests(num_requests, cost)
    for _ in range(5):
        scene.round()
    times = [sender.asked_at for sender in scene.senders]
    return max(later - earlier for asked in times for earlier, later in itertools.pairwise(asked))


def test_few_streams_are_checked_once_per_period() -> None:
    scene = WatchedRequests(num_requests=2, cost=0.0001)
    scene.round()
    assert abs(scene.clock.now - 0.02) < 1e-9
    assert [sender.times_asked for sender in scene.senders] == [1, 1]


def test_every_stream_is_checked_within_the_promised_time() -> None:
    """A check of one stream takes 0.1 to 0.15 ms."""
    assert longest_silence(16, 0.00015) <= 0.050
    assert longest_silence(256, 0.00015) <= 0.250


def test_every_stream_is_checked_in_time_under_load() -> None:
    """While the sender thread sends as fast as it can, a check waits for one response."""
    assert longest_silence(256, 0.00035) <= 0.250


@pytest.mark.parametrize(
    ("num_requests", "cost", "share"),
    [(16, 0.001, 0.15), (64, 0.004, 0.8)],
    ids=["a small one", "a large one where a round would take too long"],
)
def test_cancellation_checks_take_a_bounded_share_of_the_time(
    num_requests: int, cost: float, share: float
) -> None:
    scene = WatchedRequests(num_requests, cost)
    scene.round()
    assert num_requests * cost / scene.clock.now <= share + 1e-9


def test_cancellation_is_polled_in_bursts() -> None:
    scene = WatchedRequests(num_requests=64, cost=0.0001)
    scene.round()
    times = [asked for sender in scene.senders for asked in sender.asked_at]
    pauses = [later - earlier > 0.01 for earlier, later in itertools.pairwise(times)]
    assert [at for at, is_pause in enumerate(pauses, start=1) if is_pause] == [32]


def test_the_request_of_a_disconnected_client_is_cancelled_once() -> None:
    scene = WatchedRequests(num_requests=3, cost=0.0001)
    scene.senders[1].cancelled = True
    scene.round()
    scene.round()
    gone = [entry for entry in scene.in_flight.wait_for_requests() if entry.ending is Ending.CLIENT_GONE]
    assert len(gone) == 1
    assert [engine_id for engine_id, _ in scene.client.stopped] == [gone[0].engine_ids[0]]


def test_finished_requests_are_not_checked_for_cancellation() -> None:
    scene = WatchedRequests(num_requests=2, cost=0.0001)
    entries = scene.in_flight.wait_for_requests()
    entries[0].stream.finish()
    scene.watch.round(entries)
    assert [sender.times_asked for sender in scene.senders] == [0, 1]


def test_the_thread_detects_cancellations_and_ends_at_close() -> None:
    stopped = threading.Event()

    class Client(FakeEngineClient):
        def stop(self, request_id: int, reason: StopReason, sequence_index: int | None = None) -> None:
            stopped.set()

    in_flight = InFlight(Client())
    watcher = CancellationWatcher(in_flight, period_s=0.001)
    sender = ResponseSender()
    sender.cancelled = True
    in_flight.start(make_entry(sender=sender), [make_request()], lambda response: None)
    assert stopped.wait(30)
    in_flight.stop_admitting()
    watcher.close()

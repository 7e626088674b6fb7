"""Background threads lower their priority, so that the model gets the processors first."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from inflight.core.request.stop import FinishReason
from inflight.serving.background import NICENESS, lower_priority
from inflight.serving.in_flight import InFlight
from inflight.serving.response_size import ResponseBudget
from inflight.serving.sender import Sender
from inflight.triton.cancellation import CancellationWatcher
from inflight.triton.responses import ResponseBuilder
from tests.tensors.factories import make_request
from tests.triton.factories import FakeEngineClient, make_entry, make_response
from tests.triton.fake_pb_utils import FakePbUtils, ResponseSender


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def in_thread(work: Callable[[], int]) -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def nicer_by(more: int) -> Callable[[], int]:
    def work() -> int:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness() + more)
        lower_priority()
        return niceness()

    return work


def test_only_the_thread_that_gives_way_gets_a_higher_niceness() -> None:
    before = niceness()
    assert in_thread(nicer_by(0)) == max(before, NICENESS)
    assert niceness() == before


def test_a_nicer_thread_keeps_its_niceness() -> None:
    wanted = min(19, NICENESS + 5)
    assert in_thread(nicer_by(wanted - niceness())) == wanted


class Stream(ResponseSender):
    """Records the niceness of the threads that send and that ask for cancellations."""

    def __init__(self) -> None:
        super().__init__()
        self.of_sender: list[int] = []
        self.of_watcher: list[int] = []
        self.asked = threading.Event()

    def send(self, *args: Any, **kwargs: Any) -> None:
        self.of_sender.append(niceness())
        super().send(*args, **kwargs)

    def is_cancelled(self) -> bool:
        self.of_watcher.append(niceness())
        self.asked.set()
        return super().is_cancelled()


def test_sending_and_cancellation_checks_give_way() -> None:
    stream, in_flight = Stream(), InFlight(FakeEngineClient())
    sender = Sender(in_flight, ResponseBuilder(FakePbUtils()), ResponseBudget())
    watcher = CancellationWatcher(in_flight, period_s=0.001)
    entry = make_entry(sender=stream)
    in_flight.start(entry, [make_request()], sender.put)
    assert stream.asked.wait(30)
    sender.put(make_response(entry.engine_ids[0], [8], FinishReason.LENGTH))
    assert len(stream.wait_final()) == 1
    in_flight.stop_admitting()
    watcher.close()
    sender.close()
    assert min(stream.of_sender + stream.of_watcher) >= NICENESS

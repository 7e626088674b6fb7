"""The buffer of KV cache events between the loop and its readers."""

from __future__ import annotations

import threading

from inflight.batch_manager import GptManager
from inflight.batch_manager.instruments import Instruments
from inflight.batch_manager.kv_event_buffer import KvEventBuffer
from inflight.config import SchedulingConfig
from inflight.core.kv.kv_events import KvEvent
from inflight.core.report.reports import ReportKind, Reports
from inflight.core.scheduler import Scheduler
from inflight.testing.fake_engine import FakeEngine
from tests.core.factories import make_limits, make_request


def test_a_full_buffer_drops_the_oldest_events() -> None:
    buffer = KvEventBuffer(2)
    buffer.add([KvEvent(number) for number in range(3)])
    assert [event.event_id for event in buffer.take(0.0)] == [1, 2]
    assert buffer.take(0.0) == []


def test_a_waiting_reader_is_woken_by_events_and_by_the_end() -> None:
    buffer = KvEventBuffer(9)
    found: list[list[KvEvent]] = []
    for wake in (lambda: buffer.add([KvEvent(0)]), buffer.close):
        thread = threading.Thread(target=lambda: found.append(buffer.take()))
        thread.start()
        wake()
        thread.join(60)
        assert not thread.is_alive()
    assert found == [[KvEvent(0)], []]


def test_the_loop_passes_on_the_caches_events() -> None:
    engine = FakeEngine(make_limits())
    scheduler = Scheduler(SchedulingConfig(kv_event_buffer_size=9), engine.limits)
    instruments = Instruments(kv_events=KvEventBuffer(9))
    requests = [make_request(prompt=2 * engine.limits.tokens_per_block)]

    def get(room: int) -> list:
        return [requests.pop()] if requests else []

    manager = GptManager(engine, scheduler, get, lambda response: None, instruments=instruments, start=False)
    while manager.step():
        pass
    created, stored = instruments.reports(ReportKind.KV_EVENTS, 0.0).kv_events
    assert created.num_blocks == engine.limits.num_blocks and len(stored.stored) == 2
    manager.shutdown()
    assert instruments.reports(ReportKind.KV_EVENTS, None) == Reports(), "nobody waits after the end"


def test_without_configured_instruments_all_reports_are_empty() -> None:
    assert all(Instruments().reports(kind, None) == Reports() for kind in ReportKind)

"""Statistics and state that the engine has kept, fetched over the socket; the test plays the batcher."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from inflight.core.kv.block_pool import BlockPeaks
from inflight.core.kv.kv_events import KvEvent, StoredBlock
from inflight.core.kv.store_stats import DISK, StoreStats, TierStats
from inflight.core.report.metrics import ServiceMetrics
from inflight.core.report.reports import ReportKind, Reports
from inflight.core.report.stats import (
    KeptIteration,
    KvChanges,
    MemoryUsage,
    RequestCounts,
    RequestCountsOfIteration,
    RequestStage,
)
from inflight.core.request.stop import FinishReason
from inflight.endpoint.client import SocketEngineClient
from inflight.endpoint.local import LocalEngineClient
from inflight.endpoint.server import EndpointServer
from inflight.errors import Unavailable
from tests.core.test_stats import STATS
from tests.endpoint.factories import DESCRIPTION, PATIENCE_S

STORE = StoreStats(64, 3, 192, tiers=(TierStats(DISK, 1000, 3, 240, 3, 240),))
SAVING = replace(STATS, block_store=STORE, block_peaks=BlockPeaks(4, 5, 6))
METRICS = ServiceMetrics(
    finished=Counter({FinishReason.LENGTH: 2}), num_generated_tokens=7, block_store=STORE
)
REPORTS = {
    ReportKind.ITERATIONS: Reports(
        iterations=(
            KeptIteration(STATS, 12.5),
            KeptIteration(SAVING, 12.5, KvChanges(*range(1, 14))),
        ),
        memory=MemoryUsage(1, 2, 3),
    ),
    ReportKind.REQUESTS: Reports(
        requests=(
            RequestCountsOfIteration(
                4, (RequestCounts(1, 0, RequestStage.QUEUED, 0, 0, 0, False, False, 0, 0, 0),)
            ),
        )
    ),
    ReportKind.KV_EVENTS: Reports(
        kv_events=(
            KvEvent(0, num_blocks=8),
            KvEvent(1, stored=(StoredBlock(2**64 - 1, (1, 2), (0, 7), None, 35),), parent_hash=5),
            KvEvent(2, removed=(6, 7)),
            KvEvent(3, updated=8, priorities=(35, 80)),
        )
    ),
    ReportKind.METRICS: Reports(metrics=(STATS, METRICS.snapshot()), memory=MemoryUsage(1, 2, 3)),
}


class Kept:
    """A fake batcher with kept reports; the event `may` lets it answer a question without a timeout."""

    def __init__(self) -> None:
        self.asked, self.may = threading.Event(), threading.Event()

    def __call__(self, kind: ReportKind, timeout_s: float | None) -> Reports:
        self.asked.set()
        if timeout_s is None:
            assert self.may.wait(PATIENCE_S)
        return REPORTS[kind]


@pytest.fixture
def kept() -> Kept:
    return Kept()


@pytest.fixture
def front_end(kept: Kept, path: str) -> Iterator[SocketEngineClient]:
    server = EndpointServer(LocalEngineClient(DESCRIPTION, lambda: None, read_reports=kept), path)
    client = SocketEngineClient(path)
    yield client
    client.close()
    server.close()


@pytest.mark.parametrize("kind", ReportKind)
def test_reports_cross_the_socket(front_end: SocketEngineClient, kind: ReportKind) -> None:
    assert front_end.reports(kind, 0.0) == REPORTS[kind]


def test_a_question_without_a_timeout_does_not_block_others(front_end, kept: Kept) -> None:
    found: list[Reports] = []
    thread = threading.Thread(target=lambda: found.append(front_end.reports(ReportKind.KV_EVENTS, None)))
    thread.start()
    assert kept.asked.wait(PATIENCE_S)
    assert front_end.reports(ReportKind.ITERATIONS, 0.0) == REPORTS[ReportKind.ITERATIONS]
    kept.may.set()
    thread.join(PATIENCE_S)
    assert found == [REPORTS[ReportKind.KV_EVENTS]]


def test_a_batcher_without_kept_reports_returns_none(server, path) -> None:
    client = SocketEngineClient(path)
    assert client.reports(ReportKind.ITERATIONS, 0.0) == Reports()
    client.close()


def test_reports_without_an_engine_are_unavailable(path) -> None:
    with pytest.raises(Unavailable):
        SocketEngineClient(path).reports(ReportKind.ITERATIONS, 0.0)


def test_a_reserved_id_is_not_used_for_a_request(front_end) -> None:
    assert front_end.reserve_id() + 1 == front_end.reserve_id()

"""Supervision of an engine by another process: its reports, its takeover and its end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from inflight.core.report.metrics import ServiceMetrics
from inflight.core.report.stats import MemoryUsage
from inflight.endpoint.client import retire_predecessor
from inflight.endpoint.frames import EngineProcesses, Statistics
from inflight.endpoint.local import LocalEngineClient
from inflight.endpoint.server import EndpointServer
from inflight.endpoint.supervision import EngineWatch, Supervision, awaits_successor, is_served
from inflight.errors import Unavailable
from tests.core.test_stats import STATS
from tests.endpoint.factories import DESCRIPTION, PATIENCE_S

SERVER, JOB = "123-456", "a job"
PROCESSES = EngineProcesses("7-8", "/dev/shm/ranks")
TIMEOUT_S = 5.0


class Engine:
    def __init__(self, path: str, awaits_successor: bool = False, timeout_s: float = TIMEOUT_S) -> None:
        self.supervision = Supervision(
            SERVER, JOB, awaits_successor, PROCESSES, timeout_s, lambda: MemoryUsage(cpu=5)
        )
        client = LocalEngineClient(DESCRIPTION, lambda: None)
        self.server = EndpointServer(client, path, client.drain, self.supervision.retire, self.supervision)


class Watching:
    """A watch whose `run` is running on a thread."""

    def __init__(self, path: str, threads: ThreadPoolExecutor, timeout_s: float = TIMEOUT_S) -> None:
        self.watch = EngineWatch(path, timeout_s)
        self.told: list[Statistics] = []
        self.has_been_told = threading.Event()
        self.why: Future[str] = threads.submit(self.watch.run, self._take)

    def _take(self, told: Statistics) -> None:
        self.told.append(told)
        self.has_been_told.set()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


def test_a_supervisor_gets_statistics_and_the_engines_processes(path, threads):
    engine = Engine(path)
    watching = Watching(path, threads)
    assert watching.watch.processes == PROCESSES
    stats, metrics = STATS, ServiceMetrics().snapshot()
    engine.supervision.put(stats, metrics)
    assert watching.has_been_told.wait(PATIENCE_S)
    (told,) = watching.told
    assert (told.stats, told.metrics, told.memory) == (stats, metrics, MemoryUsage(cpu=5))
    watching.watch.close()
    engine.server.close()


def test_an_engine_without_supervisors_ends(path, threads):
    engine = Engine(path)
    over = threads.submit(engine.supervision.wait_for_end)
    first, second = Watching(path, threads), Watching(path, threads)
    first.watch.close()
    assert first.why.result(PATIENCE_S)
    assert not over.done()
    second.watch.close()
    assert over.result(PATIENCE_S) is None
    engine.server.close()


def test_a_retired_engine_ends_in_order(path, threads):
    engine = Engine(path)
    watching = Watching(path, threads)
    watching.watch.retire(2.5)
    assert engine.supervision.wait_for_end() == 2.5
    assert watching.why.result(PATIENCE_S) == ""
    engine.server.close()


def test_a_watch_reports_later_that_its_engine_was_retired(path):
    engine = Engine(path)
    watch = EngineWatch(path, TIMEOUT_S)
    assert not watch.has_left()
    assert retire_predecessor(path, 1.0, SERVER, patience_s=0.1) is False
    assert watch.has_left()
    engine.server.close()


def test_an_engine_that_ends_by_itself_is_lost(path, threads):
    engine = Engine(path)
    watching = Watching(path, threads)
    engine.server.close()
    assert "has ended" in watching.why.result(PATIENCE_S)


def test_a_stopped_engine_counts_as_silent_and_an_idle_one_does_not(path, threads):
    engine = Engine(path, timeout_s=0.2)
    patient = Watching(path, threads, timeout_s=1.0)
    impatient = Watching(path, threads, timeout_s=0.01)
    assert "silent for 0.01 s" in impatient.why.result(PATIENCE_S)
    with pytest.raises(TimeoutError):
        patient.why.result(2.0)
    patient.watch.close()
    engine.server.close()


def test_an_engine_that_awaits_a_successor_is_taken_over_once(path, threads):
    engine = Engine(path, awaits_successor=True)
    assert not awaits_successor(path, SERVER, JOB, TIMEOUT_S)  # the process that started it comes first
    starter = Watching(path, threads)
    assert awaits_successor(path, SERVER, JOB, TIMEOUT_S)
    assert not awaits_successor(path, SERVER, "another job", TIMEOUT_S)
    assert not awaits_successor(path, "another server", JOB, TIMEOUT_S)
    successor = Watching(path, threads)
    assert not awaits_successor(path, SERVER, JOB, TIMEOUT_S)
    starter.watch.close()
    starter.why.result(PATIENCE_S)
    engine.supervision.put(STATS, ServiceMetrics().snapshot())
    assert successor.has_been_told.wait(PATIENCE_S)
    successor.watch.close()
    engine.server.close()


def test_only_a_process_of_its_server_retires_it(path):
    engine = Engine(path)
    assert retire_predecessor(path, 3.0, "another server", patience_s=0.1) is False
    with ThreadPoolExecutor() as pool:
        retired = pool.submit(retire_predecessor, path, 3.0, SERVER)
        assert engine.supervision.wait_for_end() == 3.0
        engine.server.close()
        assert retired.result(PATIENCE_S) is True


def test_supervising_a_path_without_an_engine_is_unavailable(path):
    assert not is_served(path) and not awaits_successor(path, SERVER, JOB, TIMEOUT_S)
    with pytest.raises(Unavailable, match="cannot be supervised"):
        EngineWatch(path, TIMEOUT_S)


def test_an_engine_in_process_cannot_be_supervised(path):
    client = LocalEngineClient(DESCRIPTION, lambda: None)
    server = EndpointServer(client, path)
    assert is_served(path)
    with pytest.raises(Unavailable, match="cannot be supervised"):
        EngineWatch(path, 0.2)
    server.close()

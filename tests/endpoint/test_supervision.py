"""Supervision of an engine by another process: its reports, its takeover and its end."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from inflight.core.report.metrics import ServiceMetrics
from inflight.core.report.stats import MemoryUsage
from inflight.endpoint.client import retire_predecessor
from inflight.endpoint.frames import (
    Beat,
    EngineProcesses,
    Statistics,
    Supervise,
    Supervised,
    decode_from_engine,
    encode,
    read_frame,
)
from inflight.endpoint.local import LocalEngineClient
from inflight.endpoint.path import connect
from inflight.endpoint.server import EndpointServer
from inflight.endpoint.supervision import EngineWatch, Supervision, awaits_successor, is_served
from inflight.errors import Unavailable
from tests.commands import eventually
from tests.core.test_stats import STATS
from tests.endpoint.factories import DESCRIPTION, PATIENCE_S

SERVER, JOB = "123-456", "a job"
PROCESSES = EngineProcesses("7-8", "/dev/shm/ranks")
TIMEOUT_S = 5.0


class Engine:
    def __init__(self, path: str, awaits_successor: bool, timeout_s: float) -> None:
        self.supervision = Supervision(
            SERVER, JOB, awaits_successor, PROCESSES, timeout_s, lambda: MemoryUsage(cpu=5)
        )
        client = LocalEngineClient(DESCRIPTION, lambda: None)
        self.server = EndpointServer(client, path, client.drain, self.supervision.retire, self.supervision)


class Watching:
    """A watch whose `run` is running on a thread."""

    def __init__(self, path: str, threads: ThreadPoolExecutor, timeout_s: float) -> None:
        self.watch = EngineWatch(path, timeout_s)
        self.told: list[Statistics] = []
        self.has_been_told = threading.Event()
        self.why: Future[str] = threads.submit(self.watch.run, self._take)

    def _take(self, told: Statistics) -> None:
        self.told.append(told)
        self.has_been_told.set()


class Setup:
    """Engines at one path and watches of them, all of which end with the test, whether it passes or fails."""

    def __init__(self, path: str, stack: ExitStack) -> None:
        self._path = path
        self._stack = stack
        self.threads = stack.enter_context(ThreadPoolExecutor())

    def engine(self, awaits_successor: bool = False, timeout_s: float = TIMEOUT_S) -> Engine:
        engine = Engine(self._path, awaits_successor, timeout_s)
        self._stack.callback(engine.server.close)
        self._stack.callback(engine.supervision.retire, 0.0)
        return engine

    def watch(self, timeout_s: float = TIMEOUT_S) -> Watching:
        watching = Watching(self._path, self.threads, timeout_s)
        self._stack.callback(watching.watch.close)
        return watching


@pytest.fixture
def setup(path: str) -> Iterator[Setup]:
    with ExitStack() as stack:
        yield Setup(path, stack)


def test_a_supervisor_gets_statistics_and_the_engines_processes(setup):
    engine = setup.engine()
    watching = setup.watch()
    assert watching.watch.processes == PROCESSES
    stats, metrics = STATS, ServiceMetrics().snapshot()
    engine.supervision.put(stats, metrics)
    assert watching.has_been_told.wait(PATIENCE_S)
    (told,) = watching.told
    assert (told.stats, told.metrics, told.memory) == (stats, metrics, MemoryUsage(cpu=5))


def test_an_engine_without_supervisors_ends(setup):
    engine = setup.engine()
    over = setup.threads.submit(engine.supervision.wait_for_end)
    first, second = setup.watch(), setup.watch()
    first.watch.close()
    assert first.why.result(PATIENCE_S)
    assert not over.done()
    second.watch.close()
    assert over.result(PATIENCE_S) is None


def test_a_retired_engine_ends_in_order(setup):
    engine = setup.engine()
    watching = setup.watch()
    watching.watch.retire(2.5)
    assert engine.supervision.wait_for_end() == 2.5
    assert watching.why.result(PATIENCE_S) == ""


def test_a_watch_reports_later_that_its_engine_was_retired(setup, path):
    setup.engine()
    watch = EngineWatch(path, TIMEOUT_S)
    assert not watch.has_left()
    assert retire_predecessor(path, 1.0, SERVER, patience_s=0.1) is False
    assert eventually(watch.has_left)
    watch.close()


def test_an_engine_that_ends_by_itself_is_lost(setup):
    engine = setup.engine()
    watching = setup.watch()
    engine.server.close()
    assert "has ended" in watching.why.result(PATIENCE_S)


def test_an_engine_that_sends_nothing_counts_as_lost(setup):
    setup.engine(timeout_s=1000.0)  # and sends a sign of life every 200 s
    assert "silent for 2 s" in setup.watch(timeout_s=2.0).why.result(PATIENCE_S)


def test_an_idle_engine_sends_signs_of_life(setup, path):
    setup.engine(timeout_s=0.2)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(PATIENCE_S)
        connect(connection, path)
        connection.sendall(encode(Supervise()))
        frames = [decode_from_engine(read_frame(connection)) for _ in range(4)]
    assert frames == [Supervised(PROCESSES), Beat(), Beat(), Beat()]


def test_an_engine_that_awaits_a_successor_is_taken_over_once(setup, path):
    engine = setup.engine(awaits_successor=True)
    assert not awaits_successor(path, SERVER, JOB, TIMEOUT_S)  # the process that started it comes first
    starter = setup.watch()
    assert awaits_successor(path, SERVER, JOB, TIMEOUT_S)
    assert not awaits_successor(path, SERVER, "another job", TIMEOUT_S)
    assert not awaits_successor(path, "another server", JOB, TIMEOUT_S)
    successor = setup.watch()
    assert not awaits_successor(path, SERVER, JOB, TIMEOUT_S)
    starter.watch.close()
    starter.why.result(PATIENCE_S)
    engine.supervision.put(STATS, ServiceMetrics().snapshot())
    assert successor.has_been_told.wait(PATIENCE_S)


def test_only_a_process_of_the_same_server_retires_an_engine(setup, path):
    engine = setup.engine()
    assert retire_predecessor(path, 3.0, "another server", patience_s=0.1) is False
    retired = setup.threads.submit(retire_predecessor, path, 3.0, SERVER)
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

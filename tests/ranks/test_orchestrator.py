"""An orchestrator of real ranks with the fake engine: restarts in place and by the next process."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from inflight.core.report.metrics import MetricsSnapshot
from inflight.core.report.stats import IterationCounts, MemoryUsage
from inflight.core.request.request import Request
from inflight.endpoint.client import SocketEngineClient
from inflight.endpoint.supervision import EngineWatch
from inflight.errors import ConfigError, Unavailable
from inflight.processes import ProcessId
from inflight.ranks import orchestrator as orchestrator_module
from inflight.ranks.job import Job
from inflight.ranks.orchestrator import ModelControl, Orchestrator, Surroundings
from tests.endpoint.factories import Inbox
from tests.triton.factories import make_parameters

PATIENCE_S = 30.0
LONG = 4000
FAKE = {"gpt_model_path": "vocab=100,step_us=1000", "tensor_parallel_size": "2", "stats_check_period_ms": "1"}


class Publisher:
    """A fake MetricsPublisher."""

    def __init__(self) -> None:
        self.has_news = threading.Event()
        self.has_started_over = threading.Event()

    def put(
        self, stats: IterationCounts, metrics: MetricsSnapshot, wall_clock_s: float, memory: MemoryUsage
    ) -> None:
        assert stats.iteration >= 0 and metrics.num_preemptions == 0 and wall_clock_s > 0 and memory.cpu > 0
        self.has_news.set()

    def start_over(self) -> None:
        self.has_started_over.set()


class Guard:
    """A fake guard that records the processes it is to watch."""

    def __init__(self) -> None:
        self.launcher: ProcessId | None = None
        self.folder = ""
        self.is_dismissed = threading.Event()

    def watch(self, launcher: ProcessId, folder: str) -> None:
        self.launcher, self.folder = launcher, folder

    def dismiss(self) -> None:
        self.is_dismissed.set()


class Control:
    """A fake of Triton's model control, which loads the model's next process, here another orchestrator."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.has_unloaded = threading.Event()
        self.successor: Orchestrator | None = None
        self.heirs_guard = Guard()

    def unload(self) -> None:
        self.has_unloaded.set()

    def load(self) -> None:
        self.successor = self._stage.make(guard=self.heirs_guard)


class Stage:
    def __init__(self, folder: str) -> None:
        self.path = str(Path(folder, "engine.sock"))
        self.publisher = Publisher()
        server = ProcessId.of(os.getpid())
        assert server is not None
        self.server = server
        self.made: list[Orchestrator] = []

    def make(self, guard: Guard, control: ModelControl | None = None, **parameters: str) -> Orchestrator:
        job = Job.of(make_parameters(**(FAKE | parameters)), "/", self.path)
        around = Surroundings(self.server, control, guard, self.publisher, unload_timeout_s=5.0)
        made = Orchestrator(job, around)
        self.made.append(made)
        return made

    def ranks(self, guard: Guard) -> list[ProcessId]:
        assert guard.launcher is not None
        return sorted(guard.launcher.children(), key=lambda rank: rank.pid)


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setattr(orchestrator_module, "_FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(orchestrator_module, "WORKER_MODULE", "inflight.testing.fake_worker")
    folder = tempfile.mkdtemp(prefix="orchestrator-")
    made = Stage(folder)
    yield made
    for one in made.made:
        one.close()
    shutil.rmtree(folder)


def submit(client: SocketEngineClient, length: int = 5) -> Inbox:
    inbox = Inbox()
    client.submit(Request(0, (1, 2, 3), length, True), inbox)
    return inbox


def test_ranks_serve_and_end_with_the_orchestrator(stage: Stage):
    guard = Guard()
    engine = stage.make(guard)
    assert submit(engine.client).final().error is None
    assert stage.publisher.has_news.wait(PATIENCE_S)
    ranks = stage.ranks(guard)
    assert len(ranks) == 2 and Path(guard.folder).is_dir()
    assert engine.close() and engine.close()
    assert guard.launcher is not None and guard.launcher.wait(0) and all(rank.wait(0) for rank in ranks)
    assert not Path(guard.folder).exists() and not Path(stage.path).exists()


def test_a_lost_engine_restarts_in_place(stage: Stage):
    guard = Guard()
    engine = stage.make(guard)
    in_flight, folder, first = submit(engine.client, LONG), guard.folder, stage.ranks(guard)
    first[1].signal(signal.SIGKILL)
    assert isinstance(in_flight.final().error, Unavailable)
    assert stage.publisher.has_started_over.wait(PATIENCE_S)
    assert submit(engine.client).final().error is None
    assert all(rank.wait(0) for rank in first) and not Path(folder).exists()
    assert not guard.is_dismissed.is_set()


def test_a_lost_engine_is_started_for_the_models_next_process(stage: Stage):
    guard, control = Guard(), Control(stage)
    engine = stage.make(guard, control)
    stage.ranks(guard)[0].signal(signal.SIGKILL)
    assert control.has_unloaded.wait(PATIENCE_S)
    engine.close()  # Triton ends the process as soon as it has no requests
    assert guard.is_dismissed.is_set() and control.successor is not None
    assert control.heirs_guard.launcher == guard.launcher
    assert submit(control.successor.client).final().error is None
    heirs_ranks = stage.ranks(control.heirs_guard)
    assert len(heirs_ranks) == 2
    control.successor.close()
    assert all(rank.wait(PATIENCE_S) for rank in heirs_ranks) and not Path(guard.folder).exists()


def test_pauses_between_restarts_grow(stage: Stage):
    def pause_s() -> float:
        watch = EngineWatch(stage.path, PATIENCE_S)
        watch.close()
        return watch.processes.pause_s

    guard, control = Guard(), Control(stage)
    engine = stage.make(guard, control)
    assert pause_s() == 0.0
    stage.ranks(guard)[0].signal(signal.SIGKILL)
    assert control.has_unloaded.wait(PATIENCE_S)
    engine.close()
    assert pause_s() == 0.05
    stage.publisher.has_started_over.clear()
    stage.ranks(control.heirs_guard)[0].signal(signal.SIGKILL)
    assert stage.publisher.has_started_over.wait(PATIENCE_S)
    assert pause_s() == 0.1


@pytest.mark.exhaustive
def test_a_successor_with_other_parameters_starts_its_own_ranks(stage: Stage):
    class Changed(Control):
        def load(self) -> None:
            self.successor = self._stage.make(self.heirs_guard, gpt_model_path="vocab=50,step_us=0")

    guard, control = Guard(), Changed(stage)
    engine = stage.make(guard, control)
    stage.ranks(guard)[0].signal(signal.SIGKILL)
    assert control.has_unloaded.wait(PATIENCE_S)
    engine.close()
    assert control.successor is not None
    assert control.successor.client.describe().limits.vocab_size == 50
    assert guard.launcher is not None and guard.launcher.wait(PATIENCE_S) and not Path(guard.folder).exists()


def test_a_successor_replaces_an_engine_that_is_served(stage: Stage):
    first_guard, second_guard = Guard(), Guard()
    first = stage.make(first_guard)
    in_flight = submit(first.client, length=100)
    second = stage.make(second_guard)
    assert in_flight.final().error is None
    assert submit(second.client).final().error is None
    first.close()
    assert submit(second.client).final().error is None
    assert first_guard.launcher is not None and first_guard.launcher.wait(0)


def test_a_failed_load_has_a_reason_and_leaves_no_processes(stage: Stage, monkeypatch: pytest.MonkeyPatch):
    guard = Guard()
    monkeypatch.setattr(orchestrator_module, "WORKER_MODULE", "inflight.worker")
    with pytest.raises(ConfigError, match="/nowhere"):
        stage.make(guard, gpt_model_path="/nowhere")
    assert guard.launcher is not None and guard.launcher.wait(0) and not Path(guard.folder).exists()


def test_a_fault_that_only_rank_0_finds_has_a_reason(stage: Stage, tmp_path: Path):
    """Rank 0 reads the key after all ranks have loaded the model, and would else wait for them when it leaves."""
    guard, key = Guard(), tmp_path / "receipts.key"
    key.touch()
    with pytest.raises(ConfigError, match="the key file of receipts is empty"):
        stage.make(guard, receipt_key_file=str(key))
    assert guard.launcher is not None and guard.launcher.wait(0) and not Path(guard.folder).exists()


def test_arguments_that_mpirun_does_not_know_are_an_error_of_the_load(stage: Stage):
    with pytest.raises(ConfigError, match="the ranks ended before the engine could be used"):
        stage.make(Guard(), mpirun_arguments="--no-such-option")
    with pytest.raises(ConfigError, match=r"mpirun_arguments: got 'a \"b'"):
        stage.make(Guard(), mpirun_arguments='a "b')


def test_an_end_does_not_wait_for_ranks_that_are_being_started(stage: Stage, monkeypatch: pytest.MonkeyPatch):
    guard = Guard()
    engine = stage.make(guard)
    monkeypatch.setattr(orchestrator_module, "_FIRST_PAUSE_S", 600.0)
    stage.ranks(guard)[0].signal(signal.SIGKILL)
    assert guard.launcher is not None and guard.launcher.wait(PATIENCE_S)
    engine.close()
    with pytest.raises(Unavailable):
        engine.client.describe()

"""An engine's orchestrator on the simulated machine: ranks that are lost, hang and cannot be started.

Each process of a model runs the real orchestrator. Rank 0 is a process with the real endpoint, its supervision and
the loop with a fake engine; mpirun and the other ranks are stand-ins. After a loss the engine is restarted in
place, or for the model's next process, as Triton starts it.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import random
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from unittest.mock import patch
from zlib import crc32

from inflight import processes
from inflight.build import build_engine
from inflight.config import Parameters
from inflight.core.report.metrics import MetricsSnapshot
from inflight.core.report.stats import IterationCounts, MemoryUsage
from inflight.core.request.request import Request
from inflight.core.request.response import Response
from inflight.endpoint.supervision import Supervision
from inflight.errors import ConfigError, InflightError, Unavailable
from inflight.load_model import LoadedModel
from inflight.processes import ProcessId
from inflight.ranks import orchestrator
from inflight.ranks.job import Job, Report, decode_orders, encode_line
from inflight.ranks.orchestrator import ModelControl, Orchestrator, Surroundings
from inflight.testing.fake_engine import FakeEngine
from inflight.testing.simulation.scenario import draw

from . import modules
from .kernel import Kernel, PipeEnd, ProcessEntry, Program
from .kernel_modules import PipeFile, ProcFolder
from .run import ALL_FAULTS, MOST_FAULTS, RunReport, SimulatedRun
from .scheduler import Machine
from .sockets import Network
from .threads import Lock, SimulatedModule

_PATH = "/run/engine.sock"
_LONGEST_S = 3000.0
_NUM_RANKS = 2
_TIMEOUT_S = 5.0
_UNLOAD_S = 5.0
_RECOVERED_S = 120.0
_NOTICED_S = 20.0
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.99, 45.0  # the latter with starts that are refused
_ENDED_S = 60.0


class _CountingPublisher:
    """A publisher of statistics that only counts its calls."""

    def __init__(self) -> None:
        self.num_published = self.num_started_over = 0

    def put(
        self, stats: IterationCounts, metrics: MetricsSnapshot, wall_clock_s: float, memory: MemoryUsage
    ) -> None:
        self.num_published += 1

    def start_over(self) -> None:
        self.num_started_over += 1


class _NotingGuard:
    """Notes the ranks that a model's process has it watch."""

    def __init__(self) -> None:
        self.launcher: ProcessId | None = None
        self.is_dismissed = False

    def watch(self, launcher: ProcessId, folder: str) -> None:
        self.launcher = launcher

    def dismiss(self) -> None:
        self.is_dismissed = True


class OrchestratedRanks(SimulatedRun):
    """One run of an orchestrator, and of the orchestrators of the model's next processes."""

    def __init__(self, seed: int, kept_faults: Collection[int] = ALL_FAULTS) -> None:
        self.machine = Machine(seed)
        self.network = Network(self.machine)
        self.rng = rng = random.Random(seed + 1)
        self.faults: Counter[str] = Counter()
        self.kernel = Kernel(self.machine, self._find_program)
        self._limits = replace(draw(seed).limits, num_adapter_pages=0, overlaps_iterations=False)
        self._has_control = rng.random() < 0.5
        self._badness = rng.choice([0.0, 0.0, 0.3, 0.8])
        num_faults = rng.randint(1, MOST_FAULTS)
        self._num_faults, self._kept_faults = num_faults, kept_faults
        self._models: list[ProcessEntry] = []
        self._made: dict[ProcessEntry, Orchestrator] = {}
        self._guards: dict[ProcessEntry, _NotingGuard] = {}
        self._closing: set[ProcessEntry] = set()
        self._launchers: list[ProcessEntry] = []
        self._ranks: dict[ProcessEntry, list[ProcessEntry]] = {}
        self._serving: list[ProcessEntry] = []
        self._server: ProcessEntry | None = None
        self._is_over = self._is_done = self._first_failed = False
        self._num_answers = 0
        self._numbers = count(1)

    def run(self) -> RunReport:
        """Run to the end, and check all promises."""
        machine = self.machine
        self._folder = Path(tempfile.mkdtemp(prefix="inflight-orchestrated-"))
        try:
            with modules.on(machine, self.network, kernel=self.kernel), contextlib.ExitStack() as stack:
                for owner, name, value in (
                    (processes, "PROC", ProcFolder(self.kernel)),
                    (orchestrator, "_SHARED_MEMORY", str(self._folder)),
                    (orchestrator, "find_mpirun", lambda: "mpirun"),
                    (orchestrator, "tempfile", SimulatedModule(tempfile, {"mkdtemp": self._make_folder})),
                ):
                    stack.enter_context(patch.object(owner, name, value))
                self._server = self.kernel.start(["tritonserver"], {}, program=self._be_server)
                machine.spawn(machine.start_process("operator"), self._operate, "operator")
                machine.run_until(lambda: self._is_done, _LONGEST_S)
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)
        return RunReport(
            len(self._launchers),
            Counter(["not started" if self._first_failed else "ended"]),
            self.faults,
            (machine.now_ns - 10**9) / 1e9,
            machine.num_switches,
            crc32(str([(time_s, task.pid, event) for time_s, task, event in self.kernel.log]).encode()),
        )

    def _make_folder(self, prefix: str, dir: str) -> str:
        folder = Path(dir, f"{prefix}{next(self._numbers)}")
        folder.mkdir()
        return str(folder)

    # ---------------------------------------------------------------- programs

    def _find_program(self, arguments: Sequence[str]) -> Program:
        assert arguments[0] == "mpirun"
        return self._be_mpirun

    def _be_server(self, task: ProcessEntry) -> int:
        while not self._is_done:
            self.machine.sleep(1000.0)
        return 0

    def _be_model(self, task: ProcessEntry) -> int:
        """Run a process of the model, from its load until it is asked to close."""
        assert self._server is not None
        server = ProcessId.of(self._server.pid)
        assert server is not None
        parameters = replace(
            Parameters(),
            tensor_parallel_size=_NUM_RANKS,
            rank_timeout_ms=int(_TIMEOUT_S * 1000),
            stats_check_period_ms=0,
        )
        control = ModelControl(lambda: self._unload(task), self._load_next) if self._has_control else None
        guard = self._guards[task] = _NotingGuard()
        around = Surroundings(server, control, guard, _CountingPublisher(), _UNLOAD_S)
        try:
            self._made[task] = made = Orchestrator(Job.of(parameters, "/", _PATH), around)
        except (ConfigError, Unavailable):
            return 1
        while task not in self._closing:
            self.machine.sleep(0.2)
        made.close()
        return 0

    def _unload(self, task: ProcessEntry) -> None:
        """Unload the model of a process, as Triton does: the process ends when its engine is handed over."""
        self._closing.add(task)

    def _load_next(self) -> None:
        """Start the model's next process, and return when its engine serves."""
        assert self._server is not None
        if not self._is_over and self.rng.random() < 0.1:
            raise RuntimeError("Triton cannot load the model")
        task = self._start_model()
        while task not in self._made:
            if task.status is not None:
                raise RuntimeError("the model's process has ended")
            self.machine.sleep(0.1)

    def _start_model(self) -> ProcessEntry:
        task = self.kernel.start(["model"], {}, program=self._be_model, parent=self._server)
        self._models.append(task)
        return task

    def _be_mpirun(self, task: ProcessEntry) -> int:
        machine, rng = self.machine, self.rng
        alive = [each for each in self._launchers if each.status is None]
        assert not alive, "two engines at the same time"
        self._launchers.append(task)
        ignores = rng.random() < 0.1

        def end(number: int, frame: object) -> None:
            if not ignores:
                self.kernel.exit(task, 1)

        task.handlers[signal.SIGTERM] = end
        pipes = {
            number: pipe.copy() for number, pipe in task.descriptors.items() if isinstance(pipe, PipeEnd)
        }
        ranks = self._ranks[task] = []
        ranks.append(self.kernel.start(["rank 0"], {}, pipes, self._be_leader, task))
        ranks += [
            self.kernel.start([f"rank {n}"], {}, program=self._be_follower, parent=task)
            for n in range(1, _NUM_RANKS)
        ]
        for each in ranks:
            each.dies_with_parent = True
            machine.spawn(each.process, lambda each=each: self._end_with_parent(each, task), "parent")
        while any(each.status is None for each in ranks):
            machine.sleep(0.2)
            if any(each.status is not None and each.status < 0 for each in ranks):
                return 1  # as mpirun, which ends all ranks when one is lost
        return 0

    def _end_with_parent(self, rank: ProcessEntry, launcher: ProcessEntry) -> None:
        """End a rank after another one was lost, or has been stopped for a while."""
        silent_s = 0.0
        while True:
            self.machine.sleep(0.1)
            others = [each for each in self._ranks[launcher] if each is not rank]
            silent_s = silent_s + 0.1 if any(each.process.is_stopped for each in others) else 0.0
            if any(each.status is not None and each.status < 0 for each in others) or silent_s > _TIMEOUT_S:
                self.kernel.exit(rank, -signal.SIGKILL)

    def _be_follower(self, task: ProcessEntry) -> int:
        assert task.parent is not None
        leader = self._ranks[task.parent][0]
        while leader.status is None:
            self.machine.sleep(0.2)
        return 0

    def _be_leader(self, task: ProcessEntry) -> int:
        orders = decode_orders(PipeFile(self.kernel, 0).readline())
        report = PipeFile(self.kernel, 1)
        self.machine.sleep(self.rng.random() * self.rng.choice([0.5, 5.0]))
        if not self._is_over and self.rng.random() < self._badness:
            if self.rng.random() < 0.5:
                self.kernel.exit(task, -11)
            report.write(encode_line(Report("the model cannot be loaded")))
            return 1
        supervision = Supervision(
            orders.server,
            orders.job.digest(),
            orders.awaits_successor,
            orders.processes,
            _TIMEOUT_S,
            MemoryUsage,
        )

        def on_loss(error: Unavailable) -> None:
            self.kernel.exit(task, -signal.SIGKILL)

        parameters = replace(orders.job.parameters, tensor_parallel_size=1)
        engine = build_engine(parameters, "", _PATH, supervision.put, None, supervision, self._load, on_loss)
        object.__setattr__(engine, "_closing", Lock(self.machine))  # its own was made with the class
        self._serving.append(task)
        report.write(encode_line(Report()))
        notice_s = supervision.wait_for_end()
        engine.close(notice_s or 0.0)
        return 0

    def _load(self, parameters: Parameters, version_dir: str, rank_context: object) -> LoadedModel:
        return LoadedModel(FakeEngine(self._limits), "", "none", ())

    # ---------------------------------------------------------------- faults

    def _operate(self) -> None:
        """Cause faults, check that the engine comes back, and end it."""
        machine, rng = self.machine, self.rng
        first = self._start_model()
        self.machine.wait_until(lambda: first in self._made or first.status is not None, 60.0)
        if first.status is not None:
            self._first_failed = True
        else:
            for number in range(self._num_faults):
                machine.sleep(rng.random() * rng.choice([0.1, 3.0, 15.0, 70.0]))
                name = rng.choice(list(FAULTS))
                if number in self._kept_faults and FAULTS[name](self):
                    self.faults[name] += 1
            self._is_over = True
            machine.sleep(_NOTICED_S)
            if self._model() is not None:
                assert self.machine.wait_until(
                    lambda: self._answers() or self._model() is None, _RECOVERED_S
                ), self._describe()
        self._is_over = True
        while (model := self._model()) is not None:
            self._closing.add(model)
            assert self.machine.wait_until(
                lambda model=model: model.status is not None, _ENDED_S + _UNLOAD_S
            ), self._describe()
        assert self.machine.wait_until(lambda: not self._left(), 30.0), (
            f"left: {self._left()}\n{self._describe()}"
        )
        if not self._has_control:
            self._check_pauses()
        self._is_done = True

    def _check_pauses(self) -> None:
        """Check that lost ranks are started again after a pause, which has a bound."""
        for before, after in pairwise(self._launchers):
            ended_s = next(
                time_s for time_s, each, event in self.kernel.log if each is before and "ended" in event
            )
            started_s = next(time_s for time_s, each, _ in self.kernel.log if each is after)
            assert _SHORTEST_PAUSE_S <= started_s - ended_s <= _LONGEST_PAUSE_S, (
                f"ranks are started again after {started_s - ended_s:.2f} s"
            )

    def _left(self) -> list[str]:
        running = [" ".join(each.arguments) for each in self.kernel.tasks.values() if each.status is None]
        known = ("init", "tritonserver")
        return [each for each in running if each not in known] + [
            path.name for path in self._folder.iterdir()
        ]

    def _model(self) -> ProcessEntry | None:
        """Return the model's newest process that runs; None if the model is not loaded."""
        return next((each for each in self._models[::-1] if each.status is None), None)

    def _answers(self) -> bool:
        """Whether a request to the newest process is answered with tokens; waits for the answer."""
        model = self._model()
        made = None if model is None else self._made.get(model)
        if model is None or made is None or model in self._closing:
            return False
        answers: list[Response] = []
        mine: list[bool] = []

        def ask() -> None:
            with contextlib.suppress(InflightError):
                made.client.submit(Request(0, (1,), 2, False), answers.append)
            mine.append(True)

        self.machine.spawn(model.process, ask, "asking")
        self.machine.wait_until(lambda: any(each.is_final for each in answers), 5.0)
        return bool(answers) and answers[-1].error is None

    def _describe(self) -> str:
        lines = [
            f"{time_s:8.2f} {' '.join(task.arguments)[:40]} ({task.pid}) {event}"
            for time_s, task, event in self.kernel.log
        ]
        return "\n".join([*lines, f"now {self.machine.now_ns / 1e9:.2f}", self.machine.stacks()])

    def _lose(self, tasks: Sequence[ProcessEntry]) -> bool:
        running = [each for each in tasks if each.status is None and not each.process.is_stopped]
        if not running:
            return False
        task = self.rng.choice(running)
        if self.rng.random() < 0.5:
            self.kernel.exit(task, self.rng.choice([-9, -11]))
            return True
        self.kernel.send(task, signal.SIGSTOP)
        # Nothing notices that mpirun is stopped before the engine serves, because a start may take any time.
        is_start = task in self._launchers and self._ranks[task][0] not in self._serving
        seconds = self.rng.choice([1.0, 15.0, 60.0, 60.0 if is_start else None])
        if seconds is not None:
            self.machine.call_later(seconds, lambda: self.kernel.send(task, signal.SIGCONT))
        return True

    def _lose_rank(self) -> bool:
        return bool(self._launchers) and self._lose(self._ranks.get(self._launchers[-1], []))

    def _lose_mpirun(self) -> bool:
        return bool(self._launchers) and self._lose(self._launchers[-1:])

    def _refuse_processes(self) -> bool:
        self.kernel.refuses_processes = True
        self.machine.call_later(
            self.rng.random() * 5, lambda: setattr(self.kernel, "refuses_processes", False)
        )
        return True

    def _move_clock(self) -> bool:
        self.machine.wall_ns += int((self.rng.random() - 0.5) * 7200e9)
        return True


FAULTS: dict[str, Callable[[OrchestratedRanks], bool]] = {
    "rank lost": OrchestratedRanks._lose_rank,
    "mpirun lost": OrchestratedRanks._lose_mpirun,
    "no processes": OrchestratedRanks._refuse_processes,
    "clock jumped": OrchestratedRanks._move_clock,
}
"""The faults by name, each of which returns whether it was caused."""


def run(seed: int) -> RunReport:
    """Run an orchestrator; raises AssertionError if a promise was broken."""
    return OrchestratedRanks(seed).run()

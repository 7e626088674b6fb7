"""The supervision of a server on the simulated machine: `scripts/serve` with all processes that it starts.

The launcher runs the real supervisor, with its servers, keepers, guards and the process of /v1; tritonserver, its
stubs and /v1 itself are stand-ins (`server_programs.py`). Processes are killed and stopped, die while they start,
hang, ignore signals and cannot be started; the launcher is asked to end at any point.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Generator, Sequence
from itertools import count
from pathlib import Path
from unittest.mock import patch
from weakref import WeakSet
from zlib import crc32

from inflight import processes
from inflight.openai.options import OpenAiOptions
from inflight.server import drain, guard, launch, orphans, runtime_directory, supervisor
from inflight.server.errors import ServeError
from inflight.server.installation import Installation
from inflight.server.launch import ServerOptions, TritonServer
from inflight.server.ports import Ports
from inflight.server.repository import RuntimeRepository
from inflight.server.supervisor import Signals, Supervisor

from . import modules
from .kernel import Kernel, ProcessEntry
from .kernel_modules import ProcFolder
from .run import ALL_FAULTS, MOST_FAULTS, RunReport, SimulatedRun
from .scheduler import Machine
from .server_programs import STUB, Programs, Triton
from .sockets import Network
from .supervision_rules import check_end, check_lines, check_restarts

_LONGEST_S = 3000.0
_RECOVERED_S = 150.0  # until everything runs again after the last fault
_KEEPER_S = 30.0  # until nothing is left of a launcher that was killed
_HURRY_S = 8.0  # from a second signal to the end
_KILL_S = 3.0  # in addition to the exit timeout
_WITHOUT_ENGINE_S = 5.0  # likewise, if no engine reports that its requests are answered
_LOADED_S = 15.0


class _Echo:
    """The stream of the launcher's log: lines with their times."""

    def __init__(self, machine: Machine) -> None:
        self.lines: list[tuple[float, str]] = []
        self._machine = machine
        self._unfinished = ""

    def write(self, text: str) -> None:
        *lines, self._unfinished = (self._unfinished + text).split("\n")
        self.lines += [(self._machine.now_ns / 1e9, line) for line in lines]

    def flush(self) -> None:
        """Do nothing: nothing is held back."""

    def fileno(self) -> int:
        raise OSError("no file")


class SupervisedServer(SimulatedRun):
    """One run of the supervision.

    Attributes:
        options: The options of the server.
        echo: The launcher's log.
        attempts_s: When the supervisor began to start a server.
        ready_s: When a server was ready.
        signals: The signals that the launcher got, with their times.
        disturbances: Times in which the launcher was stopped, or no process could be started.
        status, error: How the launcher ended; None before, and if it did not raise.
    """

    def __init__(self, seed: int, kept_faults: Collection[int] = ALL_FAULTS) -> None:
        self.machine = Machine(seed)
        self.rng = rng = random.Random(seed + 1)
        self.faults: Counter[str] = Counter()
        has_engine = rng.random() < 0.7
        models = [f"model{number}" for number in range(rng.randint(1, 3))]
        self.programs = Programs(rng, models, has_engine, has_bad_starts=rng.random() < 0.6)
        self.kernel = self.programs.kernel = Kernel(self.machine, self.programs.find)
        has_openai = has_engine and rng.random() < 0.8
        self.options = ServerOptions(
            model_repository=Path("/models"),
            ports=Ports(1, 2, 3, 4 if has_openai else None),
            openai=OpenAiOptions(),
            request_checks=False,
            restarts=rng.choice([0, 1, 3, 5, 5]),
            exit_timeout_s=rng.choice([1, 5, 30]),
            ready_timeout_s=rng.choice([20, 60]),
        )
        num_faults = rng.randint(1, MOST_FAULTS) * (rng.random() < 0.9)
        self._num_faults, self._kept_faults = num_faults, kept_faults
        self.echo = _Echo(self.machine)
        self.attempts_s: list[float] = []
        self.ready_s: list[float] = []
        self.signals: list[tuple[float, int]] = []
        self.disturbances: list[tuple[float, float]] = []
        self.status: int | None = None
        self.error: ServeError | None = None
        self._launcher: ProcessEntry | None = None
        self._takes_signals = False
        self._unguarded: set[ProcessEntry] = set()  # stubs whose guards were lost
        self._numbers = count(1)
        self._is_disk_full = self._is_done = False

    @property
    def launcher(self) -> ProcessEntry:
        """The simulated process that runs `scripts/serve`."""
        assert self._launcher is not None
        return self._launcher

    def run(self) -> RunReport:
        """Run to the end, and check all promises."""
        machine = self.machine
        self._disk = Path(tempfile.mkdtemp(prefix="inflight-supervised-"))
        self._shared_memory = self._disk / "shm"
        self._shared_memory.mkdir()
        try:
            with modules.on(machine, Network(machine), kernel=self.kernel), self._stand_ins():
                self._launcher = self.kernel.start(["serve"], {}, program=self._be_launcher)
                machine.spawn(machine.start_process("operator"), self._operate, "operator")
                machine.run_until(lambda: self._is_done, _LONGEST_S)
        finally:
            shutil.rmtree(self._disk, ignore_errors=True)
        lines = [line for _, line in self.echo.lines]
        trace = [(time_s, task.pid, event) for time_s, task, event in self.kernel.log]
        return RunReport(
            len([event for _, _, event in self.kernel.log if event == "started"]),
            Counter([self._ending()]),
            self.faults,
            (machine.now_ns - 10**9) / 1e9,
            machine.num_switches,
            crc32(str((trace, len(lines))).encode()),
        )

    def _ending(self) -> str:
        if self.error is not None:
            return "given up" if self.ready_s else "not started"
        return "killed" if self.launcher.status == -signal.SIGKILL else "asked to end"

    @contextlib.contextmanager
    def _stand_ins(self) -> Generator[None]:
        """Replace what the machine does not have: networks, the files of models, and processor times."""

        @contextlib.contextmanager
        def reserve_ports(address: str, asked: Ports) -> Generator[Ports]:
            yield asked

        replaced: list[tuple[object, str, object]] = [
            (processes, "PROC", ProcFolder(self.kernel)),
            (runtime_directory, "_SHARED_MEMORY", self._shared_memory),
            (guard, "_SHARED_MEMORY", self._shared_memory),
            (runtime_directory, "make", self._make_folder),
            (orphans, "adopt", lambda: setattr(self.launcher, "adopts", True)),
            (orphans, "_own", WeakSet[object]()),
            (supervisor, "reserve_ports", reserve_ports),
            (launch, "reserve_ports", reserve_ports),
            (launch, "lay_out", self._lay_out),
            (launch, "_find", self._find_installation),
            (launch, "is_ready", self._is_ready),
            (launch, "num_bytes", self._num_bytes),
            (launch, "stubs_processor_time", self._processor_time),
            (drain, "drain_engine", self._drain_engine),
        ]
        with contextlib.ExitStack() as stack:
            for owner, name, value in replaced:
                stack.enter_context(patch.object(owner, name, value))
            yield

    def _make_folder(self) -> Path:
        self.attempts_s.append(self.programs.now_s())
        folder = self._disk / f"server-{next(self._numbers)}"
        folder.mkdir()
        return folder

    def _lay_out(self, options: ServerOptions, target: Path) -> RuntimeRepository:
        if self._is_disk_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        endpoints = {self.programs.models[0]: ""} if self.programs.has_engine else {}
        return RuntimeRepository(target, tuple(self.programs.models), "checkpoint", (), endpoints)

    def _find_installation(self, program: Path | None, folder: Path) -> Installation:
        return Installation(Path("tritonserver"), folder)

    def _triton(self) -> Triton | None:
        """Return the tritonserver that runs; None if there is none."""
        return next((each for each in self.programs.tritons if each.task.status is None), None)

    def _is_ready(self, address: str, http_port: int, metrics_port: int, models: Sequence[str]) -> bool:
        triton = self._triton()
        if triton is not None and triton.task.process.is_stopped:
            self.machine.sleep(5.0)
            return False
        self.machine.sleep(self.rng.random() * 0.02)
        return triton is not None and triton.is_ready

    def _num_bytes(self, running: Sequence[processes.ProcessId]) -> int:
        return 0  # only lines of the log are progress

    def _processor_time(self, group: int) -> float:
        triton = self._triton()
        return 0.0 if triton is None else min(self.programs.now_s(), triton.busy_until_s)

    def _drain_engine(self, path: str, timeout_s: float) -> None:
        """Wait until the engine's requests are answered, which it does in time."""
        triton = self._triton()
        if triton is None:
            return
        now_s = self.programs.now_s()
        triton.busy_until_s = min(triton.busy_until_s, now_s + timeout_s)
        self.machine.sleep(triton.busy_until_s - now_s)

    # ---------------------------------------------------------------- the launcher

    def _be_launcher(self, task: ProcessEntry) -> int:
        try:
            with Signals() as signals:
                self._takes_signals = True
                self.status = Supervisor(self.options, signals, self.echo, self._note_ready).run()  # pyright: ignore[reportArgumentType]
        except ServeError as error:
            self.error, self.status = error, error.exit_code
        return self.status

    def _note_ready(self, server: TritonServer) -> None:
        self.ready_s.append(self.programs.now_s())

    def _is_running(self) -> bool:
        return self.launcher.status is None

    # ---------------------------------------------------------------- faults

    def _operate(self) -> None:
        """Cause faults, check that the server comes back, and end it."""
        machine, rng = self.machine, self.rng
        self._wait(60.0, lambda: self._takes_signals)
        for number in range(self._num_faults):
            machine.sleep(rng.random() * rng.choice([0.1, 3.0, 15.0, 70.0]))
            name = rng.choice(list(FAULTS))
            if number in self._kept_faults and self._is_running() and FAULTS[name](self):
                self.faults[name] += 1
        self.programs.is_over = True
        if self._is_running() and not self.signals and rng.random() < 0.7:
            self._check_recovery()
        if self._is_running() and not self.signals:
            self._ask_to_end()
        self._check_end()
        self._is_done = True

    def _wait(self, longest_s: float, condition: Callable[[], bool]) -> bool:
        """Wait until a condition is true, for at most `longest_s` seconds; return whether it is."""
        deadline_ns = self.machine.now_ns + int(longest_s * 1e9)
        while not condition() and self.machine.now_ns < deadline_ns:
            self.machine.sleep(0.05)
        return condition()

    def _alive(self, has: Callable[[ProcessEntry], bool]) -> ProcessEntry | None:
        """Return one of the running, not stopped processes for which `has` returns true."""
        running = [
            task
            for task in self.kernel.tasks.values()
            if task.status is None and not task.process.is_stopped and has(task)
        ]
        return self.rng.choice(running) if running else None

    def _lose(self, task: ProcessEntry | None) -> bool:
        """Kill a process, or stop it for a while or for ever; return False if there is none."""
        if task is None:
            return False
        if self.rng.random() < 0.5:
            self.kernel.exit(task, self.rng.choice([-9, -11, -6, 1]))
            return True
        self.kernel.send(task, signal.SIGSTOP)
        seconds = self.rng.choice([1.0, 15.0, 60.0, None, None])
        if seconds is not None:
            self.machine.call_later(seconds, lambda: self.kernel.send(task, signal.SIGCONT))
        return True

    def _lose_triton(self) -> bool:
        triton = self._triton()
        if (
            triton is None or triton.is_asked_to_end
        ):  # nothing notices that it is stopped once its models have ended
            return False
        guarded = set(triton.stubs.values()) - self._unguarded
        if not any(stub.status is None and not stub.process.is_stopped for stub in guarded):
            return False
        if not triton.is_ready:
            self.kernel.exit(triton.task, -signal.SIGKILL)
            return True
        return self._lose(self._alive(lambda task: task is triton.task))

    def _end_triton(self) -> bool:
        triton = self._triton()
        if triton is None or not triton.is_ready or triton.holds_stream or self.rng.random() < 0.7:
            return False
        triton.ends_by_order_of_others = True
        self.kernel.send(triton.task, signal.SIGTERM)
        return True

    def _lose_stub(self) -> bool:
        triton = self._triton()
        if triton is None:
            return False
        guarded = [stub for stub in triton.stubs.values() if stub not in self._unguarded]
        return self._lose(self._alive(lambda task: task in guarded))

    def _reload_model(self) -> bool:
        """Unload a model and load it again, as requests to Triton do."""
        triton = self._triton()
        if triton is None or not triton.is_ready or triton.is_asked_to_end:
            return False
        model = self.rng.choice(sorted(triton.stubs))
        stub = triton.stubs[model]
        if stub.status is not None or stub.process.is_stopped or triton.task.process.is_stopped:
            return False
        triton.finalized.add(model)
        triton.changed.wake()
        assert self._wait(_LOADED_S, lambda: stub.status is not None), "a model is not unloaded"
        triton.finalized.discard(model)
        is_started = triton.task.status is None and self.programs.start_stub(triton, model)
        if is_started:
            stub = triton.stubs[model]
            self._wait(_LOADED_S, lambda: model in triton.loaded or stub.status is not None)
        if model not in triton.loaded:
            triton.stubs.pop(model, None)
        return True

    def _lose_guard(self) -> bool:
        lost = self._alive(lambda task: "inflight.server.guard" in task.arguments)
        triton = self._triton()
        if lost is None or triton is None or triton.task.process.is_stopped:
            return False
        stub = lost.parent
        if stub is None or STUB not in stub.arguments or stub.process.is_stopped or stub.status is not None:
            return False
        self._unguarded.add(stub)
        return self._lose(lost)

    def _lose_keeper(self) -> bool:
        return self._lose(self._alive(lambda task: "inflight.server.keeper" in task.arguments))

    def _lose_endpoint(self) -> bool:
        """Lose the process of /v1, and sometimes the next one before it listens."""
        lost = self._alive(lambda task: "inflight.openai" in task.arguments)
        num_before = len(self.programs.endpoints)
        if not self._lose(lost):
            return False
        if self.rng.random() < 0.3 and self._wait(3.0, lambda: len(self.programs.endpoints) > num_before):
            self._lose(self._alive(lambda task: "inflight.openai" in task.arguments))
        return True

    def _stop_launcher(self) -> bool:
        seconds = self.rng.choice([0.5, 5.0, 60.0])
        now_s = self.programs.now_s()
        self.disturbances.append((now_s, now_s + seconds))
        self.kernel.send(self.launcher, signal.SIGSTOP)
        self.machine.call_later(seconds, lambda: self.kernel.send(self.launcher, signal.SIGCONT))
        return True

    def _stop_all(self) -> bool:
        seconds = self.rng.choice([5.0, 60.0])
        now_s = self.programs.now_s()
        self.disturbances.append((now_s, now_s + seconds))
        self.kernel.freeze(seconds)
        self.machine.sleep(seconds)
        return True

    def _kill_launcher(self) -> bool:
        keeper = self._alive(lambda task: "inflight.server.keeper" in task.arguments)
        if keeper is None or self.rng.random() < 0.7 or not self.programs.tritons:
            return False
        self.kernel.exit(self.launcher, -signal.SIGKILL)
        return True

    def _move_clock(self) -> bool:
        self.machine.wall_ns += int((self.rng.random() - 0.5) * 7200e9)
        return True

    def _refuse_processes(self) -> bool:
        seconds = self.rng.random() * self.rng.choice([1.0, 10.0])
        now_s = self.programs.now_s()
        self.disturbances.append((now_s, now_s + seconds))
        self.kernel.refuses_processes = True
        self.machine.call_later(seconds, lambda: setattr(self.kernel, "refuses_processes", False))
        return True

    def _fill_disk(self) -> bool:
        """Let no server's files be written for a while, once a server has been ready."""
        if not self.ready_s:
            return False
        seconds = self.rng.random() * self.rng.choice([1.0, 10.0])
        now_s = self.programs.now_s()
        self.disturbances.append((now_s, now_s + seconds))
        self._is_disk_full = True
        self.machine.call_later(seconds, lambda: setattr(self, "_is_disk_full", False))
        return True

    def _begin_requests(self) -> bool:
        """Let the server be busy for a while, which delays its end."""
        triton = self._triton()
        if triton is None:
            return False
        triton.busy_until_s = self.programs.now_s() + self.rng.choice([0.5, 5.0, 100.0])
        return True

    def _ask_to_end(self) -> bool:
        """Send the launcher a signal to end, and sometimes a second one."""
        for _ in range(self.rng.choice([1, 1, 2])):
            if not self._is_running():
                break
            number = self.rng.choice([signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
            self.signals.append((self.programs.now_s(), number))
            self.kernel.send(self.launcher, number)
            self.machine.sleep(self.rng.random() * self.rng.choice([0.01, 1.0, 20.0]))
        return True

    def _ask_early(self) -> bool:
        return not self.signals and self.rng.random() < 0.4 and self._ask_to_end()

    # ---------------------------------------------------------------- promises

    def _check_recovery(self) -> None:
        """Check that after the last fault everything runs again, or the supervision has ended."""
        assert self._wait(_RECOVERED_S, lambda: self._is_up() or not self._is_running()), (
            f"the server is not up again\n{self._describe()}"
        )
        self.machine.sleep(2.0)
        if self._is_running():
            zombies = [
                task.arguments
                for task in self.kernel.tasks.values()
                if task.parent is self.launcher and task.status is not None
            ]
            zombies = [
                each for each in zombies if "inflight.server.keeper" not in each
            ]  # it waits for them later
            assert not zombies or not self._is_up(), f"not waited for: {zombies}"

    def _is_up(self) -> bool:
        triton = self._triton()
        if triton is None or not triton.is_ready or triton.task.process.is_stopped or triton.is_asked_to_end:
            return False
        stubs = [stub for stub in triton.stubs.values() if stub not in self._unguarded]
        if any(stub.status is not None or stub.process.is_stopped for stub in stubs):
            return False
        if not self.ready_s or self.ready_s[-1] < self.attempts_s[-1]:
            return False
        return self.options.ports.openai is None or any(
            each.is_listening and each.task.status is None and not each.task.process.is_stopped
            for each in self.programs.endpoints
        )

    def _check_end(self) -> None:
        """Check that the launcher ends in time and as documented, and leaves nothing behind."""
        if self._is_running():
            self._wait(600.0, lambda: not self._is_running())
            assert not self._is_running(), f"the launcher does not end\n{self._describe()}"
        if self.launcher.status == -signal.SIGKILL:
            self._wait(_KEEPER_S, self._is_clean)
        assert self._is_clean(), f"left behind: {self._leftovers()}\n{self._describe()}"
        check_lines(self)
        check_restarts(self)
        if self.launcher.status != -signal.SIGKILL:
            check_end(self, _KILL_S + (0.0 if self.programs.has_engine else _WITHOUT_ENGINE_S), _HURRY_S)

    def _is_clean(self) -> bool:
        return not self._leftovers()

    def _leftovers(self) -> list[str]:
        """Return the processes and files that are left."""
        running = [" ".join(task.arguments) for task in self.kernel.tasks.values() if task.status is None]
        folders = [path.name for path in self._disk.iterdir() if path != self._shared_memory]
        running.remove("init")
        return [*running, *folders, *(path.name for path in self._shared_memory.iterdir())]

    def _describe(self) -> str:
        """Return what happened, for the message of a failure."""
        happened = [
            (time_s, f"{' '.join(task.arguments)[-60:]} ({task.pid}) {event}")
            for time_s, task, event in self.kernel.log
        ]
        happened += self.echo.lines + [(time_s, f"signal {number}") for time_s, number in self.signals]
        lines = [f"{time_s:8.2f} {event}" for time_s, event in sorted(happened)]
        return "\n".join([*lines, f"now {self.programs.now_s():.2f}", self.machine.stacks()])


FAULTS: dict[str, Callable[[SupervisedServer], bool]] = {
    "tritonserver lost": SupervisedServer._lose_triton,
    "tritonserver ended by others": SupervisedServer._end_triton,
    "model lost": SupervisedServer._lose_stub,
    "model reloaded": SupervisedServer._reload_model,
    "guard lost": SupervisedServer._lose_guard,
    "keeper lost": SupervisedServer._lose_keeper,
    "/v1 lost": SupervisedServer._lose_endpoint,
    "launcher stopped": SupervisedServer._stop_launcher,
    "all stopped": SupervisedServer._stop_all,
    "launcher killed": SupervisedServer._kill_launcher,
    "clock jumped": SupervisedServer._move_clock,
    "no processes": SupervisedServer._refuse_processes,
    "disk full": SupervisedServer._fill_disk,
    "busy": SupervisedServer._begin_requests,
    "asked to end": SupervisedServer._ask_early,
}
"""The faults by name, each of which returns whether it was caused."""


def run(seed: int) -> RunReport:
    """Run the supervision of a server; raises AssertionError if a promise was broken."""
    return SupervisedServer(seed).run()

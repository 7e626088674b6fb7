"""The launcher of a server on the simulated machine: `scripts/serve`, with all processes that it starts.

The launcher runs the real supervisor, with its servers, keepers, guards and the process of /v1. tritonserver, its
stubs and /v1 itself are stand-ins (`server_programs.py`).
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
from collections.abc import Callable, Generator, Sequence
from itertools import count
from pathlib import Path
from unittest.mock import patch
from weakref import WeakSet

from inflight import processes
from inflight.server import drain, guard, launch, orphans, runtime_directory, supervisor
from inflight.server.errors import ServeError
from inflight.server.installation import Installation
from inflight.server.launch import ServerOptions, TritonServer
from inflight.server.ports import Ports
from inflight.server.repository import RuntimeRepository
from inflight.server.supervisor import Signals, Supervisor

from .kernel import Kernel, ProcessEntry
from .kernel_modules import ProcFolder
from .scheduler import Machine
from .server_programs import Programs, Triton
from .supervision_rules import check_end, check_lines, check_restarts

RECOVERED_S = 150.0  # until everything runs again after the last fault
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


class Launcher:
    """A launcher, and what is known of it and its servers.

    Args:
        machine: The machine.
        rng: Random numbers.
        programs: The programs of its processes.
        options: The options of the server.

    Attributes:
        echo: The launcher's log.
        attempts_s: When the supervisor began to start a server.
        ready_s: When a server was ready.
        signals: The signals that the launcher got, with their times.
        disturbances: Times in which the launcher was stopped, or no process could be started.
        unguarded: Models' processes whose guards were lost.
        is_disk_full: Whether no files of a server can be written.
        status, error: How the launcher ended; None before, and if it did not raise.
    """

    def __init__(
        self, machine: Machine, rng: random.Random, programs: Programs, options: ServerOptions
    ) -> None:
        self.machine, self.rng = machine, rng
        self.programs, self.options = programs, options
        self.kernel = programs.kernel = Kernel(machine, programs.find)
        self.echo = _Echo(machine)
        self.attempts_s: list[float] = []
        self.ready_s: list[float] = []
        self.signals: list[tuple[float, int]] = []
        self.disturbances: list[tuple[float, float]] = []
        self.unguarded: set[ProcessEntry] = set()
        self.is_disk_full = False
        self.status: int | None = None
        self.error: ServeError | None = None
        self._process: ProcessEntry | None = None
        self._takes_signals = False
        self._numbers = count(1)

    @property
    def process(self) -> ProcessEntry:
        """The simulated process that runs `scripts/serve`."""
        assert self._process is not None
        return self._process

    @contextlib.contextmanager
    def folders(self) -> Generator[None]:
        """Make the folders of the machine's disk, and remove them at the end."""
        self._disk = Path(tempfile.mkdtemp(prefix="inflight-supervised-"))
        self._shared_memory = self._disk / "shm"
        self._shared_memory.mkdir()
        try:
            yield
        finally:
            shutil.rmtree(self._disk, ignore_errors=True)

    def start(self) -> None:
        """Start `scripts/serve` as a simulated process, without waiting for it."""
        self.kernel.start(["serve"], {}, program=self._be_launcher)

    def wait_for_start(self) -> None:
        """Wait until the launcher takes signals."""
        self.wait(60.0, lambda: self._takes_signals)

    @contextlib.contextmanager
    def stand_ins(self) -> Generator[None]:
        """Replace what the machine does not have: networks, the files of models, and processor times."""

        @contextlib.contextmanager
        def reserve_ports(address: str, asked: Ports) -> Generator[Ports]:
            yield asked

        replaced: list[tuple[object, str, object]] = [
            (processes, "PROC", ProcFolder(self.kernel)),
            (runtime_directory, "_SHARED_MEMORY", self._shared_memory),
            (guard, "_SHARED_MEMORY", self._shared_memory),
            (runtime_directory, "make", self._make_folder),
            (orphans, "adopt", lambda: setattr(self.process, "adopts", True)),
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
        if self.is_disk_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        endpoints = {self.programs.models[0]: ""} if self.programs.has_engine else {}
        return RuntimeRepository(target, tuple(self.programs.models), "checkpoint", (), endpoints)

    def _find_installation(self, program: Path | None, folder: Path) -> Installation:
        return Installation(Path("tritonserver"), folder)

    def triton(self) -> Triton | None:
        """Return the tritonserver that runs; None if there is none."""
        return next((each for each in self.programs.tritons if each.task.status is None), None)

    def _is_ready(self, address: str, http_port: int, metrics_port: int, models: Sequence[str]) -> bool:
        triton = self.triton()
        if triton is not None and triton.task.process.is_stopped:
            self.machine.sleep(5.0)
            return False
        self.machine.sleep(self.rng.random() * 0.02)
        return triton is not None and triton.is_ready

    def _num_bytes(self, running: Sequence[processes.ProcessId]) -> int:
        return 0  # only lines of the log are progress

    def _processor_time(self, group: int) -> float:
        triton = self.triton()
        return 0.0 if triton is None else min(self.programs.now_s(), triton.busy_until_s)

    def _drain_engine(self, path: str, timeout_s: float) -> None:
        triton = self.triton()
        if triton is not None:
            self.programs.drain_engine(triton, timeout_s)

    # ---------------------------------------------------------------- the launcher

    def _be_launcher(self, task: ProcessEntry) -> int:
        self._process = task
        try:
            with Signals() as signals:
                self._takes_signals = True
                self.status = Supervisor(self.options, signals, self.echo, self._note_ready).run()  # pyright: ignore[reportArgumentType]
        except ServeError as error:
            self.error, self.status = error, error.exit_code
        return self.status

    def _note_ready(self, server: TritonServer) -> None:
        self.ready_s.append(self.programs.now_s())

    def reload_model(self, triton: Triton, model: str) -> None:
        """Unload a model and load it again, as requests to Triton do."""
        stub = triton.stubs[model]
        triton.finalized.add(model)
        triton.changed.wake()
        assert self.wait(_LOADED_S, lambda: stub.status is not None), "a model is not unloaded"
        triton.finalized.discard(model)
        is_started = triton.task.status is None and self.programs.start_stub(triton, model)
        if is_started:
            stub = triton.stubs[model]
            self.wait(_LOADED_S, lambda: model in triton.loaded or stub.status is not None)
        if model not in triton.loaded:
            triton.stubs.pop(model, None)

    def is_running(self) -> bool:
        """Return whether the launcher has not ended."""
        return self.process.status is None

    def wait(self, longest_s: float, condition: Callable[[], bool]) -> bool:
        """Wait until a condition is true, for at most `longest_s` seconds; return whether it is."""
        return self.machine.wait_until(condition, longest_s, every_s=0.05)

    def ask_to_end(self) -> bool:
        """Send the launcher a signal to end, and sometimes a second one."""
        for _ in range(self.rng.choice([1, 1, 2])):
            if not self.is_running():
                break
            number = self.rng.choice([signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
            self.signals.append((self.programs.now_s(), number))
            self.kernel.send(self.process, number)
            self.machine.sleep(self.rng.random() * self.rng.choice([0.01, 1.0, 20.0]))
        return True

    # ---------------------------------------------------------------- promises

    def check_recovery(self) -> None:
        """Check that after the last fault everything runs again, or the supervision has ended."""
        assert self.wait(RECOVERED_S, lambda: self.is_up() or not self.is_running()), (
            f"the server is not up again\n{self.describe()}"
        )
        self.machine.sleep(2.0)
        if self.is_running():
            zombies = [
                task.arguments
                for task in self.kernel.tasks.values()
                if task.parent is self.process and task.status is not None
            ]
            zombies = [
                each for each in zombies if "inflight.server.keeper" not in each
            ]  # it waits for them later
            assert not zombies or not self.is_up(), f"not waited for: {zombies}"

    def is_up(self) -> bool:
        triton = self.triton()
        if triton is None or not triton.is_ready or triton.task.process.is_stopped or triton.is_asked_to_end:
            return False
        stubs = [stub for stub in triton.stubs.values() if stub not in self.unguarded]
        if any(stub.status is not None or stub.process.is_stopped for stub in stubs):
            return False
        if not self.ready_s or self.ready_s[-1] < self.attempts_s[-1]:
            return False
        return self.options.ports.openai is None or any(
            each.is_listening and each.task.status is None and not each.task.process.is_stopped
            for each in self.programs.endpoints
        )

    def check_end(self) -> None:
        """Check that the launcher ends in time and as documented, and leaves nothing behind."""
        if self.is_running():
            self.wait(600.0, lambda: not self.is_running())
            assert not self.is_running(), f"the launcher does not end\n{self.describe()}"
        if self.process.status == -signal.SIGKILL:
            self.wait(_KEEPER_S, self._is_clean)
        assert self._is_clean(), f"left behind: {self._leftovers()}\n{self.describe()}"
        check_lines(self)
        check_restarts(self)
        if self.process.status != -signal.SIGKILL:
            check_end(self, _KILL_S + (0.0 if self.programs.has_engine else _WITHOUT_ENGINE_S), _HURRY_S)

    def _is_clean(self) -> bool:
        return not self._leftovers()

    def _leftovers(self) -> list[str]:
        """Return the processes and files that are left."""
        running = [" ".join(task.arguments) for task in self.kernel.tasks.values() if task.status is None]
        folders = [path.name for path in self._disk.iterdir() if path != self._shared_memory]
        running.remove("init")
        return [*running, *folders, *(path.name for path in self._shared_memory.iterdir())]

    def describe(self) -> str:
        """Return what happened, for the message of a failure."""
        happened = [
            (time_s, f"{' '.join(task.arguments)[-60:]} ({task.pid}) {event}")
            for time_s, task, event in self.kernel.log
        ]
        happened += self.echo.lines + [(time_s, f"signal {number}") for time_s, number in self.signals]
        lines = [f"{time_s:8.2f} {event}" for time_s, event in sorted(happened)]
        return "\n".join([*lines, f"now {self.programs.now_s():.2f}", self.machine.stacks()])

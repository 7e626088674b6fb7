"""Stand-ins for the programs of a server on the simulated machine: tritonserver, its stubs and /v1.

A stub starts the real guard, as the models' processes do. Guards and the keeper run their real programs. The
stand-ins die, hang and ignore signals as the seed wants.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from inflight.processes import ProcessId
from inflight.server import guard, keeper, runtime_directory

from .kernel import Kernel, PipeEnd, ProcessEntry, Program
from .scheduler import Process, Waiters

STUB = "triton_python_backend_stub"
_PARENT_LOOK_S = 2.0
_SILENT_PARENT_S = 8.0  # after which a stub may end because tritonserver is stopped
_RECORD = "1129 02:00:00.000000 7"


class TritonStart(Enum):
    """How a start of tritonserver goes."""

    WELL = "well"
    DIES_AT_ONCE = "it dies at once"
    DIES_LOADING = "it dies while it loads models"
    STARVED = "it abandons a stub, and aborts"
    HANGS = "it hangs while it loads models"
    FAILS = "a model cannot be loaded"


@dataclass(eq=False)
class Triton:
    """The stand-in for a tritonserver, with its models and their stubs.

    Attributes:
        task: Its process.
        folder: The server's folder.
        start: How its start goes.
        stubs: The process of each model.
        loaded: Models that are loaded.
        is_ready: Whether it answers that it is ready.
        is_asked_to_end: Whether it has got SIGTERM.
        ends_by_order_of_others: Whether somebody else than the supervision has sent it this signal.
        finalized: Models whose processes are asked to end.
        busy_until_s: When it has answered its requests.
        holds_stream: Whether a client holds a stream, so that it does not end.
        changed: Wakes it and its stubs.
    """

    task: ProcessEntry
    folder: Path
    start: TritonStart
    changed: Waiters
    stubs: dict[str, ProcessEntry] = field(default_factory=dict[str, ProcessEntry])
    loaded: set[str] = field(default_factory=set[str])
    is_ready: bool = False
    is_asked_to_end: bool = False
    ends_by_order_of_others: bool = False
    finalized: set[str] = field(default_factory=set[str])
    busy_until_s: float = 0.0
    holds_stream: bool = False


@dataclass(eq=False)
class Endpoint:
    """A process of /v1, which listens or not yet.

    Attributes:
        task: Its process.
        is_listening: Whether it has listened.
    """

    task: ProcessEntry
    is_listening: bool = False


class Programs:
    """The programs that a server's processes run.

    Args:
        rng: Random numbers that choose how well the programs run.
        models: Names of the models; the first has an engine, if `has_engine`.
        has_engine: Whether the first model has an engine.
        has_bad_starts: Whether starts may fail.

    Attributes:
        kernel: The machine's kernel, which is set before a program runs.
        tritons, endpoints: All processes of these kinds so far.
        guards: The guard of each model's process.
        is_over: Whether faults have ended, so that every start goes well.
        num_endpoints_without_start: How many processes of /v1 ended before they listened.
    """

    kernel: Kernel

    def __init__(
        self, rng: random.Random, models: Sequence[str], has_engine: bool, has_bad_starts: bool
    ) -> None:
        self._rng = rng
        self.models = models
        self.has_engine = has_engine
        self.tritons: list[Triton] = []
        self.endpoints: list[Endpoint] = []
        self.guards: dict[Process, guard.Guard] = {}
        self.is_over = False
        self.num_endpoints_without_start = 0
        self._badness = rng.choice([0.1, 0.5, 0.95]) if has_bad_starts else 0.0

    def find(self, arguments: Sequence[str]) -> Program:
        """Return the program of a command line."""
        words = list(arguments)
        if "inflight.server.keeper" in words:
            return lambda task: self._run(lambda: keeper.main(Path(words[-1])))
        if "inflight.server.guard" in words:
            server, region, model = words[-3:]
            return lambda task: self._run(lambda: guard.main(ProcessId.parse(server), region, model))
        if "inflight.openai" in words:
            return self._be_endpoint
        if any(Path(word).name == "tritonserver" for word in words):
            return self._be_tritonserver
        raise FileNotFoundError(2, "No such file or directory")

    def now_s(self) -> float:
        """Return the monotonic time in seconds."""
        return self.kernel.machine.now_ns / 1e9

    @staticmethod
    def _run(main: Callable[[], None]) -> int:
        main()
        return 0

    def _is_bad(self, share: float) -> bool:
        return not self.is_over and self._rng.random() < share

    @staticmethod
    def _write(task: ProcessEntry, line: str, number: int = 1) -> None:
        end = task.descriptors.get(number)
        if isinstance(end, PipeEnd) and end.pipe.num_readers:
            end.pipe.write(f"{line}\n".encode())

    # ---------------------------------------------------------------- tritonserver

    def _be_tritonserver(self, task: ProcessEntry) -> int:
        machine, rng = self.kernel.machine, self._rng
        folder = Path(task.environment[runtime_directory.FOLDER_VARIABLE])
        start = (
            rng.choice(list(TritonStart)[1:])
            if self._is_bad(self._badness / (1 if self.tritons else 6))
            else TritonStart.WELL
        )
        others = [each for each in self.tritons if each.task.status is None]
        assert not others, "two tritonservers run at the same time"
        me = Triton(task, folder, start, Waiters(machine))
        self.tritons.append(me)

        def end(number: int, frame: object) -> None:
            me.is_asked_to_end = True
            me.changed.wake()

        machine.sleep(rng.random() * 0.3)
        if start is TritonStart.DIES_AT_ONCE:
            self.kernel.exit(task, rng.choice([1, -6, -11]))
        task.handlers[signal.SIGTERM] = end
        me.holds_stream = rng.random() < 0.15
        if not self._load(me):
            return 1
        me.is_ready = True
        while not me.is_asked_to_end:
            me.changed.wait()
        return self._end(me)

    def _load(self, me: Triton) -> bool:
        """Start the stubs, and wait until their models are loaded; return whether all are."""
        machine, rng = self.kernel.machine, self._rng
        for model in self.models:
            if not self.start_stub(me, model):
                return False
        while me.start is TritonStart.HANGS and not me.is_asked_to_end:
            me.changed.wait()
        if me.start in (TritonStart.DIES_LOADING, TritonStart.STARVED):
            machine.sleep(rng.random() * 2)
            if me.start is TritonStart.STARVED:
                self._write(me.task, f"E{_RECORD} pb_stub.cc:1] Stub process 'model' is not healthy.")
            self.kernel.exit(me.task, -6)
        for model in self.models:
            while model not in me.loaded and me.stubs[model].status is None and not me.is_asked_to_end:
                machine.sleep(0.1)
            if model not in me.loaded:
                self._write(
                    me.task, f"E{_RECORD} model_lifecycle.cc:1] failed to load '{model}' version 1: it fails"
                )
                return False
            self._write(me.task, f"I{_RECORD} model_lifecycle.cc:1] successfully loaded '{model}'")
        return True

    def start_stub(self, me: Triton, model: str) -> bool:
        """Start the process of a model, as tritonserver does; return whether that was possible."""
        region = f"{runtime_directory.shared_memory_prefix(me.folder)}-{model}-{len(self.kernel.log)}"
        output = {
            number: end.copy() for number, end in me.task.descriptors.items() if isinstance(end, PipeEnd)
        }
        arguments = [
            STUB,
            f"/models/{model}/1/model.py",
            region,
            "4096",
            "4096",
            str(me.task.pid),
            "/backends",
        ]
        (runtime_directory._SHARED_MEMORY / region).touch()  # pyright: ignore[reportPrivateUsage]
        try:
            me.stubs[model] = self.kernel.start(
                arguments,
                me.task.environment,
                output,
                lambda task: self._be_stub(me, task, model),
                me.task,
            )
        except OSError:
            for end in output.values():
                end.close()
            return False
        return True

    def _end(self, me: Triton) -> int:
        """Finish the requests and end the models, as after SIGTERM."""
        machine = self.kernel.machine
        while self.now_s() < me.busy_until_s or me.holds_stream:
            machine.sleep(min(1.0, max(0.05, me.busy_until_s - self.now_s())))
        for model, stub in me.stubs.items():
            me.finalized.add(model)
            me.changed.wake()
            while stub.status is None:
                machine.sleep(0.1)
        return 0

    def _be_stub(self, me: Triton, task: ProcessEntry, model: str) -> int:
        machine, rng = self.kernel.machine, self._rng
        guard.keep_private()
        machine.sleep(rng.random() * rng.choice([0.5, 4.0]))
        if me.start is TritonStart.FAILS:
            return 1
        try:
            mine = guard.guard_of_front_end(model)
        except OSError:  # no process can be started
            return 1
        assert mine is not None, "a stub is not recognized by its arguments"
        self.guards[task.process] = mine
        self._load_model(task, model)
        runtime_directory.note_initialized(model)
        if self.has_engine and model == self.models[0]:
            (me.folder / "engine.sock").touch()
        me.loaded.add(model)
        silent_s, look_s = 0.0, rng.random() * _PARENT_LOOK_S
        needs_parent = look_s < _PARENT_LOOK_S / 2  # a stub that has nothing to send does not notice the stop
        while model not in me.finalized:
            me.changed.wait(look_s)
            look_s = _PARENT_LOOK_S
            silent_s = silent_s + _PARENT_LOOK_S if me.task.process.is_stopped else 0.0
            if me.task.status is not None or (needs_parent and silent_s > _SILENT_PARENT_S):
                return 1
        me.loaded.discard(model)
        self._unload_model(task, model)
        mine.dismiss()
        return 0

    # ---------------------------------------------------------------- /v1

    def _be_endpoint(self, task: ProcessEntry) -> int:
        machine, rng = self.kernel.machine, self._rng
        assert all(each.task.status is not None for each in self.endpoints), (
            "two processes of /v1 at the same time"
        )
        me = Endpoint(task)
        self.endpoints.append(me)
        is_asked_to_end = Waiters(machine)
        ignores = rng.random() < 0.1
        asked: list[int] = []

        def end(number: int, frame: object) -> None:
            asked.append(number)
            is_asked_to_end.wake()

        machine.sleep(rng.random() * rng.choice([0.2, 2.0]))
        if self._is_bad(self._badness / (4 if len(self.endpoints) > 1 else 20)):
            self.num_endpoints_without_start += 1
            self._write(task, "the certificate cannot be read", 2)
            return 2
        task.handlers[signal.SIGTERM] = end
        self._listen(task)
        self._write(task, "listening")
        me.is_listening = True
        if self._is_bad(0.5 * self._badness):
            machine.sleep(rng.random() * 3)
            self.kernel.exit(task, rng.choice([3, -9, -11]))
        while not asked or ignores:
            is_asked_to_end.wait()
        self._cease_to_listen(task)
        return 0

    # ---------------------------------------------------------------- what the stand-ins serve

    def _load_model(self, task: ProcessEntry, model: str) -> None:
        """Let a model's process serve what it does; the stand-ins serve nothing."""

    def _unload_model(self, task: ProcessEntry, model: str) -> None:
        """Answer what a model's process has got, and end what `_load_model` has started."""

    def drain_engine(self, triton: Triton, timeout_s: float) -> None:
        """Wait until the engine's requests are answered, which it does in time."""
        now_s = self.now_s()
        triton.busy_until_s = min(triton.busy_until_s, now_s + timeout_s)
        self.kernel.machine.sleep(triton.busy_until_s - now_s)

    def _listen(self, task: ProcessEntry) -> None:
        """Let a process of /v1 listen; the stand-ins do not."""

    def _cease_to_listen(self, task: ProcessEntry) -> None:
        """End a process of /v1 in order."""
        rng = self._rng
        self.kernel.machine.sleep(rng.random() * rng.choice([0.1, 3.0, 10.0]))

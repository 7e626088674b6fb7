"""A whole server whose processes the real launcher starts, watches and starts again, instead of the operator.

The launcher is that of `launcher.py`, and tritonserver is the stand-in of `server_programs.py`. But the processes
of its models run the engine and Triton's front ends, and the process of /v1 runs /v1. Front ends that are only
clients of the endpoint run outside of the server.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import random
import signal
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from inflight.endpoint.client import drain_engine
from inflight.openai.options import OpenAiOptions
from inflight.server.launch import ServerOptions
from inflight.server.ports import Ports

from .endpoint_front_ends import EndpointFrontEnds
from .front_ends import FrontEnds
from .kernel import ProcessEntry
from .launcher import RECOVERED_S, Launcher
from .openai_server import OpenAiFrontEnds
from .run import ALL_FAULTS, PATH, RunReport
from .scheduler import Process
from .server_programs import Programs, Triton
from .triton_server import TritonFrontEnds
from .whole_server import FAULTS, WholeServer

_ENGINE = "tensorrt_llm"
_ALWAYS = 10**6  # restarts: starts may fail for as long as a fault lasts


class _ServersPrograms(Programs):
    """Programs whose processes serve what they do in a real server."""

    def __init__(self, rng: random.Random, models: Sequence[str], server: LaunchedServer) -> None:
        super().__init__(rng, models, has_engine=True, has_bad_starts=False)
        self._server = server

    def _load_model(self, task: ProcessEntry, model: str) -> None:
        if model == _ENGINE:
            self._server.load_engine(task.process)
        else:
            self._server.run_front_end(task.process, TritonFrontEnds)

    def _unload_model(self, task: ProcessEntry, model: str) -> None:
        if model == _ENGINE:
            self._server.unload_engine()
        else:
            self._server.end_front_end(task.process)

    def drain_engine(self, triton: Triton, timeout_s: float) -> None:
        drain_engine(PATH, timeout_s)

    def _listen(self, task: ProcessEntry) -> None:
        self._server.run_front_end(task.process, OpenAiFrontEnds)

    def _cease_to_listen(self, task: ProcessEntry) -> None:
        self._server.end_front_end(task.process)


class _ProcessEnd:
    """A resource of a process which calls a function when the process ends or is killed."""

    def __init__(self, process: Process, function: Callable[[], object]) -> None:
        self._function = function
        process.resources[id(self)] = self

    def end_with_process(self) -> None:
        """Call the function, as the machine calls this for each resource of a process that has ended."""
        self._function()


class LaunchedServer(WholeServer):
    """One run of a server that is started by its launcher."""

    _longest_s, _longest_end_s = 3000.0, 900.0
    _close_timeouts_s = (0.0, 0.5, 5.0)

    def __init__(self, seed: int, kept_faults: Collection[int] = ALL_FAULTS) -> None:
        super().__init__(seed, kept_faults)
        kinds = {type(kind): kind for kind in self._kinds}
        self._outside = kinds.get(EndpointFrontEnds)
        names = ["tensorrt_llm_infer", "ensemble"][: self.rng.randint(1, 2)]
        models = [_ENGINE, *(names if TritonFrontEnds in kinds else ())]
        options = ServerOptions(
            model_repository=Path("/models"),
            ports=Ports(1, 2, 3, 4 if OpenAiFrontEnds in kinds else None),
            openai=OpenAiOptions(),
            request_checks=False,
            restarts=_ALWAYS,
            exit_timeout_s=self.rng.choice([5, 30]),
            ready_timeout_s=60,
        )
        self._launcher = Launcher(self.machine, self.rng, _ServersPrograms(self.rng, models, self), options)
        self._kernel = self._launcher.kernel

    def _run(self) -> RunReport:
        with self._launcher.folders(), self._launcher.stand_ins():
            return super()._run()

    @property
    def all_faults(self) -> Mapping[str, Callable[[Any], None]]:
        return FAULTS | FAULTS_OF_LAUNCHER

    def _count_work(self) -> Counter[str]:
        return super()._count_work() + Counter({"starts of the server": len(self._launcher.attempts_s)})

    # ---------------------------------------------------------------- in the server's processes

    def load_engine(self, process: Process) -> None:
        """Run the engine in a model's process, and return when it serves."""

        def forget() -> None:
            if process is self._engine_process:
                self._engine = None

        _ProcessEnd(process, forget)
        self._run_engine(process)
        while self._engine is None:
            self.machine.sleep(0.05)

    def unload_engine(self) -> None:
        """End the engine in order, unless it is lost."""
        if self._engine is not None:
            self._close_engine()

    def run_front_end(self, process: Process, kind: type[FrontEnds]) -> None:
        """Run a front end in a process, and return when it serves."""
        made = next(each for each in self._kinds if isinstance(each, kind))
        self._front_ends[process] = made
        _ProcessEnd(process, lambda: self.users_left.pop(process, None))
        made.start(process)
        while not made.is_up(process):
            self.machine.sleep(0.05)

    def end_front_end(self, process: Process) -> None:
        """End a front end in order."""
        self._front_ends[process].end(process)

    def _start_follower(self, name: str) -> Process:
        """Start a rank beside rank 0, which is a process of the server."""
        kernel, first = self._launcher.kernel, self._launcher.kernel.this

        def stay(task: ProcessEntry) -> int:
            while True:
                self.machine.sleep(1000.0)

        return kernel.start([name], first.environment, program=stay, parent=first.parent).process

    def _end_after_loss(self, process: Process) -> None:
        self._launcher.programs.guards[process].end_server()

    # ---------------------------------------------------------------- by the operator

    def _start_engine(self) -> None:
        """Start the launcher, and wait until the server is up."""
        self._fault_times.append((0, 10**18))
        self._launcher.start()
        self._launcher.wait_for_start()
        self._replace_engine()
        self._fault_times[-1] = 0, self.machine.now_ns

    def _replace_engine(self) -> None:
        """Wait until the launcher has started again what is lost."""
        is_up = self._launcher.wait(RECOVERED_S, self._is_up)
        assert is_up, f"the server is not up again\n{self._launcher.describe()}"

    def _is_up(self) -> bool:
        return self._launcher.is_up() and self._engine is not None

    def _start_front_end(self) -> None:
        """Start a front end outside of the server, if there is this kind."""
        if self._outside is not None:
            process = self.machine.start_process("front end")
            self._front_ends[process] = self._outside
            self._outside.start(process)

    def _replace_front_end(self, process: Process, kind: FrontEnds) -> None:
        if kind is self._outside:
            super()._replace_front_end(process, kind)
        else:
            self._kill(process)
            self._replace_engine()

    def _kill(self, process: Process) -> None:
        task = self._launcher.kernel.tasks.get(process.pid)
        if task is None:
            super()._kill(process)
        else:
            self._launcher.kernel.exit(task, -signal.SIGKILL)

    def _stop_process(self, process: Process) -> float:
        seconds = super()._stop_process(process)
        self._replace_engine()
        return seconds

    def _stop_for(self, process: Process, seconds: float) -> None:
        kernel = self._launcher.kernel
        task = kernel.tasks.get(process.pid)
        if task is None:
            super()._stop_for(process, seconds)
        else:
            kernel.send(task, signal.SIGSTOP)
            self.machine.call_later(seconds, lambda: kernel.send(task, signal.SIGCONT))

    def _unload_engine(self) -> None:
        """Unload a model and load it again, as requests to Triton do."""
        triton = self._launcher.triton()
        assert triton is not None
        if names := self._reloadable(triton):
            self._launcher.reload_model(triton, self.rng.choice(names))
            self._replace_engine()

    def _reloadable(self, triton: Triton) -> list[str]:
        """Return the models that can be unloaded and loaded again."""
        return list(triton.stubs)

    def _end_loop(self) -> None:
        """Let the next iteration end the loop, and kill the engine's process, which does not end by itself."""
        self._let_loop_die()
        self.machine.sleep(self.rng.random() * 5)
        self._kill_engine()

    def _end(self) -> None:
        """Ask the launcher to end, or kill it, and check that nothing is left."""
        if self.rng.random() < 0.2:
            self._kill(self._launcher.process.process)
        else:
            self._launcher.ask_to_end()
        self._launcher.check_end()

    def _check_threads(self) -> None:
        """Do nothing: the threads ended with their processes."""

    # ---------------------------------------------------------------- further faults

    def lose_tritonserver(self) -> None:
        """Kill tritonserver, or stop it for a while."""
        triton = self._launcher.triton()
        assert triton is not None
        if self.rng.random() < 0.5:
            self._kill(triton.task.process)
            self._replace_engine()
        else:
            self._stop_process(triton.task.process)

    def stop_launcher(self) -> None:
        """Stop the launcher for a while, in which the engine is lost or not."""
        now_s, seconds = self._launcher.programs.now_s(), self.rng.choice([0.5, 5.0, 60.0])
        self._launcher.disturbances.append((now_s, now_s + seconds))
        self._stop_for(self._launcher.process.process, seconds)
        if self.rng.random() < 0.5:
            self._kill_engine()
        self.machine.sleep(seconds + 0.1)
        self._replace_engine()

    def refuse_processes(self) -> None:
        """Let no process be started for a while, in which the engine is lost."""
        kernel, seconds = self._launcher.kernel, self.rng.random() * self.rng.choice([1.0, 10.0])
        now_s = self._launcher.programs.now_s()
        self._launcher.disturbances.append((now_s, now_s + seconds))
        kernel.refuses_processes = True
        self.machine.call_later(seconds, lambda: setattr(kernel, "refuses_processes", False))
        self._kill_engine()


FAULTS_OF_LAUNCHER: dict[str, Callable[[LaunchedServer], None]] = {
    "tritonserver lost": LaunchedServer.lose_tritonserver,
    "launcher stopped": LaunchedServer.stop_launcher,
    "no processes": LaunchedServer.refuse_processes,
}
"""The further faults, by name. No guard is lost, because the loss of its model's process would not be noticed."""

"""The supervision of a server on the simulated machine: `scripts/serve` with all processes that it starts.

The launcher runs the real supervisor, with its servers, keepers, guards and the process of /v1; tritonserver, its
stubs and /v1 itself are stand-ins (`server_programs.py`). Processes are killed and stopped, die while they start,
hang, ignore signals and cannot be started; the launcher is asked to end at any point.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import random
import signal
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from zlib import crc32

from inflight.openai.options import OpenAiOptions
from inflight.server.launch import ServerOptions
from inflight.server.ports import Ports

from . import modules
from .kernel import ProcessEntry
from .launcher import Launcher
from .run import ALL_FAULTS, MOST_FAULTS, RunReport, SimulatedRun
from .scheduler import Machine
from .server_programs import STUB, Programs
from .sockets import Network

_LONGEST_S = 3000.0


class SupervisedServer(SimulatedRun):
    """One run of the supervision."""

    def __init__(self, seed: int, kept_faults: Collection[int] = ALL_FAULTS) -> None:
        self.machine = Machine(seed)
        self.rng = rng = random.Random(seed + 1)
        self.faults: Counter[str] = Counter()
        has_engine = rng.random() < 0.7
        models = [f"model{number}" for number in range(rng.randint(1, 3))]
        self.programs = Programs(rng, models, has_engine, has_bad_starts=rng.random() < 0.6)
        has_openai = has_engine and rng.random() < 0.8
        options = ServerOptions(
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
        self.launcher = Launcher(self.machine, rng, self.programs, options)
        self.kernel = self.launcher.kernel
        self._is_done = False

    def run(self) -> RunReport:
        """Run to the end, and check all promises."""
        machine, launcher = self.machine, self.launcher
        with (
            launcher.folders(),
            modules.on(machine, Network(machine), kernel=self.kernel),
            launcher.stand_ins(),
        ):
            launcher.start()
            machine.spawn(machine.start_process("operator"), self._operate, "operator")
            machine.run_until(lambda: self._is_done, _LONGEST_S)
        trace = [(time_s, task.pid, event) for time_s, task, event in self.kernel.log]
        return RunReport(
            len([event for _, _, event in self.kernel.log if event == "started"]),
            Counter([self._ending()]),
            self.faults,
            (machine.now_ns - 10**9) / 1e9,
            machine.num_switches,
            crc32(str((trace, len(launcher.echo.lines))).encode()),
        )

    def _ending(self) -> str:
        launcher = self.launcher
        if launcher.error is not None:
            return "given up" if launcher.ready_s else "not started"
        return "killed" if launcher.process.status == -signal.SIGKILL else "asked to end"

    # ---------------------------------------------------------------- faults

    def _operate(self) -> None:
        """Cause faults, check that the server comes back, and end it."""
        machine, rng = self.machine, self.rng
        self.launcher.wait_for_start()
        for number in range(self._num_faults):
            machine.sleep(rng.random() * rng.choice([0.1, 3.0, 15.0, 70.0]))
            name = rng.choice(list(FAULTS))
            if number in self._kept_faults and self.launcher.is_running() and FAULTS[name](self):
                self.faults[name] += 1
        self.programs.is_over = True
        if self.launcher.is_running() and not self.launcher.signals and rng.random() < 0.7:
            self.launcher.check_recovery()
        if self.launcher.is_running() and not self.launcher.signals:
            self.launcher.ask_to_end()
        self.launcher.check_end()
        self._is_done = True

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
        triton = self.launcher.triton()
        if (
            triton is None or triton.is_asked_to_end
        ):  # nothing notices that it is stopped once its models have ended
            return False
        if not triton.is_ready:
            self.kernel.exit(triton.task, -signal.SIGKILL)
            return True
        return self._lose(self._alive(lambda task: task is triton.task))

    def _end_triton(self) -> bool:
        triton = self.launcher.triton()
        if triton is None or not triton.is_ready or triton.holds_stream or self.rng.random() < 0.7:
            return False
        triton.ends_by_order_of_others = True
        self.kernel.send(triton.task, signal.SIGTERM)
        return True

    def _lose_stub(self) -> bool:
        triton = self.launcher.triton()
        if triton is None:
            return False
        guarded = [stub for stub in triton.stubs.values() if stub not in self.launcher.unguarded]
        return self._lose(self._alive(lambda task: task in guarded))

    def _reload_model(self) -> bool:
        """Unload a model and load it again, as requests to Triton do."""
        triton = self.launcher.triton()
        if triton is None or not triton.is_ready or triton.is_asked_to_end:
            return False
        model = self.rng.choice(sorted(triton.stubs))
        stub = triton.stubs[model]
        if stub.status is not None or stub.process.is_stopped or triton.task.process.is_stopped:
            return False
        self.launcher.reload_model(triton, model)
        return True

    def _lose_guard(self) -> bool:
        lost = self._alive(lambda task: "inflight.server.guard" in task.arguments)
        triton = self.launcher.triton()
        if lost is None or triton is None or triton.task.process.is_stopped:
            return False
        stub = lost.parent
        if stub is None or STUB not in stub.arguments or stub.process.is_stopped or stub.status is not None:
            return False
        self.launcher.unguarded.add(stub)
        return self._lose(lost)

    def _lose_keeper(self) -> bool:
        return self._lose(self._alive(lambda task: "inflight.server.keeper" in task.arguments))

    def _lose_endpoint(self) -> bool:
        """Lose the process of /v1, and sometimes the next one before it listens."""
        lost = self._alive(lambda task: "inflight.openai" in task.arguments)
        num_before = len(self.programs.endpoints)
        if not self._lose(lost):
            return False
        if self.rng.random() < 0.3 and self.launcher.wait(
            3.0, lambda: len(self.programs.endpoints) > num_before
        ):
            self._lose(self._alive(lambda task: "inflight.openai" in task.arguments))
        return True

    def _stop_launcher(self) -> bool:
        seconds = self.rng.choice([0.5, 5.0, 60.0])
        now_s = self.programs.now_s()
        self.launcher.disturbances.append((now_s, now_s + seconds))
        self.kernel.send(self.launcher.process, signal.SIGSTOP)
        self.machine.call_later(seconds, lambda: self.kernel.send(self.launcher.process, signal.SIGCONT))
        return True

    def _stop_all(self) -> bool:
        seconds = self.rng.choice([5.0, 60.0])
        now_s = self.programs.now_s()
        self.launcher.disturbances.append((now_s, now_s + seconds))
        self.kernel.freeze(seconds)
        self.machine.sleep(seconds)
        return True

    def _kill_launcher(self) -> bool:
        keeper = self._alive(lambda task: "inflight.server.keeper" in task.arguments)
        if keeper is None or self.rng.random() < 0.7 or not self.programs.tritons:
            return False
        self.kernel.exit(self.launcher.process, -signal.SIGKILL)
        return True

    def _move_clock(self) -> bool:
        self.machine.wall_ns += int((self.rng.random() - 0.5) * 7200e9)
        return True

    def _refuse_processes(self) -> bool:
        seconds = self.rng.random() * self.rng.choice([1.0, 10.0])
        now_s = self.programs.now_s()
        self.launcher.disturbances.append((now_s, now_s + seconds))
        self.kernel.refuses_processes = True
        self.machine.call_later(seconds, lambda: setattr(self.kernel, "refuses_processes", False))
        return True

    def _fill_disk(self) -> bool:
        """Let no server's files be written for a while, once a server has been ready."""
        if not self.launcher.ready_s:
            return False
        seconds = self.rng.random() * self.rng.choice([1.0, 10.0])
        now_s = self.programs.now_s()
        self.launcher.disturbances.append((now_s, now_s + seconds))
        self.launcher.is_disk_full = True
        self.machine.call_later(seconds, lambda: setattr(self.launcher, "is_disk_full", False))
        return True

    def _begin_requests(self) -> bool:
        """Let the server be busy for a while, which delays its end."""
        triton = self.launcher.triton()
        if triton is None:
            return False
        triton.busy_until_s = self.programs.now_s() + self.rng.choice([0.5, 5.0, 100.0])
        return True

    def _ask_early(self) -> bool:
        return not self.launcher.signals and self.rng.random() < 0.4 and self.launcher.ask_to_end()


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

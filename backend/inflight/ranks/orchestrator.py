"""An engine whose ranks this process starts with mpirun, supervises, and restarts when one is lost.

Owns the ranks' processes and one thread, which watches them. After a loss the thread makes the model unready, ends
the remaining ranks, restarts all ranks and has Triton load the model again. The process that Triton starts then
takes over the engine, and this process ends. If models cannot be unloaded by request, the engine is restarted
under this process, and the model stays ready meanwhile. Requests are sent over the engine endpoint, as by
any front end; the endpoint answers them when the engine ends. Of the ranks' output this module reads only rank 0's
report. Independent of requests and of Triton, whose functions are passed as Protocols.

After a loss the engine is started before the model is loaded again, and not by the model's next process, because a
failing `load_model` crashed tritonserver 2.51 in about half of all attempts.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from inflight.core.report.metrics import MetricsSnapshot
from inflight.core.report.stats import IterationCounts, MemoryUsage
from inflight.endpoint.client import SocketEngineClient, retire_predecessor
from inflight.endpoint.frames import EngineProcesses, Statistics
from inflight.endpoint.supervision import EngineWatch, awaits_successor, is_served
from inflight.errors import ConfigError, InflightError, Unavailable
from inflight.processes import ProcessId
from inflight.ranks.job import Job, Orders, decode_report, encode_line
from inflight.ranks.launch import LOG_PAST_MPIRUN, SHARED_MEMORY, WORKER_MODULE, find_mpirun, mpirun_options

_log = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
# An engine that has run this long is restarted without delay, as after the first loss.
_PROVEN_S = 60.0
_ENDING_S = 10.0
# Seconds to wait for the ranks' processes after SIGTERM, and after SIGKILL.
_GRACE_S, _KILLED_S = 2.0, 5.0
_SHARED_MEMORY = "/dev/shm"
_SESSION = "PRTE_MCA_prte_tmpdir_base"
# Variables that an mpirun or srun around the server has set for its own ranks.
_FOREIGN = ("PMIX_", "PMI_", "OMPI_", "PRTE_")
_OWN = ("OMPI_MCA_", "PRTE_MCA_", "PMIX_MCA_")


@dataclass(frozen=True, slots=True)
class ModelControl:
    """Functions by which a model's process controls the model in Triton; both raise Triton's errors.

    Attributes:
        unload: Makes the model unready and returns at once; its process stays while it has requests or streams.
        load: Starts the model's next process; returns when that process is ready.
    """

    unload: Callable[[], None]
    load: Callable[[], None]


class RanksGuard(Protocol):
    """Ends the ranks when the server ends, or if this process is killed."""

    def watch(self, launcher: ProcessId, folder: str) -> None:
        """Watch these ranks: the process that started them, and their folder in shared memory."""
        ...

    def dismiss(self) -> None:
        """Stop watching, as another process takes over."""
        ...


class Publisher(Protocol):
    """Publishes metrics of rank 0's observations."""

    def put(
        self, stats: IterationCounts, metrics: MetricsSnapshot, wall_clock_s: float, memory: MemoryUsage
    ) -> None:
        """Publish the latest values; `wall_clock_s` is their time in seconds since the epoch."""
        ...

    def start_over(self) -> None:
        """Expect counters to start from 0 again."""
        ...


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The objects with which an orchestrator works, other than its job.

    Attributes:
        server: The tritonserver.
        control: Unloads and loads the model; None if models cannot be unloaded by request.
        guard: Watches all ranks that are started.
        publisher: Gets rank 0's observations.
        unload_timeout_s: How long requests may continue when the model is unloaded, in seconds.
    """

    server: ProcessId
    control: ModelControl | None
    guard: RanksGuard
    publisher: Publisher
    unload_timeout_s: float


class Orchestrator:
    """An engine, from construction (which takes as long as loading the model) to `close`.

    Attributes:
        client: A client of the engine; it stays valid when ranks are restarted.

    Raises:
        ConfigError: The engine cannot be started; the message has the rank's error.
        Unavailable: The engine was lost as soon as it served.
    """

    def __init__(self, job: Job, around: Surroundings) -> None:
        self._job = job
        self._around = around
        self._num_ranks = job.parameters.tensor_parallel_size * job.parameters.pipeline_parallel_size
        self._timeout_s = job.parameters.rank_timeout_ms / 1000
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._awaits_successor = False  # this and the next attribute are used under the lock
        self._starting: RanksProcess | None = None
        self._pause_s = 0.0
        self.client = SocketEngineClient(job.endpoint_path)
        self._ranks, self._watch = self._take_over() or self._start(awaits_successor=False)
        self._started_s = time.monotonic()
        self._thread = threading.Thread(target=self._supervise, name="orchestrator", daemon=True)
        self._thread.start()

    def close(self) -> bool:
        """End the engine normally, unless another process has taken it over. Idempotent.

        While the engine is being restarted for the model's next process, this waits until that process has
        taken it over.

        Returns:
            Whether all threads of the engine in this process have ended; always True, as it has none.
        """
        with self._lock:
            if not self._awaits_successor:
                self._closing.set()
                if self._starting is not None:
                    self._starting.stop()
        if self._closing.is_set():
            self._watch.retire(self._around.unload_timeout_s)
        self._thread.join()
        self.client.close()
        return True

    # ---------------------------------------------------------------- start

    def _take_over(self) -> tuple[RanksProcess, EngineWatch] | None:
        """Return the engine that the model's previous process has started for this one; end any other engine."""
        path, server = self._job.endpoint_path, str(self._around.server)
        if awaits_successor(path, server, self._job.digest(), self._timeout_s):
            with contextlib.suppress(Unavailable):  # the engine has just been lost
                watch = EngineWatch(path, self._timeout_s)
                ranks = RanksProcess(watch.processes)
                # The delay before a restart grows with every loss; the engine passes it on to the next process.
                self._pause_s = watch.processes.pause_s
                self._start_guarding(ranks)
                return ranks, watch
        # Triton keeps an unloaded model alive while a client holds a stream that used it.
        retire_predecessor(path, self._around.unload_timeout_s, server)
        return None

    def _start(self, awaits_successor: bool) -> tuple[RanksProcess, EngineWatch]:
        ranks = RanksProcess.start(self._num_ranks, self._job.parameters.mpirun_arguments, self._pause_s)
        try:
            self._start_guarding(ranks)
            with self._lock:
                self._starting = ranks
            if self._closing.is_set():
                ranks.stop()
            ranks.serve(self._job, self._around.server, awaits_successor)
            return ranks, EngineWatch(self._job.endpoint_path, self._timeout_s)
        except BaseException:  # the ranks must not keep running, whatever the error
            ranks.end()
            raise
        finally:
            with self._lock:
                self._starting = None

    def _start_guarding(self, ranks: RanksProcess) -> None:
        self._around.guard.watch(ProcessId.parse(ranks.processes.launcher), ranks.processes.folder)

    # ---------------------------------------------------------------- the thread

    def _supervise(self) -> None:
        while True:
            why = self._watch.run(self._publish)
            with self._lock:
                if self._closing.is_set() or not why:
                    break
                self._awaits_successor = self._around.control is not None
            _log.error("the engine is lost: %s", why)
            self._give_up_model()
            self._ranks.end()
            if not self._start_again():
                return
            if self._awaits_successor:
                self._hand_over()
                return
        self._ranks.end(self._around.unload_timeout_s + _ENDING_S)

    def _publish(self, latest: Statistics) -> None:
        self._around.publisher.put(latest.stats, latest.metrics, latest.wall_clock_s, latest.memory)

    def _give_up_model(self) -> None:
        """Make the model unready, if possible."""
        if self._around.control is not None:
            try:
                self._around.control.unload()
            except Exception:  # the engine has to be restarted, whatever Triton raises
                _log.exception("the model could not be unloaded; its engine is restarted without a reload")
                self._awaits_successor = False

    def _start_again(self) -> bool:
        """Start ranks until they serve; return False if this object is closed or another engine has started."""
        if time.monotonic() - self._started_s > _PROVEN_S:
            self._pause_s = 0.0
        while True:
            self._pause_s = min(max(2 * self._pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
            if self._closing.wait(self._pause_s):
                return False
            if is_served(self._job.endpoint_path):
                _log.warning("another client has loaded the model meanwhile")
                return False
            try:
                self._ranks, self._watch = self._start(self._awaits_successor)
            except InflightError as error:
                _log.error("the engine cannot be started: %s", error)
                continue
            self._started_s = time.monotonic()
            self._around.publisher.start_over()
            _log.warning("the engine has been restarted")
            return True

    def _hand_over(self) -> None:
        """Have the model's next process take over the engine; if that cannot be started, end the engine."""
        assert self._around.control is not None, "a successor is awaited only if the model can be loaded"
        try:
            self._around.control.load()
        except Exception:  # an engine that no process takes over has to end
            _log.exception("the model could not be loaded again, and stays unloaded")
            self._watch.retire(0.0)
            self._ranks.end(_ENDING_S)
        if self._watch.has_left():  # the next process wanted another engine
            self._ranks.end(_ENDING_S)
        self._around.guard.dismiss()
        self._watch.close()


class RanksProcess:
    """The processes of ranks, which run or have ended; `end` removes their leftovers.

    Attributes:
        processes: The processes, for supervisors that may have to end them.
    """

    def __init__(self, processes: EngineProcesses, child: subprocess.Popen[bytes] | None = None) -> None:
        """Represent running ranks, started by this process, as `child`, or by another process."""
        self.processes = processes
        self._child = child
        self._launcher = ProcessId.parse(processes.launcher)

    @classmethod
    def start(cls, num_ranks: int, mpirun_arguments: str | None, pause_s: float = 0.0) -> RanksProcess:
        """Start ranks, which then wait for `serve`. Raises ConfigError if there is no mpirun.

        `pause_s`: the delay of this start in seconds, which is stored in `processes`.
        """
        command = _command(num_ranks, mpirun_arguments or "")
        shared_memory = os.environ.get(SHARED_MEMORY, _SHARED_MEMORY)
        folder = tempfile.mkdtemp(prefix="inflight-ranks-", dir=shared_memory)
        try:
            child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd="/",
                env={**_environment(os.environ), SHARED_MEMORY: folder, _SESSION: folder},
                start_new_session=True,  # a signal to the server's group must not reach the ranks
            )
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise ConfigError(f"{command[0]} cannot be run: {error.strerror}") from error
        launcher = ProcessId.of(child.pid)
        assert launcher is not None, "the child exists until it is waited for"
        return cls(EngineProcesses(str(launcher), folder, pause_s), child)

    def serve(self, job: Job, server: ProcessId, awaits_successor: bool) -> None:
        """Send rank 0 the job and wait until it serves, as long as the ranks live.

        Raises ConfigError with rank 0's error, or if the ranks end.
        """
        child = self._child
        assert child is not None and child.stdin is not None and child.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # the report, or its absence, shows the reason
            child.stdin.write(encode_line(Orders(job, str(server), awaits_successor, self.processes)))
            child.stdin.close()
        with child.stdout:
            reports = (decode_report(line) for line in child.stdout)
            report = next((one for one in reports if one is not None), None)
        if report is None:
            self.end()
            raise ConfigError(
                "the ranks ended before the engine could be used; for the reason see the server's log before this"
            )
        if report.error:
            self.end()
            raise ConfigError(report.error)

    def stop(self) -> None:
        """Send SIGTERM to the ranks' launcher."""
        self._launcher.signal(signal.SIGTERM)

    def end(self, grace_s: float = 0.0) -> None:
        """Wait `grace_s` seconds for the ranks' end, then kill them and remove their leftovers. Idempotent."""
        if not self._wait(grace_s):
            self.stop()
        if not self._wait(_GRACE_S):
            _log.warning("the ranks have not ended in time and are killed")
            self._launcher.signal(signal.SIGKILL)  # ranks end with their parent
            self._wait(_KILLED_S)
        shutil.rmtree(self.processes.folder, ignore_errors=True)

    def _wait(self, timeout_s: float) -> bool:
        """Whether the ranks have ended, now or within `timeout_s` seconds."""
        if self._child is None:
            return self._launcher.wait(timeout_s)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(timeout_s)
        return self._child.returncode is not None


def _command(num_ranks: int, mpirun_arguments: str) -> list[str]:
    options = mpirun_options(mpirun_arguments, is_one_program=True)
    program = ("sh", "-c", LOG_PAST_MPIRUN + 'exec "$@"', "sh", sys.executable, "-m", WORKER_MODULE)
    return [find_mpirun(), *options, "-n", str(num_ranks), "--wdir", "/", *program]


def _environment(around: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment without the variables of an mpirun or srun around it."""
    return {
        name: value
        for name, value in around.items()
        if not name.startswith(_FOREIGN) or name.startswith(_OWN)
    }

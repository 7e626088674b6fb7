"""An engine whose ranks this process starts, supervises, and starts again when they are lost.

Owns their processes and one thread, which hears of them and, after a loss, makes the model unready, ends what is
left, starts the ranks again and has the model loaded again. The process that Triton loads then takes the engine
over; this one is done. Where models cannot be unloaded by request the engine comes back in place, and the model is
ready all the while. Requests go over the endpoint, like those of any front end, which answers them when it ends.

An engine is started before the model is loaded, and not by its next process: a `load_model` that fails has crashed
tritonserver 2.51 in about half of all tries.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from dataclasses import dataclass
from typing import Protocol

from inflight.endpoint.client import SocketEngineClient, retire_predecessor
from inflight.endpoint.frames import Statistics
from inflight.endpoint.supervision import EngineWatch, awaits_successor, is_served
from inflight.errors import InflightError, Unavailable
from inflight.processes import ProcessId
from inflight.ranks.job import Job
from inflight.ranks.ranks_process import RanksProcess
from inflight.triton.metrics import MetricsPublisher

_log = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
# An engine that has lived so long is started again as if it were the first time.
_PROVEN_S = 60.0
_ENDING_S = 10.0


class ModelControl(Protocol):
    """What Triton lets a model do with itself."""

    def unload(self) -> None:
        """Make it unready; its requests in flight go on."""

    def load(self) -> None:
        """Start its next process; returns when that is ready."""


class WatchesRanks(Protocol):
    """What is asked of a guard."""

    def watch(self, launcher: ProcessId, folder: str) -> None:
        """These ranks end with the server."""

    def dismiss(self) -> None:
        """Another process takes this one's place."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What an orchestrator needs beside its job.

    Attributes:
        server: The tritonserver.
        control: None where models cannot be unloaded by request.
        guard: Ends the ranks if this process is killed.
        publisher: Of what rank 0 observes.
        unload_timeout_s: How long requests of other models' clients may go on when the model is unloaded.
    """

    server: ProcessId
    control: ModelControl | None
    guard: WatchesRanks
    publisher: MetricsPublisher
    unload_timeout_s: float


class Orchestrator:
    """From construction, which takes as long as the model takes to load, to `close`.

    Attributes:
        client: To the engine, whichever ranks are it.

    Raises:
        ConfigError: The engine cannot be started, with what a rank says of it.
    """

    def __init__(self, job: Job, around: Surroundings) -> None:
        self._job = job
        self._around = around
        self._num_ranks = job.parameters.tensor_parallel_size * job.parameters.pipeline_parallel_size
        self._timeout_s = job.parameters.rank_timeout_ms / 1000
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._awaits_heir = False  # this and the next: under the lock
        self._starting: RanksProcess | None = None
        self._pause_s = 0.0
        self.client = SocketEngineClient(job.endpoint_path)
        self._ranks, self._watch = self._take_over() or self._start(awaits_heir=False)
        self._started_s = time.monotonic()
        self._thread = threading.Thread(target=self._supervise, name="orchestrator", daemon=True)
        self._thread.start()

    def close(self) -> bool:
        """End the engine in order, unless another process has it. Idempotent.

        While it is being started again for the model's next process, this waits until that has it.

        Returns:
            True: nothing hangs in this process.
        """
        with self._lock:
            if not self._awaits_heir:
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
        """The engine that the model's last process has started for this one; any other of its is ended."""
        path, server = self._job.endpoint_path, str(self._around.server)
        if awaits_successor(path, server, self._job.digest(), self._timeout_s):
            with contextlib.suppress(Unavailable):  # it has just been lost
                watch = EngineWatch(path, self._timeout_s)
                ranks = RanksProcess(watch.processes)
                # The next one is longer, whichever process it is made in.
                self._pause_s = watch.processes.pause_s
                self._tell_guard(ranks)
                return ranks, watch
        # Triton lets an unloaded model live on while a client holds a stream that used it.
        retire_predecessor(path, self._around.unload_timeout_s, server)
        return None

    def _start(self, awaits_heir: bool) -> tuple[RanksProcess, EngineWatch]:
        ranks = RanksProcess.start(self._num_ranks, self._job.parameters.mpirun_arguments, self._pause_s)
        try:
            self._tell_guard(ranks)
            with self._lock:
                self._starting = ranks
            if self._closing.is_set():
                ranks.stop()
            ranks.serve(self._job, self._around.server, awaits_heir)
            return ranks, EngineWatch(self._job.endpoint_path, self._timeout_s)
        except BaseException:
            ranks.end()
            raise
        finally:
            with self._lock:
                self._starting = None

    def _tell_guard(self, ranks: RanksProcess) -> None:
        self._around.guard.watch(ProcessId.parse(ranks.processes.launcher), ranks.processes.folder)

    # ---------------------------------------------------------------- the thread

    def _supervise(self) -> None:
        while True:
            why = self._watch.run(self._publish)
            with self._lock:
                if self._closing.is_set() or not why:
                    break
                self._awaits_heir = self._around.control is not None
            _log.error("the engine is lost: %s", why)
            self._give_up_model()
            self._ranks.end()
            if not self._start_again():
                return
            if self._awaits_heir:
                self._hand_over()
                return
        self._ranks.end(self._around.unload_timeout_s + _ENDING_S)

    def _publish(self, told: Statistics) -> None:
        self._around.publisher.put(told.stats, told.metrics, told.wall_clock_s, told.memory)

    def _give_up_model(self) -> None:
        """Make it unready, where that is possible."""
        if self._around.control is not None:
            try:
                self._around.control.unload()
            except Exception:
                _log.exception("the model cannot be made unready; the engine comes back in place")
                self._awaits_heir = False

    def _start_again(self) -> bool:
        """Whether there is an engine again: not if this object is closed, or somebody else has started one."""
        if time.monotonic() - self._started_s > _PROVEN_S:
            self._pause_s = 0.0
        while True:
            self._pause_s = min(max(2 * self._pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
            if self._closing.wait(self._pause_s):
                return False
            if is_served(self._job.endpoint_path):
                _log.warning("the model has been loaded by somebody else meanwhile")
                return False
            try:
                self._ranks, self._watch = self._start(self._awaits_heir)
            except InflightError as error:
                _log.error("the engine does not start: %s", error)
                continue
            self._started_s = time.monotonic()
            self._around.publisher.start_over()
            _log.warning("the engine is there again")
            return True

    def _hand_over(self) -> None:
        """The model's next process has the engine then, or there is none."""
        assert self._around.control is not None, "nobody is awaited elsewhere"
        try:
            self._around.control.load()
        except Exception:
            _log.exception("the model could not be loaded again, and stays unloaded")
            self._watch.retire(0.0)
            self._ranks.end(_ENDING_S)
        if self._watch.has_left():  # the next process wanted another one
            self._ranks.end(_ENDING_S)
        self._around.guard.dismiss()
        self._watch.close()

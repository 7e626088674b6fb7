"""The engine of an executor: in this process, in ranks that include this process, or in ranks that it starts.

Ranks are implemented by `inflight.ranks`, as for the server. In leader mode, mpirun or srun starts this
program several times: rank 0 takes requests; the other ranks follow it and end when it ends. In orchestrator
mode, this process starts the ranks, sends requests to rank 0 over the engine endpoint, and restarts the
ranks if one is lost.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from inflight.build import FollowingRank, RunningEngine, start_engine, start_following
from inflight.config import Parameters
from inflight.core.ports import EngineClient
from inflight.core.report.metrics import MetricsSnapshot
from inflight.core.report.stats import IterationCounts, MemoryUsage
from inflight.endpoint.path import endpoint_path
from inflight.errors import ConfigError, Unavailable
from inflight.executor.config import ParallelConfig
from inflight.executor.enums import CommunicationMode
from inflight.executor.errors import NotSupported
from inflight.load_model import LoadModel
from inflight.processes import ProcessId
from inflight.ranks.job import Job
from inflight.ranks.launch import num_ranks_around
from inflight.ranks.orchestrator import Orchestrator, Surroundings

if TYPE_CHECKING:
    from inflight.engine.debug_tensors import IterationTensors

_log = logging.getLogger(__name__)


class ExecutorEngine(Protocol):
    """The engine behind an `Executor`: in this process, in another process, or on several ranks."""

    @property
    def client(self) -> EngineClient | None:
        """The client of the engine; None on a rank that takes no requests."""
        ...

    def latest_debug_tensors(self) -> list[IterationTensors]:
        """Return the debug tensors of iterations since the last call, on this rank, oldest first."""
        ...

    def close(self) -> None:
        """End requests in flight and the engine. On a rank other than 0, wait until rank 0 ends. Idempotent."""
        ...


def start(parameters: Parameters, parallel: ParallelConfig | None, load: LoadModel) -> ExecutorEngine:
    """Start an engine and return it when its model is loaded.

    Args:
        parameters: Parameters of the engine. If they specify one rank but mpirun started several, the engine
            has as many ranks as mpirun started.
        parallel: Settings of the processes that start the ranks; None: `ParallelConfig()`.
        load: Function that loads the model, or this rank's part of it. Ranks in other processes use the
            server's function.

    Raises:
        ConfigError: The engine cannot be loaded. With several ranks, all ranks raise it.
        NotSupported: `parallel` requires a feature that does not exist here.
    """
    parallel = parallel or ParallelConfig()
    if parallel.communication_mode is CommunicationMode.ORCHESTRATOR:
        return _orchestrate(parameters, parallel)
    num_ranks = num_ranks_around()
    if num_ranks == 1:
        _check_num_ranks(
            parameters, 1, "was started alone; in leader mode mpirun -n N starts it on every rank"
        )
        running = start_engine(parameters, "", load=load)
        running.prepare_guides()
        return _InProcess(running)
    parameters = _for_ranks(parameters, num_ranks)
    _check_participants(parallel, num_ranks)
    _check_num_ranks(parameters, num_ranks, f"was started on {num_ranks} ranks")
    return _take_part(parameters, load)


def _for_ranks(parameters: Parameters, num_ranks: int) -> Parameters:
    """Return the parameters for `num_ranks` ranks.

    If they specify one rank, use tensor parallelism over all ranks.
    """
    if parameters.tensor_parallel_size * parameters.pipeline_parallel_size > 1:
        return parameters
    return replace(parameters, tensor_parallel_size=num_ranks)


def _check_num_ranks(parameters: Parameters, num_ranks: int, what: str) -> None:
    needed = parameters.tensor_parallel_size * parameters.pipeline_parallel_size
    if needed != num_ranks:
        raise ConfigError(
            f"tensor_parallel_size {parameters.tensor_parallel_size} times pipeline_parallel_size "
            f"{parameters.pipeline_parallel_size} needs {needed} ranks, but this program {what}"
        )


def _check_participants(parallel: ParallelConfig, num_ranks: int) -> None:
    ids = parallel.participant_ids
    if ids is not None and ids != list(range(num_ranks)):
        raise NotSupported(
            f"ParallelConfig.participant_ids is {ids}, expected {list(range(num_ranks))}: all ranks, in order"
        )


# ---------------------------------------------------------------------- one process


@dataclass(frozen=True, slots=True)
class _InProcess:
    _running: RunningEngine

    @property
    def client(self) -> EngineClient:
        return self._running.client

    def latest_debug_tensors(self) -> list[IterationTensors]:
        return self._running.latest_debug_tensors()

    def close(self) -> None:
        self._running.close(0.0)


# ---------------------------------------------------------------------- leader mode


def _take_part(parameters: Parameters, load: LoadModel) -> ExecutorEngine:
    from inflight.ranks.rank_context import attend, join, lead

    world = join()
    if world.rank > 0:
        job, context = attend(world, _end_at_once)
        try:
            return _Following(start_following(job.parameters, "", context, load))
        except ConfigError:
            context.leave()
            raise
    leading = _Leading()
    context = lead(world, Job.of(parameters, "", ""), leading.lose)
    try:
        leading.running = start_engine(parameters, "", rank_context=context, load=load)
    except ConfigError:
        context.leave()
        raise
    return leading


class _Leading:
    """The engine of rank 0.

    If another rank is lost, all requests get the reason as error, and new ones are refused.
    """

    def __init__(self) -> None:
        self.running: RunningEngine | None = None
        self._is_lost = False

    @property
    def client(self) -> EngineClient:
        assert self.running is not None, "it is used once it runs"
        return self.running.client

    def latest_debug_tensors(self) -> list[IterationTensors]:
        return [] if self.running is None else self.running.latest_debug_tensors()

    def lose(self, error: Unavailable) -> None:
        """Fail all requests because another rank is lost. Runs on the heartbeat's thread."""
        _log.error("the engine is lost: %s", error)
        self._is_lost = True
        if self.running is not None:
            self.running.fail(error)

    def close(self) -> None:
        if self._is_lost:  # the other ranks cannot be notified, and the loop may wait for them forever
            self.client.close()
        elif self.running is not None:
            self.running.close(0.0)


class _Following:
    """The engine of a rank other than 0, which takes no requests."""

    def __init__(self, rank: FollowingRank) -> None:
        self._rank: FollowingRank | None = rank

    @property
    def client(self) -> None:
        return None

    def latest_debug_tensors(self) -> list[IterationTensors]:
        return []

    def close(self) -> None:
        rank, self._rank = self._rank, None
        if rank is not None:
            rank.wait()


def _end_at_once(error: Unavailable) -> None:
    """End this process because another rank is lost. This rank's loop may otherwise wait in MPI forever."""
    _log.error("this rank ends: %s", error)
    os.kill(os.getpid(), signal.SIGKILL)


# ---------------------------------------------------------------------- orchestrator mode


def _orchestrate(parameters: Parameters, parallel: ParallelConfig) -> ExecutorEngine:
    if parallel.participant_ids is not None:
        parameters = _for_ranks(parameters, len(parallel.participant_ids))
    _check_participants(parallel, parameters.tensor_parallel_size * parameters.pipeline_parallel_size)
    path = endpoint_path(os.getpid(), f"executor-{secrets.token_hex(4)}")
    this_process = ProcessId.of(os.getpid())
    assert this_process is not None, "it runs"
    around = Surroundings(this_process, None, _NoGuard(), _NoPublisher(), unload_timeout_s=0.0)
    return _Orchestrated(Orchestrator(Job.of(parameters, "", path), around))


@dataclass(frozen=True, slots=True)
class _Orchestrated:
    _orchestrator: Orchestrator

    @property
    def client(self) -> EngineClient:
        return self._orchestrator.client

    def latest_debug_tensors(self) -> list[IterationTensors]:
        _log.warning("debug tensors stay with the ranks that an orchestrator starts: it has none")
        return []

    def close(self) -> None:
        self._orchestrator.close()


class _NoGuard:
    """A guard that does nothing, because ranks end by themselves if their supervisor, this process, is killed."""

    def watch(self, launcher: ProcessId, folder: str) -> None:
        """Do nothing when the ranks' launcher has started."""

    def dismiss(self) -> None:
        """Do nothing when the ranks have ended."""


class _NoPublisher:
    """A publisher that does nothing, because statistics are fetched with `EngineClient.reports`."""

    def put(
        self, stats: IterationCounts, metrics: MetricsSnapshot, wall_clock_s: float, memory: MemoryUsage
    ) -> None:
        """Drop the statistics of an iteration."""

    def start_over(self) -> None:
        """Do nothing, because there are no published values to reset."""

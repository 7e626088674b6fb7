"""Leader mode: this process is rank 0 of ranks that mpirun or srun has started together around tritonserver.

Owns its place among them. It cannot be taken twice, so a model that was unloaded cannot be loaded again, and when
a rank is lost nothing can be saved but the clients' time: everyone is answered, and the server ends.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import psutil

from inflight.core.ports import ReturnMetricsCallback
from inflight.endpoint.local import LocalEngineClient
from inflight.errors import ConfigError, InflightError, Unavailable
from inflight.ranks.job import Job
from inflight.ranks.rank_context import join, lead, refuse


class Leader:
    """Rank 0 of an engine, from construction, which takes as long as the model takes to load, to `close`.

    Args:
        job: For all ranks.
        return_metrics: As GptManager has it.
        on_end: Called when a rank is lost or the loop hangs, and the engine has answered everything, on a thread
            that does nothing else any more: has to end this process.

    Attributes:
        client: To the engine.
        shared_memory: What the paths of the shared memory of this host's ranks start with, "" if they have none.

    Raises:
        ConfigError: On all ranks, with what one of them says.
    """

    def __init__(
        self, job: Job, return_metrics: ReturnMetricsCallback, on_end: Callable[[InflightError], None]
    ) -> None:
        from inflight.build import build_engine

        self._engine = None
        self._on_end = on_end
        rank_context = lead(join(), job, self._lose)
        try:
            self._engine = build_engine(
                job.parameters,
                job.version_dir,
                job.endpoint_path,
                return_metrics,
                rank_context,
                on_hang=self._lose,
            )
        except ConfigError:
            rank_context.leave()
            raise
        self.client: LocalEngineClient = self._engine.client
        self.shared_memory = _shared_memory()

    def close(self) -> bool:
        """Close the engine as `RunningEngine.close` does; the other ranks end too."""
        assert self._engine is not None, "who has not been constructed is not closed"
        return self._engine.close()

    def _lose(self, error: Unavailable) -> None:
        if self._engine is not None:
            self._engine.fail(error)
        self._on_end(error)


def refuse_ranks(why: str) -> None:
    """Tell those who wait for this process in MPI that there is nothing to serve: they end."""
    refuse(join(), why)


def take_seat() -> socket.socket:
    """A socket that only one process can have at a time, for a rank's place among the ranks.

    Whoever holds it open keeps others from the place. Raises ConfigError if somebody does.
    """
    seat = socket.socket(socket.AF_UNIX)
    try:
        # In the abstract namespace, where nothing is left behind.
        seat.bind(f"\0inflight-{os.environ.get('PMIX_NAMESPACE', '')}-{os.environ.get('PMIX_RANK', '')}")
    except OSError:
        seat.close()
        raise ConfigError(
            "in leader mode the ranks end with the model, which cannot be loaded again: start the server again"
        ) from None
    return seat


def _shared_memory() -> str:
    """The prefix of the paths of Open MPI's files: each rank of the host has one, and leaves it when killed."""
    for mapped in psutil.Process().memory_maps():
        if Path(mapped.path).name.startswith("sm_segment."):
            return mapped.path.rpartition(".")[0] + "."
    return ""

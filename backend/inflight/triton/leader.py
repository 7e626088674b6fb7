"""Leader mode: mpirun or srun has started the ranks, and this model's process is rank 0.

Owns a socket that marks this process as rank 0; only one process can hold it, and only once, so a model that
was unloaded cannot be loaded again. When a rank is lost, all requests are answered and the server ends.
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
    """Rank 0 of an engine. Construction loads the model; `close` ends the engine.

    Args:
        job: Description of the engine, for all ranks.
        return_metrics: GptManager's callback ReturnMetrics.
        on_end: Called after a rank is lost or the loop hangs, once the engine has answered all requests. Runs
            on a thread of its own, and must end this process.

    Attributes:
        client: Client of the engine.
        shared_memory: Path prefix of the shared-memory files of this host's ranks; "" if there are none.

    Raises:
        ConfigError: A rank could not load its part. All ranks raise it, with that rank's message.
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
        """Close the engine like `RunningEngine.close`. The other ranks end too."""
        assert self._engine is not None, "close before the engine was built"
        return self._engine.close()

    def _lose(self, error: Unavailable) -> None:
        if self._engine is not None:
            self._engine.fail(error)
        self._on_end(error)


def refuse_ranks(why: str) -> None:
    """End the ranks that wait for this process in MPI, by sending them the reason that nothing will be served."""
    refuse(join(), why)


def claim_rank() -> socket.socket:
    """Return a bound socket that only one process can hold, for this process's rank.

    The rank is claimed while the socket is open. Raises ConfigError if another process has claimed it.
    """
    claim = socket.socket(socket.AF_UNIX)
    try:
        # A name in the abstract namespace leaves no file behind.
        claim.bind(f"\0inflight-{os.environ.get('PMIX_NAMESPACE', '')}-{os.environ.get('PMIX_RANK', '')}")
    except OSError:
        claim.close()
        raise ConfigError(
            "in leader mode the ranks end with the model, which cannot be loaded again: start the server again"
        ) from None
    return claim


def _shared_memory() -> str:
    """Return the path prefix of Open MPI's shared-memory files. A killed rank leaves its file behind."""
    for mapped in psutil.Process().memory_maps():
        if Path(mapped.path).name.startswith("sm_segment."):
            return mapped.path.rpartition(".")[0] + "."
    return ""

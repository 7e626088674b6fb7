"""The processes of an engine that this one starts: mpirun and the ranks under it.

Owns their start and their end. Knows neither requests nor Triton, and nothing of what the ranks do but the line
that rank 0 says when it serves, or why it does not.
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
from collections.abc import Mapping

from inflight.endpoint.frames import EngineProcesses
from inflight.errors import ConfigError
from inflight.processes import ProcessId
from inflight.ranks import open_mpi
from inflight.ranks.job import Job, Orders, decode_report, encode_line

_log = logging.getLogger(__name__)

_GRACE_S = 2.0
_KILLED_S = 5.0
_SHARED_MEMORY = "/dev/shm"
_WORKER = "inflight.worker"
_SESSION = "PRTE_MCA_prte_tmpdir_base"
# What an mpirun or srun around the server has told it of its own ranks.
_FOREIGN = ("PMIX_", "PMI_", "OMPI_", "PRTE_")
_OWN = ("OMPI_MCA_", "PRTE_MCA_", "PMIX_MCA_")


class RanksProcess:
    """Ranks that run, or that have ended and not been cleaned up after.

    Attributes:
        processes: For whoever comes to end them.
    """

    def __init__(self, processes: EngineProcesses, child: subprocess.Popen[bytes] | None = None) -> None:
        """Of ranks that run, started by this process (`child`) or by another."""
        self.processes = processes
        self._child = child
        self._launcher = ProcessId.parse(processes.launcher)

    @classmethod
    def start(cls, num_ranks: int, mpirun_arguments: str | None, pause_s: float = 0.0) -> RanksProcess:
        """Start ranks, which then wait for `serve`. ConfigError if there is no mpirun.

        `pause_s` is for `processes`.
        """
        command = _command(num_ranks, mpirun_arguments or "")
        shared_memory = os.environ.get(open_mpi.SHARED_MEMORY, _SHARED_MEMORY)
        folder = tempfile.mkdtemp(prefix="inflight-ranks-", dir=shared_memory)
        try:
            child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd="/",
                env={**_environment(os.environ), open_mpi.SHARED_MEMORY: folder, _SESSION: folder},
                start_new_session=True,  # a signal to the server's group is not for the ranks
            )
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise ConfigError(f"{command[0]} cannot be run: {error.strerror}") from error
        launcher = ProcessId.of(child.pid)
        assert launcher is not None, "a child that has not been waited for is there"
        return cls(EngineProcesses(str(launcher), folder, pause_s), child)

    def serve(self, job: Job, server: ProcessId, awaits_heir: bool) -> None:
        """Tell rank 0 what to serve and wait until it does, as long as the ranks live.

        Raises ConfigError with rank 0's reason, or if the ranks end.
        """
        child = self._child
        assert child is not None and child.stdin is not None and child.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # the report, or its absence, says why
            child.stdin.write(encode_line(Orders(job, str(server), awaits_heir, self.processes)))
            child.stdin.close()
        with child.stdout:
            reports = (decode_report(line) for line in child.stdout)
            report = next((one for one in reports if one is not None), None)
        if report is None:
            self.end()
            raise ConfigError(
                "the ranks ended before the engine could be used; the lines before in the server's log say why"
            )
        if report.error:
            self.end()
            raise ConfigError(report.error)

    def stop(self) -> None:
        """Have them end soon, whatever they do."""
        self._launcher.signal(signal.SIGTERM)

    def end(self, grace_s: float = 0.0) -> None:
        """Wait for the ranks' end for `grace_s` seconds, then end them, and remove what they leave. Idempotent."""
        if not self._wait(grace_s):
            self.stop()
        if not self._wait(_GRACE_S):
            _log.warning("the ranks are ended with SIGKILL")
            self._launcher.signal(signal.SIGKILL)  # ranks end with their parent
            self._wait(_KILLED_S)
        shutil.rmtree(self.processes.folder, ignore_errors=True)

    def _wait(self, timeout_s: float) -> bool:
        if self._child is None:
            return self._launcher.wait(timeout_s)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(timeout_s)
        return self._child.returncode is not None


def _command(num_ranks: int, mpirun_arguments: str) -> list[str]:
    options = open_mpi.options(open_mpi.words(mpirun_arguments), is_one_program=True)
    program = (sys.executable, "-m", _WORKER)
    return [open_mpi.find_mpirun(), *options, "-n", str(num_ranks), "--wdir", "/", *program]


def _environment(around: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in around.items()
        if not name.startswith(_FOREIGN) or name.startswith(_OWN)
    }

"""A tritonserver as processes: one that was started by itself, or one that is rank 0 under mpirun.

Owns starting it, knowing its process id, and ending all that belongs to it. Does not know whether it is ready, nor
what its arguments mean. One thread, in leader mode, waits for tritonserver's end.
"""

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from inflight.processes import ProcessId
from inflight.server import orphans, runtime_directory
from inflight.server.runtime_directory import FOLDER_VARIABLE, PID_FILE, UMASK, read_pid

# What ranks may take to end once tritonserver has; one that is stopped never does.
_RANKS_END_S = 10.0
_START_CHECK_S = 0.1

_STACK_BYTES = 256 << 20
"""Of each thread. tritonserver 2.51 keeps texts of HTTP generate bodies there: 5 MB overflow 8 MiB."""


def _larger_stacks() -> tuple[str, ...]:
    """A prefix of the command that raises the limit; empty where it is high enough or cannot be raised."""
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    is_enough = soft != resource.RLIM_INFINITY and soft >= _STACK_BYTES  # without a limit threads have 2 MiB
    may_be_raised = hard == resource.RLIM_INFINITY or hard >= _STACK_BYTES
    program = shutil.which("prlimit")
    if is_enough or not may_be_raised or program is None:
        return ()
    return (program, f"--stack={_STACK_BYTES}:")


class ServerProcess:
    """tritonserver or mpirun, started by construction; OSError if the program cannot be run."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], folder: Path, is_mpirun: bool
    ) -> None:
        self._folder = folder
        self._child = subprocess.Popen(
            [*_larger_stacks(), *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={**environment, FOLDER_VARIABLE: str(folder)},
            start_new_session=True,
            umask=UMASK,
        )
        orphans.claim(self._child)
        if is_mpirun:
            threading.Thread(target=self._end_with_tritonserver, name="ranks-end", daemon=True).start()
        else:
            (folder / PID_FILE).write_text(f"{self._child.pid}\n")

    @property
    def output(self) -> IO[bytes]:
        """The server's stdout and stderr, as one stream."""
        assert self._child.stdout is not None, "it was started with a pipe"
        return self._child.stdout

    @property
    def pid(self) -> int | None:
        """tritonserver's process id, which is the process group's of it and its stubs; None before it runs."""
        return read_pid(self._folder)

    @property
    def returncode(self) -> int | None:
        """tritonserver's exit status, or what mpirun makes of it; None while either runs."""
        return self._child.poll()

    def wait(self, timeout: float) -> None:
        """Wait until it has ended, or for `timeout` seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(timeout)

    def ask_to_end(self) -> bool:
        """Tell tritonserver to finish what it has; False if it does not run yet."""
        pid = self.pid
        if pid is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        return True

    def kill(self) -> None:
        """End the server, its stubs and its ranks at once."""
        runtime_directory.end_processes(self._folder)
        self._child.wait()

    def _end_with_tritonserver(self) -> None:
        """mpirun waits for every rank, so for one that is stopped it would wait without end."""
        while (pid := self.pid) is None:
            if self.returncode is not None:
                return
            self.wait(_START_CHECK_S)
        if tritonserver := ProcessId.of(pid):
            tritonserver.wait()
        self.wait(_RANKS_END_S)
        if self.returncode is None:
            runtime_directory.end_processes(self._folder)
            self.wait(_RANKS_END_S)

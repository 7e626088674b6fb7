"""The processes of a tritonserver that is started directly, or by mpirun as rank 0.

Starts the server, finds its process id, and ends all of its processes. In leader mode, one thread waits
until tritonserver ends.
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

# Seconds that ranks may take to end after tritonserver. A stopped rank would never end.
_RANKS_END_S = 10.0
_START_CHECK_S = 0.1

_STACK_BYTES = 256 << 20
"""Stack size of each thread in bytes. tritonserver 2.51 stores texts of HTTP generate on the stack; a text
of 5 MB overflows a stack of 8 MiB."""


def _larger_stacks() -> tuple[str, ...]:
    """Return a command prefix that raises the stack limit; () if the limit is high enough or cannot be raised."""
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    # If there is no limit, threads have only 2 MiB.
    is_enough = soft != resource.RLIM_INFINITY and soft >= _STACK_BYTES
    may_be_raised = hard == resource.RLIM_INFINITY or hard >= _STACK_BYTES
    program = shutil.which("prlimit")
    if is_enough or not may_be_raised or program is None:
        return ()
    return (program, f"--stack={_STACK_BYTES}:")


class ServerProcess:
    """A process of tritonserver or mpirun. The constructor starts it; OSError if the program cannot be run."""

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
        """Stdout and stderr of the server, as one stream."""
        assert self._child.stdout is not None, "started without a pipe"
        return self._child.stdout

    @property
    def pid(self) -> int | None:
        """Process id of tritonserver, which is also the process group of its stubs; None before it runs."""
        return read_pid(self._folder)

    @property
    def returncode(self) -> int | None:
        """Exit status of tritonserver, or of mpirun; None while it runs."""
        return self._child.poll()

    def wait(self, timeout: float) -> None:
        """Wait until the process has ended, for at most `timeout` seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(timeout)

    def ask_to_end(self) -> bool:
        """Send tritonserver the signal to finish its requests and end; return False if it does not run yet."""
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
        """End the remaining ranks after tritonserver, because mpirun would wait forever for a stopped rank."""
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

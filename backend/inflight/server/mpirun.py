"""The mpirun command of leader mode: tritonserver as rank 0, and the workers beside it.

Nothing is started here.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from inflight.errors import ConfigError
from inflight.ranks import open_mpi
from inflight.server.errors import ServeError

_WORKER = ("-m", "inflight.worker")
# Its shell says which process tritonserver is: a signal to mpirun would end all ranks at once.
_NOTE_PID = 'echo $$ >"$0"; exec env "$@"'


def leader_command(
    tritonserver: Sequence[str],
    variables: Mapping[str, str],
    pid_file: Path,
    num_ranks: int,
    mpirun_arguments: str,
) -> list[str]:
    """Start `tritonserver` on this host as one process, and `num_ranks` - 1 workers; ServeError without an mpirun.

    Args:
        variables: For tritonserver alone: a worker's libraries are not to be looked for among the server's.
        pid_file: Where tritonserver's process id will stand, on a line.
        mpirun_arguments: More arguments, in a shell's words.
    """
    assignments = [f"{name}={value}" for name, value in variables.items()]
    return [
        _find_mpirun(),
        # Who loses a rank has to tell its clients, which it cannot do if mpirun ends it.
        "--enable-recovery",
        *open_mpi.options(open_mpi.words(mpirun_arguments), is_one_program=False),
        *("-n", "1", "sh", "-c", _NOTE_PID, str(pid_file), *assignments, *tritonserver),
        # The current directory is the server's own folder, which other hosts do not have.
        *(":", "-n", str(num_ranks - 1), "--wdir", "/", sys.executable, *_WORKER),
    ]


def session_variables(folder: Path, shared_memory: Path) -> dict[str, str]:
    """Environment variables that keep an mpirun's own files where they are removed with the server."""
    return {"TMPDIR": str(folder), open_mpi.SHARED_MEMORY: str(shared_memory)}


def _find_mpirun() -> str:
    try:
        return open_mpi.find_mpirun()
    except ConfigError as error:
        raise ServeError(str(error)) from None

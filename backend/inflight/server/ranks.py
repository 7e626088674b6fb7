"""How many ranks a repository's engines have, which process starts them, and the mpirun command of leader mode.

The launcher reads the parameters about ranks with this module; the model that holds the engine reads them
itself. Imports only the standard library (see `trtllm_launcher`). Reads the environment; starts nothing.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from inflight.errors import ConfigError
from inflight.parameter_reader import is_filled
from inflight.ranks.launch import (
    LOG_PAST_MPIRUN,
    SHARED_MEMORY,
    WORKER_MODULE,
    default_mode,
    find_mpirun,
    mpirun_options,
    num_ranks_around,
    split_arguments,
)
from inflight.server.errors import OptionError, ServeError

Mode = Literal["in_process", "leader", "orchestrator"]

TENSOR_PARALLEL, PIPELINE_PARALLEL = "tensor_parallel_size", "pipeline_parallel_size"
EXPERT_PARALLEL = "moe_expert_parallel_size"
LAUNCH_MODE, MPIRUN_ARGUMENTS = "launch_mode", "mpirun_arguments"
OPTIONS: Mapping[str, str] = {
    TENSOR_PARALLEL: "--tp",
    PIPELINE_PARALLEL: "--pp",
    EXPERT_PARALLEL: "--ep",
    LAUNCH_MODE: "--mode",
    MPIRUN_ARGUMENTS: "--mpirun-arguments",
}
"""Command-line option of each parameter about ranks, by parameter."""

_WORKER = ("-m", WORKER_MODULE)
# The shell writes tritonserver's process id to a file. Signals are sent to tritonserver, because a signal to
# mpirun would end all ranks at once.
_RUN_TRITONSERVER = LOG_PAST_MPIRUN + 'echo $$ >"$0"; exec env "$@" 1>&2'


@dataclass(frozen=True)
class Launch:
    """How the ranks of one engine are started: their number, the launch mode and mpirun's arguments.

    Attributes:
        model: Triton model that holds the engine.
        num_ranks: Number of tensor-parallel ranks times number of pipeline stages.
        mode: Value of `LaunchMode`.
        mpirun_arguments: Further arguments for mpirun, in a shell's syntax.
        tp, pp: Numbers of tensor-parallel ranks and pipeline stages.
        ep: Number of expert-parallel groups of the tensor-parallel ranks.
    """

    model: str
    num_ranks: int
    mode: Mode
    mpirun_arguments: str = ""
    tp: int = 1
    pp: int = 1
    ep: int = 1


def settings(
    tp: int | None, pp: int | None, mode: Mode | None, mpirun_arguments: str | None, ep: int | None = None
) -> dict[str, str]:
    """Return command-line options as parameters of config.pbtxt. An option that is None gives no parameter."""
    given = {
        TENSOR_PARALLEL: tp,
        PIPELINE_PARALLEL: pp,
        EXPERT_PARALLEL: ep,
        LAUNCH_MODE: mode,
        MPIRUN_ARGUMENTS: mpirun_arguments,
    }
    return {key: str(value) for key, value in given.items() if value is not None}


def launch_of(
    model: str, parameters: Mapping[str, str], environment: Mapping[str, str] = os.environ
) -> Launch:
    """Return how an engine's ranks are started. Raises OptionError if the engine's parameters are inconsistent."""
    sizes = TENSOR_PARALLEL, PIPELINE_PARALLEL, EXPERT_PARALLEL
    tp, pp, ep = (_size(model, key, parameters.get(key)) for key in sizes)
    asked = parameters.get(LAUNCH_MODE)
    mode = _mode(model, asked) if asked and is_filled(asked) else default_mode(tp * pp, environment).value
    if mode == "in_process" and tp * pp > 1:
        raise OptionError(
            f"{model}: --tp {tp} --pp {pp} makes {tp * pp} ranks, and in_process is for one: "
            "use --mode orchestrator or --mode leader"
        )
    if tp % ep:
        raise OptionError(f"{model}: --ep {ep} is not a divisor of --tp {tp}: it groups those ranks")
    around = num_ranks_around(environment)
    if mode == "leader" and around not in (1, tp * pp):
        raise OptionError(
            f"{model}: --tp {tp} --pp {pp} makes {tp * pp} ranks, but {around} processes were started together"
        )
    if mode == "leader" and tp * pp == 1:
        raise OptionError(f"{model}: --mode leader is for several ranks, and --tp {tp} --pp {pp} makes one")
    return Launch(
        model, tp * pp, mode, _mpirun_arguments(model, parameters.get(MPIRUN_ARGUMENTS, "")), tp, pp, ep
    )


def find_leader(launches: Sequence[Launch]) -> Launch | None:
    """Return the engine in leader mode, whose ranks mpirun starts with tritonserver.

    OptionError if there are several.
    """
    leaders = [launch for launch in launches if launch.mode == "leader"]
    if len(leaders) > 1:
        names = " and ".join(launch.model for launch in leaders)
        raise OptionError(
            f"--mode leader is for one engine, and {names} have one each: use --mode orchestrator"
        )
    return leaders[0] if leaders else None


def leader_command(
    tritonserver: Sequence[str], variables: Mapping[str, str], pid_file: Path, launch: Launch
) -> list[str]:
    """Return the command that starts `tritonserver` on this host as rank 0, and a worker as each other rank.

    Args:
        tritonserver: Program and arguments.
        variables: Environment variables for tritonserver only, because workers must not use the server's
            libraries.
        pid_file: File to which tritonserver's process id is written.
        launch: The engine's launch.

    Raises:
        ServeError: mpirun is not installed.
    """
    try:
        mpirun = find_mpirun()
    except ConfigError as error:
        raise ServeError(str(error)) from None
    assignments = [f"{name}={value}" for name, value in variables.items()]
    return [
        mpirun,
        # Without this argument, mpirun would end all ranks when one is lost, before rank 0 has answered its
        # clients.
        "--enable-recovery",
        *mpirun_options(launch.mpirun_arguments, is_one_program=False),
        *("-n", "1", "sh", "-c", _RUN_TRITONSERVER, str(pid_file), *assignments, *tritonserver),
        # Workers start in the root folder: the current directory is the server's folder, which other hosts
        # lack.
        *(":", "-n", str(launch.num_ranks - 1), "--wdir", "/", sys.executable, *_WORKER),
    ]


def session_variables(folder: Path, shared_memory: Path) -> dict[str, str]:
    """Return environment variables with which mpirun's files are in folders that are removed with the server."""
    return {"TMPDIR": str(folder), SHARED_MEMORY: str(shared_memory)}


def _size(model: str, key: str, value: str | None) -> int:
    if value is None or not is_filled(value):
        return 1
    if not (value.isdecimal() and int(value) > 0):
        raise OptionError(f"{model}: {key} is {value!r}, expected a whole number of at least 1")
    return int(value)


def _mpirun_arguments(model: str, value: str) -> str:
    if not is_filled(value):
        return ""
    try:
        split_arguments(value)
    except ConfigError as error:
        raise OptionError(f"{model}: {error}") from None
    return value


def _mode(model: str, value: str) -> Mode:
    for mode in get_args(Mode):
        if value == mode:
            return mode
    raise OptionError(f"{model}: {LAUNCH_MODE} is {value!r}, expected one of {', '.join(get_args(Mode))}")

"""How many ranks the engines of a model repository have, and who starts them.

Owns what the parameters about it mean to the launcher; the model that holds the engine reads them again. Standard
library only (see `trtllm_launcher`). Reads the environment, keeps nothing.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from inflight.errors import ConfigError
from inflight.ranks import open_mpi
from inflight.server.config_text import is_filled
from inflight.server.errors import OptionError

Mode = Literal["in_process", "leader", "orchestrator"]

TENSOR_PARALLEL, PIPELINE_PARALLEL = "tensor_parallel_size", "pipeline_parallel_size"
LAUNCH_MODE, MPIRUN_ARGUMENTS = "launch_mode", "mpirun_arguments"
OPTIONS: Mapping[str, str] = {
    TENSOR_PARALLEL: "--tp",
    PIPELINE_PARALLEL: "--pp",
    LAUNCH_MODE: "--mode",
    MPIRUN_ARGUMENTS: "--mpirun-arguments",
}
"""What the parameters are called on the command line."""


@dataclass(frozen=True)
class Launch:
    """Of one engine.

    Attributes:
        model: The Triton model that holds it.
        num_ranks: Tensor-parallel ranks times pipeline stages.
        mode: in_process: one rank, the model's own process. leader: rank 0 is the model's own process, the others
            were started together with it. orchestrator: the model starts all of them.
        mpirun_arguments: More arguments for mpirun, in a shell's words.
        tp, pp: Tensor-parallel ranks, and pipeline stages.
    """

    model: str
    num_ranks: int
    mode: Mode
    mpirun_arguments: str = ""
    tp: int = 1
    pp: int = 1


def settings(
    tp: int | None, pp: int | None, mode: Mode | None, mpirun_arguments: str | None
) -> dict[str, str]:
    """The parameters of config.pbtxt that these stand for; None leaves what the repository says."""
    given = {
        TENSOR_PARALLEL: tp,
        PIPELINE_PARALLEL: pp,
        LAUNCH_MODE: mode,
        MPIRUN_ARGUMENTS: mpirun_arguments,
    }
    return {key: str(value) for key, value in given.items() if value is not None}


def launch_of(
    model: str, parameters: Mapping[str, str], environment: Mapping[str, str] = os.environ
) -> Launch:
    """What an engine's parameters come to; OptionError where they do not go together."""
    tp, pp = (_size(model, key, parameters.get(key)) for key in (TENSOR_PARALLEL, PIPELINE_PARALLEL))
    asked = parameters.get(LAUNCH_MODE)
    mode = _mode(model, asked) if asked and is_filled(asked) else default_mode(tp * pp, environment)
    if mode == "in_process" and tp * pp > 1:
        raise OptionError(
            f"{model}: --tp {tp} --pp {pp} makes {tp * pp} ranks, and in_process is for one: "
            "use --mode orchestrator or --mode leader"
        )
    around = num_ranks_around(environment)
    if mode == "leader" and around not in (1, tp * pp):
        raise OptionError(
            f"{model}: --tp {tp} --pp {pp} makes {tp * pp} ranks, but {around} processes were started together"
        )
    if mode == "leader" and tp * pp == 1:
        raise OptionError(f"{model}: --mode leader is for several ranks, and --tp {tp} --pp {pp} makes one")
    return Launch(
        model, tp * pp, mode, _mpirun_arguments(model, parameters.get(MPIRUN_ARGUMENTS, "")), tp, pp
    )


def find_leader(launches: Sequence[Launch]) -> Launch | None:
    """The engine whose ranks are started together with tritonserver; OptionError if there are two."""
    leaders = [launch for launch in launches if launch.mode == "leader"]
    if len(leaders) > 1:
        names = " and ".join(launch.model for launch in leaders)
        raise OptionError(
            f"--mode leader is for one engine, and {names} have one each: use --mode orchestrator"
        )
    return leaders[0] if leaders else None


def default_mode(num_ranks: int, environment: Mapping[str, str] = os.environ) -> Mode:
    """Of an engine of which nobody says how its ranks are started."""
    if environment.get("TRTLLM_ORCHESTRATOR") == "1":
        return "orchestrator"
    if num_ranks_around(environment) > 1:
        return "leader"
    return "in_process" if num_ranks == 1 else "orchestrator"


def num_ranks_around(environment: Mapping[str, str] = os.environ) -> int:
    """How many processes mpirun or srun has started together, this one among them; 1 if none of them has."""
    if "PMIX_RANK" not in environment:  # srun without --mpi=pmix tells its number of tasks too
        return 1
    sizes = (environment.get(name, "") for name in ("OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"))
    return next((int(size) for size in sizes if size.isdecimal()), 1)


def _size(model: str, key: str, value: str | None) -> int:
    if value is None or not is_filled(value):
        return 1
    if not (value.isdecimal() and int(value) > 0):
        raise OptionError(f"{model}: {key} is {value!r}, expected a whole number from 1")
    return int(value)


def _mpirun_arguments(model: str, value: str) -> str:
    if not is_filled(value):
        return ""
    try:
        open_mpi.words(value)
    except ConfigError as error:
        raise OptionError(f"{model}: {error}") from None
    return value


def _mode(model: str, value: str) -> Mode:
    for mode in get_args(Mode):
        if value == mode:
            return mode
    raise OptionError(f"{model}: {LAUNCH_MODE} is {value!r}, expected one of {', '.join(get_args(Mode))}")

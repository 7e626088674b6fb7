"""Who starts the ranks of an engine: found out from its parameters, and from what mpirun or srun has told."""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import Enum

from inflight.config import Parameters
from inflight.errors import ConfigError
from inflight.server.ranks import default_mode, num_ranks_around


class LaunchMode(Enum):
    """Where the engine is."""

    IN_PROCESS = "in_process"
    LEADER = "leader"
    ORCHESTRATOR = "orchestrator"


def find_launch_mode(parameters: Parameters, environment: Mapping[str, str] = os.environ) -> LaunchMode:
    """Raises ConfigError where the parameters do not go together, or with what was started."""
    tp_size, pp_size = parameters.tensor_parallel_size, parameters.pipeline_parallel_size
    mode = _asked_for(parameters, environment)
    if mode is LaunchMode.IN_PROCESS and tp_size * pp_size > 1:
        raise ConfigError(
            f"launch_mode is in_process, which is for one rank, but tensor_parallel_size {tp_size} times "
            f"pipeline_parallel_size {pp_size} makes {tp_size * pp_size}"
        )
    if mode is not LaunchMode.LEADER and waits_for_leader(environment):
        raise ConfigError(
            f"launch_mode is {mode.value}, but {num_ranks_around(environment)} processes were started together; "
            "expected leader, or tritonserver alone"
        )
    if mode is LaunchMode.LEADER and not waits_for_leader(environment):
        raise ConfigError(
            "launch_mode is leader, but tritonserver was started alone; expected mpirun -n 1 tritonserver ... : "
            f"-n {tp_size * pp_size - 1} python -m inflight.worker"
        )
    return mode


def waits_for_leader(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether others were started together with this process, who wait for it in MPI."""
    return num_ranks_around(environment) > 1


def _asked_for(parameters: Parameters, environment: Mapping[str, str]) -> LaunchMode:
    if parameters.launch_mode is not None:
        return LaunchMode(parameters.launch_mode)
    num_ranks = parameters.tensor_parallel_size * parameters.pipeline_parallel_size
    return LaunchMode(default_mode(num_ranks, environment))

"""Launch mode of the ranks: by parameters, by mpirun's environment, and errors if the two conflict."""

from __future__ import annotations

import pytest

from inflight.errors import ConfigError
from inflight.ranks.launch import LaunchMode, find_launch_mode
from tests.triton.factories import make_parameters

TOGETHER = {"PMIX_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
ALONE = {"PMIX_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
ORCHESTRATOR = {"TRTLLM_ORCHESTRATOR": "1"}
TWO = {"tensor_parallel_size": "2"}


def find(parameters: dict[str, str], environment: dict[str, str]) -> LaunchMode:
    read = make_parameters(**parameters)
    return find_launch_mode(
        read.launch_mode, read.tensor_parallel_size, read.pipeline_parallel_size, environment
    )


@pytest.mark.parametrize(
    ("parameters", "environment", "mode"),
    [
        ({}, {}, LaunchMode.IN_PROCESS),
        (TWO, {}, LaunchMode.ORCHESTRATOR),
        (TWO, TOGETHER, LaunchMode.LEADER),
        (TWO, ALONE, LaunchMode.ORCHESTRATOR),
        ({"pipeline_parallel_size": "2"}, {}, LaunchMode.ORCHESTRATOR),
        ({}, ORCHESTRATOR, LaunchMode.ORCHESTRATOR),
        (TWO | {"launch_mode": "leader"}, TOGETHER | ORCHESTRATOR, LaunchMode.LEADER),
        ({"launch_mode": "in_process"}, ALONE, LaunchMode.IN_PROCESS),
    ],
)
def test_the_mode_follows_from_parameters_and_environment(
    parameters: dict[str, str], environment: dict[str, str], mode: LaunchMode
):
    assert find(parameters, environment) is mode


@pytest.mark.parametrize(
    ("parameters", "environment", "message"),
    [
        (
            TWO | {"launch_mode": "in_process"},
            {},
            "tensor_parallel_size 2 times pipeline_parallel_size 1 makes 2",
        ),
        ({"launch_mode": "in_process"}, TOGETHER, "launch_mode is in_process, but 2 processes were started"),
        (TWO, TOGETHER | ORCHESTRATOR, "launch_mode is orchestrator, but 2 processes were started together"),
        (TWO | {"launch_mode": "leader"}, {}, "tritonserver was started alone; expected mpirun"),
    ],
)
def test_conflicting_launch_options_are_refused(
    parameters: dict[str, str], environment: dict[str, str], message: str
):
    with pytest.raises(ConfigError, match=message):
        find(parameters, environment)

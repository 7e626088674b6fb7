"""What Triton tells a model at load time, read once. Pure."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inflight.config import Parameters, Role, read_parameters, without_effect
from inflight.errors import ConfigError
from inflight.triton.tensors import OUTPUTS

_log = logging.getLogger(__name__)

_FLOATS = ("FP32", "FP16")
"""What outputs of the type FP32 may be declared as; numpy has no BF16."""


@dataclass(frozen=True, slots=True)
class ModelArgs:
    """The `args` of `TritonPythonModel.initialize`.

    Attributes:
        name: The model's name.
        version_dir: The folder of model.py.
        decoupled: Whether config.pbtxt lets a request have more than one response.
        parameters: From config.pbtxt.
        outputs: The data type of each output that config.pbtxt declares, as in the table of tensors.
    """

    name: str
    version_dir: Path
    decoupled: bool
    parameters: Parameters
    outputs: Mapping[str, str]


def read_model_args(args: Mapping[str, str], role: Role) -> ModelArgs:
    """Raises ConfigError for a config.pbtxt that cannot be served."""
    config = json.loads(args["model_config"])
    if role is Role.ENGINE:
        _check_instances(config)
    return ModelArgs(
        name=args["model_name"],
        version_dir=Path(args["model_repository"], args["model_version"]),
        decoupled=bool(config.get("model_transaction_policy", {}).get("decoupled", False)),
        parameters=_read_parameters(config, role),
        outputs=_outputs(config, role),
    )


def _read_parameters(config: Mapping[str, Any], role: Role) -> Parameters:
    parameters = read_parameters(config, role)
    for line in without_effect(config, role):
        _log.info("%s", line)
    return parameters


def _outputs(config: Mapping[str, Any], role: Role) -> dict[str, str]:
    """Refuses a type of a serving model's output that it cannot be sent in."""
    declared = {
        output["name"]: output["data_type"].removeprefix("TYPE_").replace("STRING", "BYTES")
        for output in config.get("output", ())
    }
    known = {spec.name: spec.dtype for spec in OUTPUTS.specs} if role in (Role.ENGINE, Role.FRONT_END) else {}
    for name, dtype in declared.items():
        expected = _FLOATS if known.get(name) == "FP32" else (known.get(name, dtype),)
        if dtype not in expected:
            raise ConfigError(
                f"config.pbtxt declares output {name} as TYPE_{dtype}, "
                f"expected {' or '.join(f'TYPE_{each}' for each in expected)}"
            )
    return declared


def _check_instances(config: Mapping[str, Any]) -> None:
    groups = config.get("instance_group") or [{}]
    count = sum(group.get("count", 1) * max(1, len(group.get("gpus", ()))) for group in groups)
    if count != 1:
        raise ConfigError(
            f"instance_group: got {count} instances, expected 1: one engine batches all requests"
        )

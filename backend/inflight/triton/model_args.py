"""What Triton tells a model at load time, read once. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inflight.errors import ConfigError
from inflight.triton.parameters import Parameters, Role, read_parameters


@dataclass(frozen=True, slots=True)
class ModelArgs:
    """The `args` of `TritonPythonModel.initialize`.

    Attributes:
        name: The model's name.
        version_dir: The folder of model.py.
        decoupled: Whether config.pbtxt lets a request have more than one response.
        parameters: From config.pbtxt.
    """

    name: str
    version_dir: Path
    decoupled: bool
    parameters: Parameters


def read_model_args(args: Mapping[str, str], role: Role) -> ModelArgs:
    """Raises ConfigError for a config.pbtxt that cannot be served."""
    config = json.loads(args["model_config"])
    if role is Role.ENGINE:
        _check_instances(config)
    return ModelArgs(
        name=args["model_name"],
        version_dir=Path(args["model_repository"], args["model_version"]),
        decoupled=bool(config.get("model_transaction_policy", {}).get("decoupled", False)),
        parameters=read_parameters(config, role),
    )


def _check_instances(config: Mapping[str, Any]) -> None:
    groups = config.get("instance_group") or [{}]
    count = sum(group.get("count", 1) * max(1, len(group.get("gpus", ()))) for group in groups)
    if count != 1:
        raise ConfigError(
            f"instance_group: got {count} instances, expected 1: one engine batches all requests"
        )

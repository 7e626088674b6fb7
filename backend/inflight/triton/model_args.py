"""What Triton tells a model at load time, read once. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

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
    return ModelArgs(
        name=args["model_name"],
        version_dir=Path(args["model_repository"], args["model_version"]),
        decoupled=bool(config.get("model_transaction_policy", {}).get("decoupled", False)),
        parameters=read_parameters(config, role),
    )

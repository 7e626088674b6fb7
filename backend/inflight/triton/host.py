"""A model's configuration and logging in tritonserver, and how tritonserver loads models.

`triton_python_backend_utils` exists only in the stub, the process that Triton's Python backend starts for a
model, and has no classes before Triton calls `initialize`. So `import_pb_utils` imports it at that time.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from inflight.access_log import write_access_lines
from inflight.additional_outputs import parse_outputs, tensor_names
from inflight.config import Parameters, Role
from inflight.errors import ConfigError
from inflight.file_names import readable
from inflight.log_lines import request_id_field
from inflight.parameter_reader import is_filled, read_parameters, without_effect
from inflight.parameter_spec import DATA_TYPE_OF, input_types
from inflight.processes import ProcessId
from inflight.tensors.output_table import OUTPUTS, is_additional

_log = logging.getLogger(__name__)

_FLOATS = ("FP32", "FP16")
"""Data types that config.pbtxt may declare for an FP32 output. BF16 is not among them, as numpy has no such
type."""

_MAX_LOGGED_ID = 256
"""Number of characters of a client's request id that log lines have."""

_EXPLICIT = ("--model-control-mode", "explicit")


def import_pb_utils() -> Any:
    """Return the module `triton_python_backend_utils` of Triton's stub, or a test's fake of it."""
    return importlib.import_module("triton_python_backend_utils")


@dataclass(frozen=True, slots=True)
class ModelArgs:
    """The `args` of `TritonPythonModel.initialize`, checked.

    Attributes:
        name: Name of the model.
        version_dir: Folder of model.py.
        decoupled: Whether config.pbtxt lets a request have more than one response.
        parameters: Parameters from config.pbtxt.
        outputs: Data type by name of each output that config.pbtxt declares, spelled as in
            `TensorSpec.dtype`.
        is_batched: Whether tensors have a batch dimension; false if max_batch_size is 0.
    """

    name: str
    version_dir: Path
    decoupled: bool
    parameters: Parameters
    outputs: Mapping[str, str]
    is_batched: bool = True


def read_model_args(args: Mapping[str, str], role: Role) -> ModelArgs:
    """Read the arguments of `initialize`. Raises ConfigError for a config.pbtxt that cannot be served."""
    config = json.loads(args["model_config"])
    if role is Role.ENGINE:
        _check_instances(config)
    parameters = read_parameters(config, role)
    outputs = _outputs(config, role)
    _check_input_types(config)
    _check_additional(parameters, outputs)
    notes, tree = without_effect(config, role), parameters.scheduler.eagle_choices
    if tree is not None and tree.note:
        notes.append(tree.note)
    for line in notes:
        _log.info("%s", line)
    return ModelArgs(
        name=args["model_name"],
        version_dir=Path(args["model_repository"], args["model_version"]),
        decoupled=bool(config.get("model_transaction_policy", {}).get("decoupled", False)),
        parameters=parameters,
        outputs=outputs,
        is_batched=config.get("max_batch_size", 0) != 0,
    )


def _check_additional(parameters: Parameters, declared: Mapping[str, str]) -> None:
    """Raise ConfigError unless config.pbtxt declares exactly the outputs of additional_model_outputs."""
    wanted = dict(tensor_names(parameters.engine.additional_model_outputs))
    if missing := [name for name in wanted if name not in declared]:
        raise ConfigError(
            f"additional_model_outputs needs outputs that config.pbtxt does not declare: {', '.join(missing)}"
        )
    if unknown := [name for name in declared if is_additional(name) and name not in wanted]:
        raise ConfigError(
            f"config.pbtxt declares outputs that additional_model_outputs does not have: {', '.join(unknown)}"
        )


def complete_config(model_config: Any) -> Any:
    """Implement Triton's `auto_complete_config`: declare the inputs and outputs that depend on parameters.

    Parameters determine the data types of some inputs, and the outputs of additional_model_outputs. A
    config.pbtxt that `scripts/serve` has filled in declares both already. `initialize` reports invalid
    parameters later.
    """
    config = model_config.as_dict()
    given = _texts(config)
    types = input_types(given)
    for tensor in config.get("input", ()):
        tensor["data_type"] = types.get(tensor["name"], tensor["data_type"])
    text = given.get("additional_model_outputs", "")
    with contextlib.suppress(ValueError):
        for name, num_dims in tensor_names(parse_outputs(text) if is_filled(text) else ()):
            model_config.add_output({"name": name, "data_type": "TYPE_FP32", "dims": [-1] * num_dims})
    return model_config


def _texts(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the parameters of a model configuration: text by key."""
    return {key: str(entry.get("string_value", "")) for key, entry in config.get("parameters", {}).items()}


def _check_input_types(config: Mapping[str, Any]) -> None:
    """Raise ConfigError unless the declared data types of inputs match the parameters."""
    declared = {tensor["name"]: tensor["data_type"] for tensor in config.get("input", ())}
    for name, data_type in input_types(_texts(config)).items():
        if declared.get(name, data_type) != data_type:
            raise ConfigError(
                f"{name}{DATA_TYPE_OF} is {data_type}, but config.pbtxt declares the input {name} as "
                f"{declared[name]}: change the declaration"
            )


def _outputs(config: Mapping[str, Any], role: Role) -> dict[str, str]:
    """Read the declared data types of outputs; raises ConfigError for an unsupported one."""
    declared = {
        output["name"]: output["data_type"].removeprefix("TYPE_").replace("STRING", "BYTES")
        for output in config.get("output", ())
    }
    serves_requests = role in (Role.ENGINE, Role.FRONT_END, Role.BLS)
    known = {spec.name: spec.dtype for spec in OUTPUTS.specs} if serves_requests else {}
    known |= {name: "FP32" for name in declared if known and is_additional(name)}
    for name, dtype in declared.items():
        expected = _FLOATS if known.get(name) == "FP32" else (known.get(name, dtype),)
        if dtype not in expected:
            raise ConfigError(
                f"config.pbtxt declares output {name} as TYPE_{dtype}, "
                f"expected {' or '.join(f'TYPE_{each}' for each in expected)}"
            )
    return declared


def _check_instances(config: Mapping[str, Any]) -> None:
    groups: list[dict[str, Any]] = config.get("instance_group") or [{}]
    count = sum(group.get("count", 1) * max(1, len(group.get("gpus", ()))) for group in groups)
    if count != 1:
        raise ConfigError(
            f"instance_group: got {count} instances, expected 1: one engine batches all requests"
        )


def logged_id(triton_request: Any) -> str:
    """Return the client's id of a request as log lines have it; "": none."""
    return triton_request.request_id()[:_MAX_LOGGED_ID]


class TritonLogHandler(logging.Handler):
    """Writes log records with the `Logger` of a `triton_python_backend_utils` module."""

    def __init__(self, pb_utils: Any) -> None:
        super().__init__()
        self._logger = pb_utils.Logger

    def emit(self, record: logging.LogRecord) -> None:
        """Log a record at the corresponding level of Triton.

        Each line is a message, because Triton escapes newlines.
        """
        write, request_id = self._write(record.levelno), request_id_field(record)
        for line in self.format(record).splitlines():
            write(readable(line + request_id))

    def _write(self, level: int) -> Callable[[str], None]:
        if level >= logging.ERROR:
            return self._logger.log_error
        if level >= logging.WARNING:
            return self._logger.log_warn
        return self._logger.log_info if level >= logging.INFO else self._logger.log_verbose


def log_to_triton(pb_utils: Any) -> None:
    """Route the package's logging to Triton, except access lines, which go to stderr.

    Has no effect after the first call in a process. Triton's logger would take a message to the server and
    back for every access line.
    """
    write_access_lines(sys.stderr)
    logger = logging.getLogger("inflight")
    if not any(isinstance(handler, TritonLogHandler) for handler in logger.handlers):
        logger.addHandler(TritonLogHandler(pb_utils))
        logger.setLevel(logging.DEBUG)  # Triton filters by its own level
        logger.propagate = False


def has_explicit_control(server: ProcessId) -> bool:
    """Return whether this tritonserver loads and unloads models by request (explicit model control).

    Reads the server's command line. pb_utils would raise an error in the other modes of model control, and
    such errors can crash the server.
    """
    try:
        arguments = Path(f"/proc/{server.pid}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return False
    return "=".join(_EXPLICIT) in arguments or _EXPLICIT in pairwise(arguments)

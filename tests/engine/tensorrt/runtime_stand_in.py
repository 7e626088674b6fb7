"""A stand-in for the module of TensorRT's runtime, which runs plans with the interpreter.

It has the same functions as the real runtime, and checks shapes, addresses and streams as the real one does.
It refuses what TensorRT's documentation says is refused: shapes outside of a profile, an output in place of
an input but at another address, and unset addresses. The file of a plan has the output of `dump`.
"""

from __future__ import annotations

import ctypes
import io
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from importlib.metadata import version
from math import prod
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from inflight.engine.tensorrt.build import Definition
from inflight.engine.tensorrt.sidecar import Profile, ShapeRange
from tests.engine.tensorrt import interpreter
from tests.engine.tensorrt.interpreter import Communicator, NetworkCopy, evaluate

NAME = "tensorrt_rtx"
_ACTIVATION_BYTES = 512


def dump(definition: Definition) -> bytes:
    """Return a network with its profiles, which replaces a plan; fits `build_engine`'s `serialize`."""
    buffer = io.BytesIO()
    profiles = [
        [(each.name, each.min, each.opt, each.max) for each in profile.ranges]
        for profile in definition.profiles
    ]
    outputs = {spec.name: spec.shape for spec in definition.graph.outputs}
    torch.save((interpreter.dump(definition), profiles, outputs), buffer)
    return buffer.getvalue()


class Severity(Enum):
    """Severity of a message."""

    INTERNAL_ERROR = 0
    ERROR = 1
    WARNING = 2


class ILogger:
    """Stand-in for TensorRT's ILogger."""

    Severity = Severity

    def log(self, severity: Severity, msg: str) -> None:
        """Log a message; subclasses override it."""
        raise NotImplementedError


class ExecutionContextAllocationStrategy(Enum):
    """Owner of the memory of activations."""

    STATIC = 0
    USER_MANAGED = 2


class Runtime:
    """Stand-in for TensorRT's Runtime."""

    def __init__(self, logger: ILogger) -> None:
        self._logger = logger

    def deserialize_cuda_engine(self, data: bytes) -> Engine | None:
        """Load a plan; return None and log an error if the data is not a plan."""
        try:
            network, profiles, outputs = torch.load(io.BytesIO(data), weights_only=True)
        except Exception as error:
            self._logger.log(Severity.ERROR, f"not a plan: {error}")
            return None
        ranges = [Profile("", tuple(ShapeRange(*each) for each in profile)) for profile in profiles]
        return Engine(interpreter.load(network), ranges, outputs, self._logger)


@dataclass
class Engine:
    """Stand-in for TensorRT's ICudaEngine."""

    network: NetworkCopy
    profiles: list[Profile]
    output_shapes: dict[str, tuple[int, ...]]
    logger: ILogger
    device_memory_size_v2: int = _ACTIVATION_BYTES

    @property
    def num_io_tensors(self) -> int:
        return len(self._names)

    @property
    def _names(self) -> list[str]:
        return [*self.network.inputs, *self.network.outputs]

    def get_tensor_name(self, index: int) -> str:
        return self._names[index]

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return self.network.aliases.get(name)

    def create_execution_context(self, strategy: ExecutionContextAllocationStrategy) -> Context:
        return Context(self, strategy)


@dataclass
class Context:
    """Stand-in for TensorRT's IExecutionContext."""

    engine: Engine
    strategy: ExecutionContextAllocationStrategy
    profile: int = -1
    has_memory: bool = False
    communicator: Communicator | None = None
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    addresses: dict[str, int] = field(default_factory=dict)

    def set_device_memory(self, address: int, size: int) -> None:
        assert self.strategy is ExecutionContextAllocationStrategy.USER_MANAGED
        self.has_memory = bool(address) and size >= self.engine.device_memory_size_v2

    def set_communicator(self, communicator: Any) -> bool:
        self.communicator = communicator
        return True

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self.profile = profile
        return 0 <= profile < len(self.engine.profiles)

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        _, declared = self.engine.network.inputs[name]
        fits = len(shape) == len(declared) and all(a in (-1, b) for a, b in zip(declared, shape))
        for each in self.engine.profiles[self.profile].ranges:
            if each.name == name and fits:
                fits = all(a <= b <= c for a, b, c in zip(each.min, shape, each.max))
        if not fits:
            return self._refuse(f"{name} is {list(shape)}, which profile {self.profile} does not have")
        self.shapes[name] = tuple(shape)
        return True

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of an output; only its number of rows varies."""
        rows = self.shapes.get("input_ids", self.shapes.get("hidden", (0,)))[0]
        return tuple(rows if size == -1 else size for size in self.engine.output_shapes[name])

    def set_tensor_address(self, name: str, address: int) -> bool:
        if name not in self.engine._names or not address:
            return self._refuse(f"{name} at {address}")
        self.addresses[name] = address
        return True

    def execute_async_v3(self, stream: int) -> bool:
        network = self.engine.network
        if missing := set(self.engine._names) - self.addresses.keys():
            return self._refuse(f"nobody has told where {sorted(missing)} are")
        for output, of_input in network.aliases.items():
            if self.addresses[output] != self.addresses[of_input]:
                return self._refuse(f"{output} has to be where {of_input} is")
        if not self.has_memory:
            return self._refuse("there is no memory for activations")
        inputs: dict[str, Tensor] = {}
        for name, (dtype, declared) in network.inputs.items():
            shape = self.shapes.get(name, declared)
            if -1 in shape:
                return self._refuse(f"nobody has told the shape of {name}")
            if dtype is torch.uint8:  # int4, two per byte
                shape = (*shape[:-1], shape[-1] // 2)
            inputs[name] = _memory(self.addresses[name], dtype, shape)
        for name, value in self._evaluate(network, inputs).items():
            if name not in network.aliases:
                _memory(self.addresses[name], value.dtype, value.shape).copy_(value)
        return True

    def _evaluate(self, network: NetworkCopy, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return evaluate(network, inputs, self.communicator)

    def _refuse(self, reason: str) -> bool:
        self.engine.logger.log(Severity.ERROR, reason)
        return False


def _memory(address: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """View the memory at an address as a tensor, for reading and writing."""
    count = prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    buffer = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype, count=count).view(shape)


def make_module() -> ModuleType:
    """Return a module that the engine imports as TensorRT."""
    module = ModuleType(NAME)
    module.__dict__.update(
        __version__=version("tensorrt_rtx_cu13_bindings"),
        ILogger=ILogger,
        Runtime=Runtime,
        ExecutionContextAllocationStrategy=ExecutionContextAllocationStrategy,
    )
    return module


def install() -> None:
    """Install the stand-in as TensorRT in this process, permanently."""
    sys.modules[NAME] = make_module()

"""Runs plans: all that is asked of TensorRT when a model is served is asked here.

A plan reads and writes torch tensors where they are. An **execution context** of TensorRT is what remembers
shapes, addresses and the optimization profile of a call. There is one for each profile, and one for each recording
(CUDA graph): what is recorded from a context is wrong once the context has seen other shapes. All contexts of a
runtime compute in the same memory, as no two of them run at a time.

Whether anything can be run is found out by trying: TensorRT itself says no on a machine without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inflight.engine.tensorrt.module import make_logger
from inflight.engine.tensorrt.sidecar import Plan, PlanTensor, Profile
from inflight.errors import ConfigError

_TORCH_NAMES = {"int4": "uint8"}  # two to a byte


class Runtime:
    """TensorRT, on one device.

    Args:
        module: TensorRT.
        device: Where tensors are, and plans run.
        communicator: Of a model of several ranks, what its plans add up through.
    """

    def __init__(self, module: Any, device: torch.device, communicator: Any | None = None) -> None:
        self._module = module
        self._logger = make_logger(module)
        self._runtime = module.Runtime(self._logger)
        self._device = device
        self._communicator = communicator
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def load(self, folder: Path, plan: Plan) -> LoadedPlan:
        """Read a plan. All of a runtime's are read before one of them runs.

        Raises:
            ConfigError: TensorRT does not take it, or it is not what `plan` describes.
        """
        path = folder / plan.file.name
        self._logger.errors.clear()
        with self.stream():
            engine = self._runtime.deserialize_cuda_engine(path.read_bytes())
        if engine is None:
            raise ConfigError(self._refusal(path))
        _check(engine, plan, path)
        size = engine.device_memory_size_v2
        if size > len(self._memory):
            self._memory = torch.empty(size, dtype=torch.uint8, device=self._device)
        return LoadedPlan(self, engine, plan)

    def new_context(self, engine: Any, profile: int) -> Any:
        """A context of a profile. RuntimeError if TensorRT makes none."""
        strategy = self._module.ExecutionContextAllocationStrategy.USER_MANAGED
        with self.stream() as stream:
            context = engine.create_execution_context(strategy)
            if context is None:
                raise RuntimeError(f"TensorRT makes no execution context: {self.last_error}")
            context.set_device_memory(self._memory.data_ptr(), len(self._memory))
            if self._communicator is not None and not context.set_communicator(self._communicator):
                raise RuntimeError(f"TensorRT does not take the ranks' communicator: {self.last_error}")
            if not context.set_optimization_profile_async(profile, stream):
                raise RuntimeError(f"TensorRT has no optimization profile {profile}: {self.last_error}")
        return context

    @contextmanager
    def stream(self) -> Iterator[int]:
        """The stream to run something on, in the order of what is queued on the current one.

        TensorRT waits for the device where it is given the default stream, which is why it gets another.
        """
        if self._stream is None:
            yield 0
            return
        with torch.cuda.device(self._device):  # which TensorRT takes for its own
            current = torch.cuda.current_stream()
            if current != torch.cuda.default_stream():
                yield current.cuda_stream
                return
            self._stream.wait_stream(current)
            yield self._stream.cuda_stream
            current.wait_stream(self._stream)

    @property
    def last_error(self) -> str:
        """The last error that TensorRT has logged."""
        return self._logger.errors[-1].strip() if self._logger.errors else "it gives no reason"

    @property
    def device(self) -> torch.device:
        """The device that plans run on."""
        return self._device

    def _refusal(self, path: Path) -> str:
        if self._device.type != "cuda":
            return f"{path} needs an NVIDIA GPU and TensorRT; this machine has no GPU ({self.last_error})"
        return f"TensorRT does not take {path} on this GPU: {self.last_error}"


class LoadedPlan:
    """A plan that can run.

    Args:
        runtime: Where.
        engine: TensorRT's ICudaEngine.
        spec: What it takes and gives.

    Attributes:
        spec: As given.
    """

    def __init__(self, runtime: Runtime, engine: Any, spec: Plan) -> None:
        self.spec = spec
        self._runtime = runtime
        self._engine = engine
        self._contexts: dict[tuple[int, Hashable], Any] = {}
        self._fixed: dict[str, Tensor] = {}
        self._aliased = {alias.output: alias.input for alias in spec.aliases}
        self._nothing = torch.zeros(64, dtype=torch.int64, device=runtime.device)  # an address of no elements

    def bind(self, tensors: Mapping[str, Tensor]) -> None:
        """Inputs that stay the same from call to call, at the same address: caches and weights.

        Raises:
            ValueError: One is not what the plan takes.
        """
        for name, tensor in tensors.items():
            self._check_tensor(self.spec.tensor(name), tensor)
        self._fixed.update(tensors)

    def run(self, inputs: Mapping[str, Tensor], recording: Hashable = None) -> dict[str, Tensor]:
        """The outputs by name, without those that are inputs changed in place; queued, not waited for.

        Args:
            inputs: All that are not bound.
            recording: Which recording this call is for, or is of; None: none.

        Raises:
            ValueError: An input is missing, or not what the plan takes, or too large for its profiles.
            RuntimeError: TensorRT does not run it, or lets nobody record it.
        """
        names = {spec.name for spec in self.spec.inputs} - self._fixed.keys()
        if names != inputs.keys():
            raise ValueError(f"the inputs are {sorted(inputs)}, expected {sorted(names)}")
        for name, tensor in inputs.items():
            self._check_tensor(self.spec.tensor(name), tensor)
        context = self._context(self._find_profile(inputs), recording)
        for name, tensor in inputs.items():
            self._tell(context.set_input_shape(name, tuple(tensor.shape)), name)
            self._set_address(context, name, tensor)
        outputs: dict[str, Tensor] = {}
        for spec in self.spec.outputs:
            if spec.name in self._aliased:
                continue
            shape = tuple(context.get_tensor_shape(spec.name))
            outputs[spec.name] = torch.empty(shape, dtype=_dtype(spec), device=self._runtime.device)
            self._set_address(context, spec.name, outputs[spec.name])
        with self._runtime.stream() as stream:
            if recording is not None and not _can_be_recorded(context, stream):
                raise RuntimeError("TensorRT says that this plan cannot be recorded")
            if not context.execute_async_v3(stream):
                raise RuntimeError(f"TensorRT does not run the plan: {self._runtime.last_error}")
        return outputs

    def _context(self, profile: int, recording: Hashable) -> Any:
        key = profile, recording
        if key not in self._contexts:
            context = self._runtime.new_context(self._engine, profile)
            for name, tensor in self._fixed.items():
                self._set_address(context, name, tensor)
            for output, of_input in self._aliased.items():
                self._set_address(context, output, self._fixed[of_input])
            self._contexts[key] = context
        return self._contexts[key]

    def _find_profile(self, inputs: Mapping[str, Tensor]) -> int:
        """The first profile that has room for these shapes."""
        profiles = self.spec.profiles
        misfits = [_misfit(profile, inputs) for profile in profiles]
        if None in misfits:
            return misfits.index(None)
        if not profiles:
            return 0
        raise ValueError(f"the plan has no profile for this batch: {'; '.join(map(str, misfits))}")

    def _check_tensor(self, spec: PlanTensor, tensor: Tensor) -> None:
        shape = tuple(tensor.shape)
        if spec.dtype == "int4":
            shape = (*shape[:-1], 2 * shape[-1])
        fits = len(shape) == len(spec.shape) and all(
            wanted in (-1, size) for wanted, size in zip(spec.shape, shape, strict=True)
        )
        if not fits or tensor.dtype is not _dtype(spec):
            raise ValueError(
                f"{spec.name} is {tensor.dtype} {list(shape)}, expected {spec.dtype} {list(spec.shape)}"
            )
        if tensor.device.type != self._runtime.device.type or not tensor.is_contiguous():
            raise ValueError(f"{spec.name} has to be contiguous, on {self._runtime.device}")

    def _set_address(self, context: Any, name: str, tensor: Tensor) -> None:
        self._tell(
            context.set_tensor_address(name, (tensor if tensor.numel() else self._nothing).data_ptr()), name
        )

    def _tell(self, is_taken: bool, name: str) -> None:
        if not is_taken:
            raise ValueError(f"TensorRT does not take {name}: {self._runtime.last_error}")


def _can_be_recorded(context: Any, stream: int) -> bool:
    """Whether TensorRT says that the context can be captured in a CUDA graph; True where it cannot be asked."""
    ask: Callable[[int], bool] | None = getattr(context, "is_stream_capturable", None)
    return ask is None or ask(stream)


def _dtype(spec: PlanTensor) -> torch.dtype:
    return getattr(torch, _TORCH_NAMES.get(spec.dtype, spec.dtype))


def _misfit(profile: Profile, inputs: Mapping[str, Tensor]) -> str | None:
    """A description of the first input that does not fit a profile; None if all do."""
    for each in profile.ranges:
        if each.name not in inputs:
            continue
        shape = inputs[each.name].shape
        if not all(
            least <= size <= most for least, size, most in zip(each.min, shape, each.max, strict=True)
        ):
            return (
                f"{profile.name} takes {each.name} of {list(each.min)} to {list(each.max)}, not {list(shape)}"
            )
    return None


def _check(engine: Any, plan: Plan, path: Path) -> None:
    """ConfigError if the engine has other tensors than its description says, or changes others in place."""
    names = {engine.get_tensor_name(index) for index in range(engine.num_io_tensors)}
    expected = {spec.name for spec in plan.inputs + plan.outputs}
    if names != expected:
        raise ConfigError(
            f"{path} is not the plan that its description is of: it has {sorted(names - expected)} beside, and "
            f"lacks {sorted(expected - names)}; build the engine again"
        )
    find_alias: Callable[[str], str | None] | None = getattr(engine, "get_aliased_input_tensor", None)
    if find_alias is None:
        return
    for alias in plan.aliases:
        if (found := find_alias(alias.output)) != alias.input:
            raise ConfigError(
                f"{path} writes {alias.output} in place of {found}, expected {alias.input}: build the engine again"
            )

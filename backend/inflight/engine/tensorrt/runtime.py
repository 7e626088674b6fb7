"""Runs plans: the only module that calls TensorRT while a model is served.

A plan reads and writes torch tensors in place. A TensorRT **execution context** keeps the shapes, addresses and
optimization profile of a call. There is one for each profile, and one for each recording (CUDA graph), as a
recording becomes invalid once its context has seen other shapes. All contexts of a runtime use the same memory, as
no two of them run at the same time.

Whether plans can run is found out by trying: TensorRT itself reports an error on a machine without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inflight.engine.tensorrt.module import make_logger
from inflight.engine.tensorrt.sidecar import Plan, PlanTensor, Profile
from inflight.errors import ConfigError

_TORCH_NAMES = {"int4": "uint8"}  # two values per byte


class Runtime:
    """Loads TensorRT's plans on one device, and owns the memory and stream that the plans share.

    Args:
        module: The TensorRT module.
        device: The device of tensors and plans.
        communicator: The communicator for sums over ranks; None with a single rank.
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
        """Load a plan. All plans of a runtime must be loaded before one of them runs.

        Raises:
            ConfigError: TensorRT refuses the plan, or it does not match its description `plan`.
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
        """Create a context for a profile. Raises RuntimeError if TensorRT refuses."""
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
    def stream(self) -> Generator[int]:
        """Yield the stream to run on, ordered after the work queued on the current stream.

        With the default stream TensorRT would wait for the device, so another stream is used.
        """
        if self._stream is None:
            yield 0
            return
        with torch.cuda.device(self._device):  # TensorRT uses the current device
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
        runtime: The runtime.
        engine: TensorRT's ICudaEngine.
        spec: The plan's description.

    Attributes:
        spec: The argument of the same name.
    """

    def __init__(self, runtime: Runtime, engine: Any, spec: Plan) -> None:
        self.spec = spec
        self._runtime = runtime
        self._engine = engine
        self._contexts: dict[tuple[int, Hashable], Any] = {}
        self._fixed: dict[str, Tensor] = {}
        self._aliased = {alias.output: alias.input for alias in spec.aliases}
        # The memory for empty tensors, as TensorRT needs an address.
        self._nothing = torch.zeros(64, dtype=torch.int64, device=runtime.device)

    def bind(self, tensors: Mapping[str, Tensor]) -> None:
        """Set inputs that stay the same, at the same address, for all calls: caches and weights.

        Raises:
            ValueError: A tensor does not match the plan.
        """
        for name, tensor in tensors.items():
            self._check_tensor(self.spec.tensor(name), tensor)
        self._fixed.update(tensors)

    def run(self, inputs: Mapping[str, Tensor], recording: Hashable = None) -> dict[str, Tensor]:
        """Run the plan asynchronously; return the outputs by name, except inputs changed in place.

        Args:
            inputs: All inputs that are not bound.
            recording: The recording that this call belongs to; None: the call is not recorded.

        Raises:
            ValueError: An input is missing, does not match the plan, or is too large for the plan's profiles.
            RuntimeError: TensorRT does not run the plan, or cannot capture it in a CUDA graph.
        """
        names = {spec.name for spec in self.spec.inputs} - self._fixed.keys()
        if names != set(inputs):
            raise ValueError(f"the inputs are {sorted(inputs)}, expected {sorted(names)}")
        for name, tensor in inputs.items():
            self._check_tensor(self.spec.tensor(name), tensor)
        context = self._context(self._find_profile(inputs), recording)
        for name, tensor in inputs.items():
            self._check_accepted(context.set_input_shape(name, tuple(tensor.shape)), name)
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
                raise RuntimeError("TensorRT cannot capture this plan in a CUDA graph")
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
        """Return the index of the first profile that allows these shapes."""
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
            raise ValueError(f"{spec.name} must be contiguous and on {self._runtime.device}")

    def _set_address(self, context: Any, name: str, tensor: Tensor) -> None:
        self._check_accepted(
            context.set_tensor_address(name, (tensor if tensor.numel() else self._nothing).data_ptr()), name
        )

    def _check_accepted(self, is_taken: bool, name: str) -> None:
        if not is_taken:
            raise ValueError(f"TensorRT does not take {name}: {self._runtime.last_error}")


def _can_be_recorded(context: Any, stream: int) -> bool:
    """Whether TensorRT can capture the context in a CUDA graph; True if this version has no such query."""
    ask: Callable[[int], bool] | None = getattr(context, "is_stream_capturable", None)
    return ask is None or ask(stream)


def _dtype(spec: PlanTensor) -> torch.dtype:
    return getattr(torch, _TORCH_NAMES.get(spec.dtype, spec.dtype))


def _misfit(profile: Profile, inputs: Mapping[str, Tensor]) -> str | None:
    """Return a description of the first input whose shape a profile does not allow; None if all shapes are
    allowed."""
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
    """Raise ConfigError if the engine's tensors or aliases differ from the description `plan`."""
    names = {engine.get_tensor_name(index) for index in range(engine.num_io_tensors)}
    expected = {spec.name for spec in plan.inputs + plan.outputs}
    if names != expected:
        raise ConfigError(
            f"{path} does not match its sidecar: unexpected tensors {sorted(names - expected)}, missing "
            f"{sorted(expected - names)}; build the engine again"
        )
    find_alias: Callable[[str], str | None] | None = getattr(engine, "get_aliased_input_tensor", None)
    if find_alias is None:
        return
    for alias in plan.aliases:
        if (found := find_alias(alias.output)) != alias.input:
            raise ConfigError(
                f"{path} writes {alias.output} in place of {found}, expected {alias.input}: build the engine again"
            )

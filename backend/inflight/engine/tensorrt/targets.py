"""The GPUs that a plan is built for.

portable   GPUs that run a plan of TensorRT for RTX built without a target: 8.0, 8.6, 8.9, 12.0 and later
sm89 …     GPUs of these compute capabilities alone; several are separated by commas
current    the GPU of this machine
"""

from __future__ import annotations

from typing import Any

import torch

from inflight.engine.tensorrt.sidecar import GpuTargets, Settings
from inflight.errors import ConfigError

PORTABLE, CURRENT = "portable", "current"
_PORTABLE = GpuTargets((80, 86, 89, 120), and_later=True)
_FIRST_WITH_FLOAT8, _FIRST_WITH_BFLOAT16 = 89, 80


def find_processors(module: Any, settings: Settings) -> GpuTargets:
    """Return the GPUs that plans with these settings run on.

    Raises:
        ConfigError: TensorRT does not build for the target, the target does not support the data type, or the
            target is this machine's GPU and there is none.
    """
    target = settings.target
    if target == PORTABLE and _can_choose(module):
        processors = _PORTABLE
    elif target == CURRENT:
        processors = GpuTargets((_own_capability(),), and_later=False)
    elif not _can_choose(module):
        raise ConfigError(
            f"target is {target}, expected current: tensorrt builds for the GPU of this machine"
        )
    else:
        names = target.lower().split(",")
        if not set(names) <= set(_known(module)):
            expected = f"portable, current or some of {', '.join(_known(module))}"
            raise ConfigError(f"target is {target}, expected {expected}")
        processors = GpuTargets(tuple(sorted(int(name[2:]) for name in names)), and_later=False)
    _check_types(processors, settings)
    return processors


def set_target(module: Any, config: Any, processors: GpuTargets) -> None:
    """Set the target GPUs in TensorRT's configuration. Raises ConfigError if TensorRT does not build for one of
    them."""
    if processors.and_later or not _can_choose(module):
        return  # TensorRT's default
    config.num_compute_capabilities = len(processors.exactly)
    for index, capability in enumerate(processors.exactly):
        trt_capability = getattr(module.ComputeCapability, f"SM{capability}", None)
        if trt_capability is None or not config.set_compute_capability(trt_capability, index):
            raise ConfigError(
                f"tensorrt_rtx does not build for compute capability {capability / 10:.1f}, expected one of "
                f"{', '.join(_known(module))}"
            )


def _can_choose(module: Any) -> bool:
    """Whether this TensorRT can build for GPUs other than this machine's."""
    return bool(_known(module))


def _known(module: Any) -> list[str]:
    """Return the compute capabilities that this TensorRT knows by name, such as sm89."""
    names = (
        name.lower() for name in dir(getattr(module, "ComputeCapability", None)) if name.startswith("SM")
    )
    return sorted(names, key=lambda name: int(name[2:]))


def _own_capability() -> int:
    if not torch.cuda.is_available():
        raise ConfigError("target is current, the GPU of this machine, but this machine has none")
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def _check_types(processors: GpuTargets, settings: Settings) -> None:
    least = min(processors.exactly)
    if processors.and_later:
        return
    for used, kind, first in (
        (settings.weight_dtype, "fp8", _FIRST_WITH_FLOAT8),
        (settings.dtype, "bfloat16", _FIRST_WITH_BFLOAT16),
    ):
        if used == kind and least < first:
            raise ConfigError(
                f"{kind} is not supported by compute capability {least / 10:.1f}, which is in the target "
                f"{settings.target}: expected {first / 10:.1f} or later, or portable"
            )

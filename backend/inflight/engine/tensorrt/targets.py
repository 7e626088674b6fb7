"""For which GPUs a plan is built.

portable   what NVIDIA says a plan of TensorRT for RTX that names no GPU runs on: 8.0, 8.6, 8.9, 12.0 and later
sm89 …     GPUs of these compute capabilities alone; several with commas between
current    the GPU of this machine
"""

from __future__ import annotations

from typing import Any

import torch

from inflight.engine.tensorrt.sidecar import Processors, Settings
from inflight.errors import ConfigError

PORTABLE, CURRENT = "portable", "current"
_PORTABLE = Processors((80, 86, 89, 120), and_later=True)
_FIRST_WITH_FLOAT8, _FIRST_WITH_BFLOAT16 = 89, 80


def find_processors(module: Any, settings: Settings) -> Processors:
    """Where plans of these settings run.

    Raises:
        ConfigError: TensorRT does not build for the target, the target does not compute the data type, or it is
            the GPU of this machine, which has none.
    """
    target, can_choose = settings.target, hasattr(module, "ComputeCapability")
    if target == CURRENT:
        if not torch.cuda.is_available():
            raise ConfigError("target is current, the GPU of this machine, which has none")
        major, minor = torch.cuda.get_device_capability()
        processors = Processors((10 * major + minor,), and_later=False)
    elif not can_choose:
        raise ConfigError(
            f"target is {target}, expected current: tensorrt builds for the GPU of this machine"
        )
    elif target == PORTABLE:
        processors = _PORTABLE
    else:
        known = [name for name in dir(module.ComputeCapability) if name.startswith("SM")]
        names = target.upper().split(",")
        if not set(names) <= set(known):
            choices = ", ".join(sorted((name.lower() for name in known), key=lambda name: int(name[2:])))
            raise ConfigError(f"target is {target}, expected portable, current or some of {choices}")
        processors = Processors(tuple(sorted(int(name[2:]) for name in names)), and_later=False)
    _check_types(processors, settings)
    return processors


def set_target(module: Any, config: Any, settings: Settings) -> None:
    """Tell TensorRT's configuration for which GPUs to build; the settings are checked."""
    if settings.target in (PORTABLE, CURRENT):
        return  # what is built where nothing is said: with tensorrt_rtx the first, with tensorrt the second
    names = settings.target.upper().split(",")
    config.num_compute_capabilities = len(names)
    for index, name in enumerate(names):
        if not config.set_compute_capability(getattr(module.ComputeCapability, name), index):
            raise ConfigError(f"TensorRT does not build for {name.lower()}")


def _check_types(processors: Processors, settings: Settings) -> None:
    least = min(processors.exactly)
    if processors.and_later:
        return
    for used, kind, first in (
        (settings.weight_dtype, "fp8", _FIRST_WITH_FLOAT8),
        (settings.dtype, "bfloat16", _FIRST_WITH_BFLOAT16),
    ):
        if used == kind and least < first:
            raise ConfigError(
                f"{kind} is not for compute capability {least / 10:.1f}, which is in the target "
                f"{settings.target}: expected {first / 10:.1f} or later, or portable"
            )

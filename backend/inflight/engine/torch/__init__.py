"""The torch engine: one packed forward pass over a paged KV cache, on a CPU or an NVIDIA GPU.

Owns device memory. Knows neither requests nor queues: it is told what to run by ScheduledBatch values, on one
thread, the loop's. Imports torch when one of its names is first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inflight.engine.torch.engine import Pending, TorchEngine

__all__ = ["Pending", "TorchEngine"]

_MODULES = {"Pending": "engine", "TorchEngine": "engine"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)

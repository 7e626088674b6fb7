"""The engine on torch: one packed forward pass over a paged KV cache, on a CPU or an NVIDIA GPU.

Owns device memory. Knows neither requests nor queues: it is told what to run by ScheduledBatch values, on one
thread, the loop's. Imports torch when one of its names is first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inflight.engine.torch.engine import TorchEngine, load_stage

__all__ = ["TorchEngine", "load_stage"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.engine"), name)

"""TensorRT-LLM's bindings: `executor` is the module `inflight.executor`.

GptManager and its types are attributes.
"""

import sys
from importlib import import_module
from typing import Any

from inflight import executor

# With this, `import tensorrt_llm.bindings.executor` finds the module instead of making a second copy of its
# classes.
sys.modules[f"{__name__}.executor"] = executor
sys.modules[f"{__name__}.executor.kv_cache"] = executor.kv_cache

_OF_GPT_MANAGER = (
    "GptManager",
    "InferenceRequest",
    "NamedTensor",
    "SchedulerPolicy",
    "TrtGptModelOptionalParams",
    "TrtGptModelType",
)

binding_type = "python"
"""In TensorRT-LLM the library that its bindings are made with, pybind or nanobind. These are plain Python."""

__all__ = ["binding_type", "executor"]


def __getattr__(name: str) -> Any:
    """Import GptManager and its types when they are first used, because they import an engine."""
    if name in _OF_GPT_MANAGER:
        return getattr(import_module("inflight.executor.trtllm_gpt_manager"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""`tensorrt_llm.bindings.executor` is the module `inflight.executor`; GptManager and what it takes are here."""

import sys
from importlib import import_module
from typing import Any

from inflight import executor

# So that `import tensorrt_llm.bindings.executor` finds the module, and no second copy of its classes.
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
"""TensorRT-LLM says which library its bindings are made with, pybind or nanobind: these are made with none."""

__all__ = ["binding_type", "executor"]


def __getattr__(name: str) -> Any:
    """GptManager and what it takes, which import an engine."""
    if name in _OF_GPT_MANAGER:
        return getattr(import_module("inflight.executor.trtllm_gpt_manager"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

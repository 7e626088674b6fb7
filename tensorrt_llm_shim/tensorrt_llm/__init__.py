"""The name that programs of TensorRT-LLM's Executor API import; everything behind it is the package `inflight`.

There is `tensorrt_llm.bindings` with `executor` and GptManager, and nothing else of TensorRT-LLM. A path below
this package, such as that of `bin/executorWorker`, names no file: the Executor ignores it, since it starts ranks
itself.
"""

from importlib.util import find_spec

if find_spec("inflight") is None:
    raise ImportError("this tensorrt_llm is a name for the package inflight: install that first")

from tensorrt_llm.version import __version__

__all__ = ["__version__"]

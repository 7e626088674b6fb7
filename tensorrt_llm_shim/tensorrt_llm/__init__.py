"""The package name that programs of TensorRT-LLM's Executor API import, implemented by the package `inflight`.

It has only `tensorrt_llm.bindings`, with `executor` and GptManager. Files of TensorRT-LLM, such as
`bin/executorWorker`, do not exist; the Executor ignores the path of that program, because it starts ranks
itself.
"""

from importlib.util import find_spec

if find_spec("inflight") is None:
    raise ImportError("this tensorrt_llm is a name for the package inflight: install that first")

from tensorrt_llm.version import __version__

__all__ = ["__version__"]

"""The server's logits post-processors: the operator's functions, by the names that requests use.

They are passed as Python objects, or loaded from a module that a parameter names. `post_processor_step.py`
calls them.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from torch import Tensor

from inflight.core.request.request import BATCHED_POST_PROCESSOR_NAME
from inflight.errors import ConfigError
from inflight.file_names import native

LogitsPostProcessor = Callable[..., Tensor | None]
"""Changes the logits of one request in place, or returns new ones of the same shape.

Its arguments are (request id, logits [1, beams, vocab_size] float32 on the model's device, for each beam the list
of its tokens so far including the prompt, the CUDA stream as an integer or 0 on a CPU, client id or None). A
function of four arguments gets no client id, as in TensorRT-LLM before 0.13."""

BatchedLogitsPostProcessor = Callable[..., Sequence[Tensor | None] | None]
"""Changes the logits of several requests in one call, like LogitsPostProcessor, but each argument except the
stream is a list. May return a list of logits."""

_NUM_ARGUMENTS = (5, 4)  # with and without client ids
_CLIENT_ID = 5


@dataclass(frozen=True, slots=True)
class LogitsPostProcessors:
    """The functions that requests may name; TensorRT-LLM's `LogitsPostProcessorConfig`.

    Attributes:
        processor_map: Functions by name.
        processor_batched: The function for requests with the name "batched"; None: there is none.
        replicate: Whether, with several ranks, all ranks that have the logits call the functions, so that the
            functions' state is equal on all of them; otherwise only the rank that samples. Tokens do not differ.

    Raises:
        ConfigError: A name is empty, "batched" or not a text, or a value is not a function of four or five
            arguments.
    """

    processor_map: Mapping[str, LogitsPostProcessor] = field(default_factory=dict[str, LogitsPostProcessor])
    processor_batched: BatchedLogitsPostProcessor | None = None
    replicate: bool = True

    def __post_init__(self) -> None:
        for name, processor in self.processor_map.items():
            if not isinstance(cast(object, name), str) or name in ("", BATCHED_POST_PROCESSOR_NAME):
                raise ConfigError(
                    f"a logits post-processor is named {name!r}, expected a text that is neither empty nor "
                    f"{BATCHED_POST_PROCESSOR_NAME!r}, which is the batched one's"
                )
            takes_client_id(name, processor)
        if self.processor_batched is not None:
            takes_client_id(BATCHED_POST_PROCESSOR_NAME, self.processor_batched)

    @property
    def names(self) -> tuple[str, ...]:
        """The names that requests may use."""
        batched = (BATCHED_POST_PROCESSOR_NAME,) if self.processor_batched is not None else ()
        return (*self.processor_map, *batched)


NO_POST_PROCESSORS = LogitsPostProcessors()


def takes_client_id(name: str, processor: Callable[..., Any]) -> bool:
    """Whether a logits post-processor takes five arguments, the last of which is the client id, instead of four.

    Raises:
        ConfigError: `processor` takes neither five nor four arguments, or is not a function.
    """
    if not callable(processor):
        raise ConfigError(f"the logits post-processor {name!r} is {processor!r}, expected a function")
    try:
        signature = inspect.signature(processor)
    except (TypeError, ValueError):  # a compiled function may have no signature
        return True
    for count in _NUM_ARGUMENTS:
        try:
            signature.bind(*range(count))
        except TypeError:
            continue
        return count == _CLIENT_ID
    raise ConfigError(
        f"the logits post-processor {name!r} takes {signature}, expected (request id, logits, tokens so far, "
        "stream, client id), or the same without client id"
    )


# ---------------------------------------------------------------------- from a module


def load_post_processors(source: str) -> LogitsPostProcessors:
    """Load the functions that a module declares.

    A module declares `PROCESSORS = {name: function}`, `BATCHED = function`, or both, and optionally `REPLICATE =
    False`.

    Args:
        source: The parameter `logits_post_processor_module`: the name of an importable module, or the path of a
            file that ends with `.py`.

    Raises:
        ConfigError: The module does not exist, or raises, or its declarations cannot be used.
    """
    module = _import(source)
    by_name = getattr(module, "PROCESSORS", {})
    batched, replicate = getattr(module, "BATCHED", None), getattr(module, "REPLICATE", True)
    if not isinstance(by_name, Mapping):
        raise _refused(
            source, f"its PROCESSORS is a {type(by_name).__name__}, expected a dict of functions by name"
        )
    if not isinstance(replicate, bool):
        raise _refused(source, f"its REPLICATE is {replicate!r}, expected True or False")
    try:
        found = LogitsPostProcessors(dict(cast(Mapping[str, Any], by_name)), batched, replicate)
    except ConfigError as error:
        raise _refused(source, str(error)) from error
    if not found.names:
        raise _refused(source, "it declares neither PROCESSORS = {name: function} nor BATCHED = function")
    return found


def _import(source: str) -> ModuleType:
    try:
        if source.endswith(".py"):
            return _execute(Path(native(source)))
        return importlib.import_module(source)
    except BaseException as error:  # whatever the operator's code raises
        raise _refused(source, f"importing it raised {type(error).__name__}: {error}") from error


def _execute(path: Path) -> ModuleType:
    # A unique name, so that a file json.py does not replace Python's module json.
    spec = importlib.util.spec_from_file_location(f"logits_post_processor_module.{path.stem}", path)
    assert spec is not None and spec.loader is not None, "the name of a file of source code ends with .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look up a class's module there
    try:
        spec.loader.exec_module(module)
    except BaseException:  # a partially imported module must not stay importable
        sys.modules.pop(spec.name, None)
        raise
    return module


def _refused(source: str, problem: str) -> ConfigError:
    return ConfigError(f"logits_post_processor_module is {source!r}: {problem}")

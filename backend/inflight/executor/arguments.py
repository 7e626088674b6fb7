"""Parse arguments of `Executor`'s methods that may have several forms."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Sequence
from datetime import timedelta
from numbers import Integral
from typing import Any, cast

from inflight.config import Parameters
from inflight.core.request.adapter import LoraRequest
from inflight.errors import ConfigError, InvalidArgument
from inflight.executor.config import ExecutorConfig
from inflight.executor.convert import to_lora_request
from inflight.executor.enums import ModelType
from inflight.executor.errors import ExecutorError, InvalidValue, NotSupported
from inflight.executor.fields import check_model_type
from inflight.executor.request import LoraConfig
from inflight.file_names import native, readable
from inflight.hub import find_checkpoint

Lora = LoraConfig | str
"""An adapter, or the name of an adapter in the parameter `lora_adapters`."""

Timeout = timedelta | float | None
"""A time to wait: a timedelta, or seconds; None: no limit."""

_NO_ENCODER = "no model here has one"


def constructor_arguments(
    args: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[str, ExecutorConfig, Parameters | None]:
    """Return (checkpoint folder, configuration, parameters) of Executor's constructor.

    Raises NotSupported for forms of the constructor that are not supported.
    """
    in_memory = any("buffer" in name for name in keywords)
    if in_memory or (args and isinstance(args[0], bytes | bytearray | memoryview)):
        raise NotSupported("an engine in memory is not supported: expected the folder of a checkpoint")
    if "encoder_model_path" in keywords or (len(args) > 1 and isinstance(args[1], str | os.PathLike)):
        got = f"; expected a ModelType after the model, got {args[1]!r:.100}" if len(args) > 1 else ""
        raise NotSupported(f"an encoder is not supported: {_NO_ENCODER}{got}")
    try:
        found = inspect.signature(_from_folder).bind(*args, **keywords)
    except TypeError as error:
        raise TypeError(
            f"Executor(model_path, model_type, executor_config, *, parameters, revision): {error}"
        ) from None
    found.apply_defaults()
    return _from_folder(*found.args, **found.kwargs)


def _from_folder(
    model_path: str | os.PathLike[str],
    model_type: ModelType = ModelType.DECODER_ONLY,
    executor_config: ExecutorConfig | None = None,
    *,
    parameters: Parameters | None = None,
    revision: str | None = None,
) -> tuple[str, ExecutorConfig, Parameters | None]:
    check_model_type(model_type)
    if not isinstance(model_path, str | os.PathLike):  # pyright: ignore[reportUnnecessaryIsInstance] - from callers
        raise TypeError(
            f"Executor: model_path is {model_path!r:.100}, expected the path of a folder, or a name"
        )
    if not isinstance(executor_config, ExecutorConfig | None):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"Executor: executor_config is {executor_config!r:.100}, expected an ExecutorConfig")
    path = _checkpoint(os.fspath(model_path), revision)
    return path, executor_config or ExecutorConfig(), parameters


def _checkpoint(model: str, revision: str | None) -> str:
    """Return the folder of a checkpoint, after downloading it if `model` is a name on the Hugging Face hub."""
    try:
        return readable(str(find_checkpoint(native(model), revision)))
    except ConfigError as error:
        raise ExecutorError(f"File does not exist: {model}/config.json; {error}") from error


def id_argument(method: str, given: object) -> int:
    """Return the request id that a method got. Raises TypeError, with the method's name, if it is no number."""
    if not isinstance(given, Integral):
        raise TypeError(f"{method}: the request is {given!r:.100}, expected an id")
    return int(given)


def responses_arguments(
    args: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[int | Sequence[int] | None, timedelta | float | None]:
    """Return (request ids, timeout) of `await_responses`.

    The ids are one id, several, or None for all requests.
    """
    unknown = keywords.keys() - {"id", "ids", "timeout"}
    if unknown or len(args) + len(keywords) > 2:
        raise TypeError("await_responses takes at most two arguments: id (or ids), and timeout")
    given = list(args)
    timeout = keywords.get("timeout")
    whose = keywords.get("id", keywords.get("ids"))
    if given and whose is None and not isinstance(given[0], timedelta | float | None):
        whose = given.pop(0)
    if given:
        timeout = given.pop(0)
    if given or not isinstance(timeout, timedelta | float | int | None):
        raise TypeError(f"await_responses: the timeout is {timeout!r}, expected a timedelta, seconds or None")
    if whose is None:
        return None, timeout
    if isinstance(whose, Integral):
        return int(whose), timeout
    ids = list(cast("Iterable[Any]", whose)) if isinstance(whose, Iterable) else [whose]
    if not all(isinstance(each, Integral) for each in ids):
        raise TypeError(f"await_responses: the request is {whose!r:.100}, expected an id or a list of ids")
    return [int(each) for each in ids], timeout


def adapters_of_prompts(
    lora: Lora | Sequence[Lora | None] | None, num_prompts: int
) -> list[LoraRequest | None]:
    """Return the adapter of each prompt of `generate`.

    Weights of an adapter for all prompts are copied only once.
    """
    try:
        if lora is None or isinstance(lora, Lora):
            return [to_lora_request(lora)] * num_prompts
        if len(lora) != num_prompts:
            raise InvalidValue(f"lora has {len(lora)} adapters for {num_prompts} prompts")
        return [to_lora_request(each) for each in lora]
    except InvalidArgument as error:
        raise ExecutorError(str(error)) from error

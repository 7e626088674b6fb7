"""The errors of the Executor API: RuntimeErrors, as in TensorRT-LLM's bindings, and InflightErrors."""

from __future__ import annotations

from inflight.errors import InflightError


class ExecutorError(InflightError, RuntimeError):
    """A call that cannot be answered as it was made."""


class InvalidValue(ExecutorError, ValueError):
    """A value outside the range of its field, or two fields that contradict each other."""

    code = "INVALID_ARG"


class NotSupported(ExecutorError):
    """Something that TensorRT-LLM's API has and this engine does not do."""

    code = "UNSUPPORTED"

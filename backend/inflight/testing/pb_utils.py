"""Stand-ins for the tensors, responses and errors of Triton's `triton_python_backend_utils`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

COMPLETE_FINAL = 1
"""The flag of a request's last response."""


class Tensor:
    """An input or output of a model: a name and an array, like `pb_utils.Tensor`."""

    def __init__(self, name: str, array: NDArray[Any]) -> None:
        if not isinstance(array, np.ndarray):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"Tensor {name!r} needs a numpy array, got {type(array).__name__}")
        self._name = name
        self._array = array

    def name(self) -> str:
        """Return the name of the input or output."""
        return self._name

    def as_numpy(self) -> NDArray[Any]:
        """Return the array that the tensor was made of, not a copy."""
        return self._array


class TritonError(Exception):
    """An error with one of Triton's codes."""

    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        super().__init__(message)
        self._message = message
        self._code = code

    def message(self) -> str:
        """Return the text of the error."""
        return self._message

    def code(self) -> int:
        """Return the code, one of the class's constants."""
        return self._code


class InferenceResponse:
    """Output tensors, or an error."""

    def __init__(self, output_tensors: Iterable[Tensor] = (), error: TritonError | None = None) -> None:
        self._output_tensors = list(output_tensors)
        self._error = error

    def output_tensors(self) -> list[Tensor]:
        """Return the output tensors; [] beside an error."""
        return self._output_tensors

    def has_error(self) -> bool:
        """Return whether the response has an error."""
        return self._error is not None

    def error(self) -> TritonError | None:
        """Return the error; None if the request was successful."""
        return self._error

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the outputs' arrays by name; the real class has no such method."""
        return {tensor.name(): tensor.as_numpy() for tensor in self._output_tensors}

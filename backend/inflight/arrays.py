"""Weights and tables as clients send them, numpy arrays in any of their types, as what the engine takes.

numpy has no bfloat16: such arrays are of BFLOAT16 here. Plain functions, any thread.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from inflight.core.request.adapter import Matrix, PromptTable, RawBuffer
from inflight.errors import InvalidArgument, Name

BFLOAT16 = np.dtype(np.uint16)
"""The upper half of a float32's bits, in each element."""

_EXPONENT = 0x7F80  # all of its bits are 1 in infinities and NaN


def to_matrix(array: NDArray[Any]) -> Matrix:
    """Return a copy of an array of two dimensions, of float32, float16 or BFLOAT16."""
    dtype = "bfloat16" if array.dtype == BFLOAT16 else array.dtype.name
    return Matrix((array.shape[0], array.shape[1]), dtype, RawBuffer(array.tobytes()))


def are_finite(array: NDArray[Any]) -> bool:
    """Return whether there is no NaN and no infinity, in an array of any of these types."""
    if array.dtype == BFLOAT16:
        return not ((array & _EXPONENT) == _EXPONENT).any()
    return bool(np.isfinite(array).all())


def to_prompt_table(array: NDArray[Any], name: str) -> PromptTable:
    """Return the table that `array` [rows, hidden_size] is; InvalidArgument for numbers that are not finite.

    They would spread over the whole sequence. `name` is what the client calls the table.
    """
    if not are_finite(array):
        raise InvalidArgument(Name(name), " must hold finite numbers, got NaN or infinities")
    return PromptTable.of(to_matrix(array))

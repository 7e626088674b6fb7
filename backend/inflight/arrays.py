"""Convert clients' weights and tables, numpy arrays of any supported type, to the engine's types.

numpy has no bfloat16, so bfloat16 values are stored as their bits in arrays of dtype BFLOAT16. Any thread.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from inflight.core.request.adapter import Matrix, RawBuffer
from inflight.core.request.prompt_table import PromptTable, RotaryTable
from inflight.errors import InvalidArgument, Name

BFLOAT16 = np.dtype(np.uint16)
"""The dtype of arrays with the bits of bfloat16 values, which are the upper half of a float32's bits."""

_EXPONENT = 0x7F80  # the exponent bits, which are all 1 in infinities and NaN


def to_matrix(array: NDArray[Any]) -> Matrix:
    """Return a copy of a two-dimensional array of float32, float16 or BFLOAT16."""
    dtype = "bfloat16" if array.dtype == BFLOAT16 else array.dtype.name
    return Matrix((array.shape[0], array.shape[1]), dtype, RawBuffer(array.tobytes()))


def are_finite(array: NDArray[Any]) -> bool:
    """Return whether an array of float32, float16 or BFLOAT16 has neither NaN nor infinities."""
    if array.dtype == BFLOAT16:
        return not ((array & _EXPONENT) == _EXPONENT).any()
    return bool(np.isfinite(array).all())


def to_float32(array: NDArray[Any]) -> NDArray[np.float32]:
    """Return the values of an array of float32, float16 or BFLOAT16 as float32."""
    if array.dtype == BFLOAT16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


def check_bias(bias: NDArray[np.float32], name: str) -> None:
    """Raise InvalidArgument if a bias has NaN or +inf.

    Args:
        bias: [vocab_size], the number that is added to each token's logit.
        name: Name of the bias for the error.
    """
    wrong = np.flatnonzero(np.isnan(bias) | np.isposinf(bias))
    if len(wrong):
        raise InvalidArgument(
            Name(name),
            f" must hold finite numbers, or -inf to ban a token, got {bias[wrong[0]]} for token {wrong[0]}",
        )


def to_prompt_table(array: NDArray[Any], name: str) -> PromptTable:
    """Convert `array` [rows, hidden_size] to a prompt table; raise InvalidArgument if a value is not finite.

    NaN or infinity would spread over the whole sequence. `name` is the client's name of the table, for the
    error.
    """
    if not are_finite(array):
        raise InvalidArgument(Name(name), " must hold finite numbers, got NaN or infinities")
    return PromptTable.of(to_matrix(array))


def to_rotary_table(
    array: NDArray[Any], delta: int, num_tokens: int, rotary_dim: int, name: str
) -> RotaryTable:
    """Convert `array` of float32, `rotary_dim` numbers for each position, to the rotary table of a prompt.

    Args:
        array: Any shape; cosine and sine of each angle follow each other. Rows after the prompt are dropped.
        delta: `RotaryTable.delta`.
        num_tokens: Length of the prompt.
        rotary_dim: Number of rotated dimensions of a head; 0 for a model that takes no rotary tables.
        name: The client's name of the table, for errors.

    Raises:
        InvalidArgument: The numbers are not finite, or their number is not a multiple of `rotary_dim`.
    """
    width = rotary_dim or max(array.size, 1)
    if array.size % width:
        raise InvalidArgument(Name(name), f" must have a multiple of {rotary_dim} numbers, got {array.size}")
    rows = array.reshape(-1, width)[:num_tokens]
    if not are_finite(rows):
        raise InvalidArgument(Name(name), " must hold finite numbers, got NaN or infinities")
    return RotaryTable.of(to_matrix(rows), delta)

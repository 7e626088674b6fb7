"""Conversion of the arrays `lora_weights` and `lora_config`, from requests or files, to `LoraWeights`.

This module checks the two arrays against each other, `lora_rows.py` their rows against the model. Error messages
begin as TensorRT-LLM's do, for clients that match them. Needs only numpy, so that front ends may use it. Any
thread.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from inflight.arrays import BFLOAT16
from inflight.core.request.adapter import LoraWeights, Matrix, RawBuffer
from inflight.errors import InvalidArgument

_BOTH = "Request for LoRA inference must have both lora_weights and lora_keys"
_BATCH = "Expected batch dimension to be 1 for each lora request"
_COLUMNS = (3, 4)
_WITHOUT_MEANING = ("V", 2)  # bfloat16 in TensorRT-LLM's files, two raw bytes, as numpy has no bfloat16


def read_lora_tensors(
    weights: NDArray[Any] | None, config: NDArray[Any] | None, dtype: str | None = None
) -> LoraWeights:
    """Convert the two tensors of one request, in the form of TensorRT-LLM's files.

    Args:
        weights: [1, rows, width], of a type that `lora_weights` accepts.
        config: [1, rows, 3 or 4], integers: module id, layer, rank, and whether magnitudes follow (DoRA).
        dtype: Type of the numbers in `weights`, if their own type does not determine it.

    Raises:
        InvalidArgument: A tensor is missing, or a shape or type is wrong.
    """
    if weights is None or config is None:
        missing = "lora_weights" if weights is None else "lora_config"
        raise InvalidArgument(f"{_BOTH}: {missing} is missing; lora_keys is the tensor lora_config")
    for name, upstream_name, tensor in (
        ("lora_weights", "lora_weights", weights),
        ("lora_config", "lora_keys", config),
    ):
        shape = list(tensor.shape)
        if tensor.ndim != 3:
            raise InvalidArgument(
                f"Invalid shape for {upstream_name} tensor: {name} has shape {shape}, expected 3 dimensions"
            )
        if shape[0] != 1:
            raise InvalidArgument(f"{_BATCH}: {name} has shape {shape}")
    return lora_weights(weights[0], config[0], dtype)


def lora_weights(weights: NDArray[Any], config: NDArray[Any], dtype: str | None = None) -> LoraWeights:
    """Return an adapter's weights, with a copy of the numbers.

    Args:
        weights: [rows, width], float32, float16, or the bits of bfloat16: uint16, or two raw bytes.
        config: [rows, 3 or 4], integers.
        dtype: Type of the numbers in `weights`, if their own type does not determine it.

    Raises:
        InvalidArgument: The arrays do not match; the message has the tensors and their shapes.
    """
    if config.dtype.kind not in "iu":
        raise InvalidArgument(
            f"Expected  lora keys to have TYPE_INT32 but was {config.dtype}: that is the tensor lora_config"
        )
    shapes = [1, *weights.shape], [1, *config.shape]
    if len(weights) != len(config):
        raise InvalidArgument(
            "Expected dim1 lora_weights and lora_keys to have the same size: lora_weights has "
            f"{len(weights)} rows in {shapes[0]} and lora_config {len(config)} in {shapes[1]}"
        )
    if config.shape[1] not in _COLUMNS:
        raise InvalidArgument(
            "Expected dim2 of lora_keys to have a size in [3, 4]: a row of lora_config is module, layer, rank and "
            f"perhaps whether it is DoRA, got lora_config {shapes[1]}"
        )
    matrix = Matrix(
        (weights.shape[0], weights.shape[1]),
        dtype or _dtype_name(weights.dtype),
        RawBuffer(weights.tobytes()),
    )
    return LoraWeights(matrix, tuple(tuple(row) for row in config.tolist()))


def _dtype_name(dtype: np.dtype[Any]) -> str:
    """Return the name of a type of numbers, as in `Matrix`."""
    if dtype == BFLOAT16 or (dtype.kind, dtype.itemsize) == _WITHOUT_MEANING:
        return "bfloat16"
    if dtype in (np.dtype(np.float32), np.dtype(np.float16)):
        return dtype.name
    raise InvalidArgument(f"lora_weights has numbers of type {dtype}, expected float32, float16 or bfloat16")

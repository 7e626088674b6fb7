"""Adapters in the format of TensorRT-LLM's converter: two files of arrays in a folder.

For bfloat16, which numpy lacks, the arrays have two raw bytes (`V2`) for each number.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from inflight.adapters.lora_tensors import read_lora_tensors
from inflight.core.request.adapter import LoraWeights
from inflight.errors import InvalidArgument

WEIGHTS_FILE = "model.lora_weights.npy"
CONFIG_FILE = "model.lora_config.npy"
_NUMPY_TYPES = {"float32": "<f4", "float16": "<f2", "bfloat16": "V2"}


def read_lora_files(folder: Path) -> LoraWeights:
    """Read an adapter's two files; raise InvalidArgument, naming the file, if one is missing or damaged."""
    weights, config = (_read(folder / name) for name in (WEIGHTS_FILE, CONFIG_FILE))
    try:
        return read_lora_tensors(weights, config)
    except InvalidArgument as error:
        raise InvalidArgument(f"{WEIGHTS_FILE} and {CONFIG_FILE}: {error}") from None


def write_lora_files(adapter: LoraWeights, folder: Path) -> None:
    """Write an adapter's weights [1, rows, width] and config [1, rows, columns]; create `folder` if necessary."""
    folder.mkdir(parents=True, exist_ok=True)
    matrix = adapter.weights
    kind = _NUMPY_TYPES[matrix.dtype]
    numbers = np.frombuffer(memoryview(matrix.buffer.data).cast("B"), kind).reshape(1, *matrix.shape)
    np.save(folder / WEIGHTS_FILE, numbers)
    np.save(folder / CONFIG_FILE, np.array([adapter.config], np.int32))


def _read(path: Path) -> NDArray[Any]:
    try:
        array: Any = np.load(path, allow_pickle=False)
    except FileNotFoundError:
        raise InvalidArgument(f"{path.name} is missing beside the other of the two files") from None
    except Exception as error:  # of any class, for damaged files
        raise InvalidArgument(f"{path.name} cannot be read as a .npy file: {error}") from None
    if isinstance(array, np.ndarray):
        return cast("NDArray[Any]", array)
    raise InvalidArgument(f"{path.name} is an archive of arrays, expected a .npy file")

"""The head of a checkpoint for sequence classification: the matrix and the labels of its classes.

The head multiplies the last hidden state of a text's last token. The engine computes the hidden state as for
embeddings, and `/v1` applies the head, which is small. Any thread.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inflight.arrays import BFLOAT16, to_float32
from inflight.checkpoint_config import ConfigFile, read_config_file, read_json
from inflight.errors import ConfigError
from inflight.json_values import is_object
from inflight.pooling import CLASSIFICATION_HEAD
from inflight.safetensors_header import StoredTensor, stored_tensor

_INDEX = "model.safetensors.index.json"
_DTYPES = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": BFLOAT16}


class Activation(Enum):
    """The function that turns a head's products into the returned numbers."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class ClassificationHead:
    """The head of a checkpoint for sequence classification.

    Attributes:
        weight: float32 [classes, hidden size].
        labels: The name of each class.
        activation: The function that turns the products into probabilities, as in vLLM: a softmax over several
            classes, a sigmoid for one class or a `problem_type` of several labels a text, none for a regression.
    """

    weight: NDArray[np.float32]
    labels: tuple[str, ...]
    activation: Activation

    def apply(self, hidden: NDArray[np.float32], is_activated: bool = True) -> NDArray[np.float32]:
        """Return a number for each class, float32 [classes].

        Args:
            hidden: The last hidden state of a text's last token, float32 [hidden size].
            is_activated: Whether to return probabilities; otherwise the products themselves are returned.
        """
        products = self.weight @ hidden
        if not is_activated or self.activation is Activation.NONE:
            return products
        wide = products.astype(np.float64)
        if self.activation is Activation.SIGMOID:
            return (1.0 / (1.0 + np.exp(np.minimum(-wide, 700.0)))).astype(np.float32)
        powers = np.exp(wide - wide.max())
        return (powers / powers.sum()).astype(np.float32)


def read_classification_head(folder: Path) -> ClassificationHead:
    """Return the head of a checkpoint.

    Raises:
        ConfigError: The checkpoint has no head that is served; the message has the file, and what it says.
    """
    config = read_config_file(folder)
    weight = _read_weight(folder)
    return ClassificationHead(weight, _labels(config, len(weight)), _activation(config, len(weight)))


def _read_weight(folder: Path) -> NDArray[np.float32]:
    path = folder / _file_name(folder)
    try:
        with path.open("rb") as file:
            found = stored_tensor(file.fileno(), CLASSIFICATION_HEAD)
            raw = b"" if found is None else os.pread(file.fileno(), found.end - found.begin, found.begin)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if found is None:
        raise ConfigError(
            f"{path} has no tensor {CLASSIFICATION_HEAD}, the head of a checkpoint for sequence classification"
        )
    dtype = _DTYPES.get(found.dtype)
    if dtype is None or len(found.shape) != 2 or len(raw) != _num_bytes(found, dtype) or not raw:
        raise ConfigError(
            f"{path} has {CLASSIFICATION_HEAD} of {found.dtype} {list(found.shape)} in {len(raw)} bytes, expected "
            f"{', '.join(_DTYPES)} [classes, hidden size]"
        )
    return to_float32(np.frombuffer(raw, dtype).reshape(found.shape))


def _num_bytes(tensor: StoredTensor, dtype: np.dtype[Any]) -> int:
    return tensor.shape[0] * tensor.shape[1] * dtype.itemsize


def _file_name(folder: Path) -> str:
    """Return the name of the safetensors file that has the head."""
    try:
        index = read_json(folder / _INDEX)
    except FileNotFoundError:
        return "model.safetensors"
    files = index.get("weight_map") if is_object(index) else None
    name = files.get(CLASSIFICATION_HEAD) if is_object(files) else None
    if not isinstance(name, str):
        raise ConfigError(f"{folder / _INDEX} names no file for the tensor {CLASSIFICATION_HEAD}")
    return name


def _labels(config: ConfigFile, count: int) -> tuple[str, ...]:
    """Return the labels in `id2label`; a class without one is named as by transformers."""
    given = config.value("id2label")
    named = given if is_object(given) else {}
    return tuple(str(named.get(str(index), f"LABEL_{index}")) for index in range(count))


def _activation(config: ConfigFile, count: int) -> Activation:
    kind = config.text_or_none("problem_type")
    if kind == "regression":
        return Activation.NONE
    return Activation.SIGMOID if kind == "multi_label_classification" or count == 1 else Activation.SOFTMAX

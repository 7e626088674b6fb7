"""Inputs of Triton's type BF16, which numpy lacks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from inflight.core.request.adapter import RawBuffer
from inflight.tensors.input_table import INPUTS
from inflight.tensors.lora import read_lora
from inflight.tensors.reader import TensorReader
from inflight.tensors.spec import Vocabulary
from inflight.triton.input_arrays import input_arrays
from tests.tensors.factories import make_reader


class BFloat16Tensor:
    """An input of Triton of the type BF16, which numpy lacks."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self._name, self._tensor = name, tensor

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        raise RuntimeError("Tensor dtype is BF16 and cannot be converted to NumPy.")

    def to_dlpack(self) -> Any:
        return torch.utils.dlpack.to_dlpack(self._tensor)


class Inputs:
    """A request of Triton that only has inputs."""

    def __init__(self, *tensors: BFloat16Tensor) -> None:
        self._tensors = list(tensors)

    def inputs(self) -> list[BFloat16Tensor]:
        return self._tensors


def read(*tensors: BFloat16Tensor) -> TensorReader:
    return TensorReader(input_arrays(Inputs(*tensors)), INPUTS, Vocabulary.TOKENS)


def test_bfloat16_inputs_keep_their_bits() -> None:
    tensor = torch.randn(1, 3, 5).bfloat16()
    found = read(BFloat16Tensor("lora_weights", tensor)).array("lora_weights")
    assert found is not None and found.shape == (3, 5)
    assert torch.equal(torch.from_numpy(found.view(np.int16).copy()).view(torch.bfloat16), tensor[0])
    inputs = {
        "lora_task_id": np.array([1], np.uint64),
        "lora_weights": found[None],
        "lora_config": np.array([[[1, 0, 2, 0]] * 3], np.int32),
    }
    lora = read_lora(make_reader(inputs))
    assert lora is not None and lora.weights is not None and lora.weights.weights.dtype == "bfloat16"
    assert lora.weights.weights.buffer == RawBuffer(tensor.view(torch.int16).numpy().tobytes())


def test_an_empty_bfloat16_tensor_is_absent() -> None:
    empty = BFloat16Tensor("lora_weights", torch.zeros(1, 0, 3, dtype=torch.bfloat16))
    assert read(empty).array("lora_weights") is None


def test_another_type_that_triton_cannot_convert_stays_an_error() -> None:
    odd = BFloat16Tensor("lora_weights", torch.zeros(1, 2, 3))
    with pytest.raises(RuntimeError, match="cannot be converted"):
        read(odd)

"""A model's matrices as TensorRT's networks take them: floating point, or quantized by rows, experts flattened.

They come through the same loader as the torch engine's, so that every family and every quantized checkpoint
arrives in one layout (`inflight.models.decoder_weights`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.config import FP8, INT8
from inflight.engine.torch.native.packing import quantize
from inflight.engine.torch.quantized_linear import quantize_float8
from inflight.models import DecoderWeights, Layer, Linear, ModelDescription
from inflight.models.loader import Finisher, load_finished_weights
from inflight.models.sharding import Part


@dataclass(frozen=True, slots=True)
class Matrix:
    """y = x Wᵀ + b.

    Attributes:
        weight: [outputs, inputs] floating point, or levels int8 or float8_e4m3fn: row i stands for
            weight[i] * scales[i].
        bias: [outputs], or None.
        scales: [outputs] float32; None: the weight is floating point.
    """

    weight: Tensor
    bias: Tensor | None = None
    scales: Tensor | None = None


Weights = DecoderWeights[Layer[Matrix], Matrix]


class _Reading(Finisher[Layer[Matrix], Matrix]):
    """Rounds each matrix to `weight_dtype` as it is read, if that is a quantized type."""

    def __init__(self, weight_dtype: str) -> None:
        self._weight_dtype = weight_dtype

    def linear(self, linear: Linear, is_gated: bool = False) -> Matrix:
        return self._matrix(linear.weight, linear.bias)

    def stack(
        self, matrices: Iterator[Tensor], shape: tuple[int, ...], bias: Tensor | None, is_gated: bool
    ) -> Matrix:
        """All experts as one matrix: their outputs behind each other, or of the second one their inputs.

        A row's experts are then two products, with what the first one gives weighed in between.
        """
        assert bias is None, "checked: experts with biases are refused"
        return self._matrix(torch.cat(list(matrices), dim=0 if is_gated else 1), None)

    def layer(self, layer: Layer[Matrix]) -> Layer[Matrix]:
        return layer

    def _matrix(self, weight: Tensor, bias: Tensor | None) -> Matrix:
        if self._weight_dtype == INT8:
            levels, scales = quantize(weight)
        elif self._weight_dtype == FP8:
            levels, scales = quantize_float8(weight)
        else:
            return Matrix(weight, bias)
        return Matrix(levels, bias, scales)


def load_matrices(model: ModelDescription, dtype: torch.dtype, weight_dtype: str, part: Part) -> Weights:
    """A rank's part of a checkpoint, on the CPU. ConfigError if the checkpoint does not hold the model.

    Args:
        model: The checkpoint.
        dtype: Of what is not quantized: embeddings, vectors, routers.
        weight_dtype: Of the matrices: int8, fp8, or anything else for `dtype`.
        part: Which part.
    """
    return load_finished_weights(model, dtype, torch.device("cpu"), part, _Reading(weight_dtype))

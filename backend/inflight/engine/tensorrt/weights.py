"""A model's matrices in the form of TensorRT's networks: floating point or quantized by rows, experts flattened.

The loader of the torch engine reads them, so that every family and every quantized checkpoint has one layout
(`inflight.models.decoder_weights`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from inflight.engine.quantize import quantize_matrix
from inflight.engine.tensorrt.build_options import INT4
from inflight.errors import ConfigError
from inflight.models import ModelDescription
from inflight.models.decoder_weights import DecoderWeights, Layer
from inflight.models.levels import GroupedMatrix, MatrixKind
from inflight.models.loader import load_weights_into
from inflight.models.sharding import Part
from inflight.models.sink import KeptLevels, Sink, StoredMatrix

_MIDDLE = 8  # subtracted from levels 0 to 15, as TensorRT's levels are -8 to 7
_MIN_GROUP, _MAX_GROUP = 16, 128  # numbers of inputs that share a scale in TensorRT
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NetworkMatrix:
    """A matrix with a bias: y = x Wᵀ + b.

    Attributes:
        weight: [outputs, inputs] floating point; or int8 or float8_e4m3fn levels, where row i stands for weight[i]
            * scales[i]; or 4-bit levels, uint8 [outputs, inputs / 2], where each level is multiplied by its
            group's scale. The first of the two levels in a byte is the lower half.
        bias: [outputs], or None.
        scales: float32 [outputs], or for 4 bits [outputs, groups] in the type of activations; None: the weight is
            floating point.
        offsets: [outputs, groups], in the type of scales: a constant added to each weight of a group, for zero
            points in the checkpoint; None: there are none.
        order: [inputs] int32, the input that belongs to each column; None: columns have the order of inputs.
    """

    weight: Tensor
    bias: Tensor | None = None
    scales: Tensor | None = None
    offsets: Tensor | None = None
    order: Tensor | None = None


Weights = DecoderWeights[Layer[NetworkMatrix], NetworkMatrix]


class _MatrixSink(Sink[Layer[NetworkMatrix], NetworkMatrix]):
    """Quantizes each matrix to `weight_dtype` as it is read; for int4, keeps the checkpoint's 4-bit levels."""

    def __init__(self, dtype: torch.dtype, weight_dtype: str) -> None:
        self._dtype, self._weight_dtype = dtype, weight_dtype

    def linear(
        self, matrix: StoredMatrix, bias: Tensor | None = None, is_gated: bool = False
    ) -> NetworkMatrix:
        return self._joined([matrix], 0, bias)

    def stack(
        self, matrices: Iterator[StoredMatrix], shape: tuple[int, ...], bias: Tensor | None, is_gated: bool
    ) -> NetworkMatrix:
        """Return all experts as one matrix, concatenated along their outputs, or along inputs for the second
        matrix.

        Two products then compute all experts; the router's weights are applied between them.
        """
        assert bias is None, "experts with biases are refused before"
        return self._joined(list(matrices), 0 if is_gated else 1, None)

    def why_unpacked(self, matrix: GroupedMatrix, is_stack: bool) -> str:
        if matrix.kind is not MatrixKind.INT4:
            return f"it is in {matrix.kind.value}"
        if is_stack and matrix.order is not None:
            return "each expert has another order of inputs"
        if _group_size(matrix) < _MIN_GROUP:
            return f"{matrix.group_size} inputs share a scale, expected a multiple of {_MIN_GROUP}"
        return ""

    def layer(self, layer: Layer[NetworkMatrix]) -> Layer[NetworkMatrix]:
        return layer

    def _joined(self, matrices: Sequence[StoredMatrix], axis: int, bias: Tensor | None) -> NetworkMatrix:
        """Return matrices concatenated along an axis; either all of them are quantized or none is."""
        if levels := [matrix for matrix in matrices if isinstance(matrix, GroupedMatrix)]:
            return self._kept(levels, axis, bias)
        numbers = [matrix for matrix in matrices if isinstance(matrix, Tensor)]
        whole = numbers[0] if len(numbers) == 1 else torch.cat(numbers, axis)
        stored = quantize_matrix(whole, self._weight_dtype)
        if isinstance(stored, Tensor):
            return NetworkMatrix(stored, bias)
        return NetworkMatrix(stored.values, bias, stored.scales[:, 0])

    def _kept(self, matrices: Sequence[GroupedMatrix], axis: int, bias: Tensor | None) -> NetworkMatrix:
        """Return 4-bit matrices concatenated along an axis.

        Scales are converted to the type of activations; in most checkpoints both are float16.
        """
        parts = [matrix.in_groups_of(_group_size(matrix)) for matrix in matrices]
        order = parts[0].order
        values = torch.cat([part.values for part in parts], axis).to(torch.int16) - _MIDDLE
        halves = (values & 15).to(torch.uint8)
        scales = torch.cat([part.scales for part in parts], axis).to(self._dtype)
        zeros = [part.zeros for part in parts if part.zeros is not None]
        offsets = None
        if zeros:
            offsets = (_MIDDLE - torch.cat(zeros, axis).to(scales.dtype)) * scales
        else:  # unsigned levels, used as they are
            offsets = _MIDDLE * scales
        return NetworkMatrix(
            halves[:, ::2] | halves[:, 1::2] << 4,
            bias,
            scales,
            offsets if offsets.any() else None,
            None if order is None else order.int(),
        )


def load_matrices(model: ModelDescription, dtype: torch.dtype, weight_dtype: str, part: Part) -> Weights:
    """Load a rank's part of a checkpoint to the CPU.

    Args:
        model: The checkpoint.
        dtype: Data type of everything that is not quantized: embeddings, vectors, routers.
        weight_dtype: Data type of the matrices: int8, fp8, int4, or any other value for `dtype`.
        part: The rank's part.

    Raises:
        ConfigError: The checkpoint does not have the model, or for int4 no 4-bit matrix that can be kept.
    """
    kept = KeptLevels() if weight_dtype == INT4 else None
    sink = _MatrixSink(dtype, weight_dtype)
    weights = load_weights_into(sink, model, dtype, torch.device("cpu"), part, kept)
    if kept is not None:
        kept.warn(_log)
    if kept is not None and not kept.counts:
        raise ConfigError(
            f"dtype is int4, but {model.folder} has no matrix of 4 bits that can be kept: int4 is for checkpoints "
            "of AWQ, GPTQ and compressed-tensors in 4 bits"
        )
    return weights


def _group_size(matrix: GroupedMatrix) -> int:
    """Return the number of inputs that share a scale in TensorRT; it divides the checkpoint's group size."""
    return gcd(matrix.group_size, _MAX_GROUP)

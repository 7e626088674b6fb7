"""A model's matrices in the form of TensorRT's networks: floating point or quantized by rows, experts flattened.

They are read by the same loader as the torch engine's, so that every family and every quantized checkpoint has one
layout (`inflight.models.decoder_weights`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from inflight.config import FP8, INT8
from inflight.engine.quantize import quantize_float8, quantize_int8
from inflight.errors import ConfigError
from inflight.models import DecoderWeights, Layer, Linear, ModelDescription
from inflight.models.finisher import Finisher
from inflight.models.levels import GroupedMatrix, Kind
from inflight.models.loader import load_finished_weights
from inflight.models.sharding import Part

INT4 = "int4"
"""Keeps matrices that are 4-bit in the checkpoint."""

_MIDDLE = 8  # the middle of levels 0 to 15; TensorRT's are -8 to 7
_LEAST_GROUP, _MOST_GROUP = 16, 128  # numbers of inputs that share a scale in TensorRT
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix with a bias: y = x Wᵀ + b.

    Attributes:
        weight: [outputs, inputs] floating point; or int8 or float8_e4m3fn levels, where row i stands for weight[i]
            * scales[i]; or 4-bit levels, uint8 [outputs, inputs / 2], each of which is multiplied by the scale of
            its group. The first of two values in a byte is the lower half.
        bias: [outputs], or None.
        scales: float32 [outputs], or for 4 bits [outputs, groups] in the type of activations; None: the weight is
            floating point.
        offsets: [outputs, groups], in the type of scales: a constant added to each weight of a group, for zero
            points in the checkpoint; None: there are none.
        order: [inputs] int32, the input that belongs to each column; None: in order.
    """

    weight: Tensor
    bias: Tensor | None = None
    scales: Tensor | None = None
    offsets: Tensor | None = None
    order: Tensor | None = None


Weights = DecoderWeights[Layer[Matrix], Matrix]


class _Reading(Finisher[Layer[Matrix], Matrix]):
    """Rounds each matrix to `weight_dtype` as it is read, or for int4 keeps the checkpoint's 4-bit levels."""

    def __init__(self, dtype: torch.dtype, weight_dtype: str) -> None:
        self._dtype, self._weight_dtype = dtype, weight_dtype
        self.keeps_levels = weight_dtype == INT4
        self.num_kept = 0
        self.unpacked: dict[str, list[str]] = {}

    def linear(self, linear: Linear, is_gated: bool = False) -> Matrix:
        return self._matrix(linear.weight, linear.bias)

    def stack(
        self, matrices: Iterator[Tensor], shape: tuple[int, ...], bias: Tensor | None, is_gated: bool
    ) -> Matrix:
        """Return all experts as one matrix: their outputs, or for the second matrix their inputs, are
        concatenated.

        A row's experts are then two products, with their weights applied in between.
        """
        assert bias is None, "checked: experts with biases are refused"
        return self._matrix(torch.cat(list(matrices), dim=0 if is_gated else 1), None)

    def why_unpacked(self, matrix: GroupedMatrix, is_stack: bool) -> str:
        if matrix.kind is not Kind.INT4:
            return f"it is in {matrix.kind.value}"
        if is_stack and matrix.order is not None:
            return "each expert has its inputs in an order of its own"
        if _group_size(matrix) < _LEAST_GROUP:
            return f"{matrix.group_size} inputs share a scale, expected a multiple of {_LEAST_GROUP}"
        return ""

    def keep_levels(self, matrix: GroupedMatrix, bias: Tensor | None, is_gated: bool) -> Matrix:
        return self._kept([matrix], 0, bias)

    def keep_stacked_levels(
        self, matrices: Iterator[GroupedMatrix], shape: tuple[int, ...], bias: Tensor | None, is_gated: bool
    ) -> Matrix:
        assert bias is None, "checked: experts with biases are refused"
        return self._kept(list(matrices), 0 if is_gated else 1, None)

    def note_unpacked(self, name: str, reason: str) -> None:
        self.unpacked.setdefault(reason, []).append(name)

    def layer(self, layer: Layer[Matrix]) -> Layer[Matrix]:
        return layer

    def _matrix(self, weight: Tensor, bias: Tensor | None) -> Matrix:
        if self._weight_dtype == INT8:
            levels, scales = quantize_int8(weight)
        elif self._weight_dtype == FP8:
            levels, scales = quantize_float8(weight)
        else:
            return Matrix(weight, bias)
        return Matrix(levels, bias, scales)

    def _kept(self, matrices: Sequence[GroupedMatrix], axis: int, bias: Tensor | None) -> Matrix:
        """Return 4-bit matrices concatenated along an axis.

        Scales are rounded to the type of activations, which like theirs is float16 in most checkpoints.
        """
        self.num_kept += 1
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
        return Matrix(
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
    reading = _Reading(dtype, weight_dtype)
    weights = load_finished_weights(model, dtype, torch.device("cpu"), part, reading)
    for reason, names in reading.unpacked.items():
        _log.warning("%d quantized projections are unpacked (%s): %s", len(names), names[0], reason)
    if weight_dtype == INT4 and not reading.num_kept:
        raise ConfigError(
            f"dtype is int4, but {model.folder} has no matrix of 4 bits that can be kept: int4 is for checkpoints "
            "of AWQ, GPTQ and compressed-tensors in 4 bits"
        )
    return weights


def _group_size(matrix: GroupedMatrix) -> int:
    """Return the number of inputs that share a scale in TensorRT; it divides the checkpoint's group size."""
    return gcd(matrix.group_size, _MOST_GROUP)

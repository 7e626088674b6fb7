"""Reads a model's weights for torch's operators.

Matrices stay numbers, are quantized by rows as they are read, or stay quantized as in the checkpoint. Used on the
loading thread.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from itertools import chain

import torch
from torch import Tensor

from inflight.config import FP8, INT8
from inflight.engine.layers.grouped_linear import MIN_GROUP, GroupedLinear, tile_of, why_not
from inflight.engine.layers.quantized_linear import FLOAT8_MULTIPLE, Products, QuantizedLinear
from inflight.engine.quantize import quantize_matrix
from inflight.errors import ConfigError
from inflight.models import ModelDescription
from inflight.models.decoder_weights import LayerWeights, Linear, PlainWeights
from inflight.models.levels import GroupedMatrix, MatrixKind
from inflight.models.loader import load_weights_into, stored_dtype
from inflight.models.sharding import Part
from inflight.models.sink import KeptLevels, Sink, StoredMatrix

_log = logging.getLogger(__name__)


def load_weights(
    model: ModelDescription,
    dtype: torch.dtype | None,
    device: torch.device,
    part: Part | None = None,
    weight_dtype: str | None = None,
    kept: KeptLevels | None = None,
) -> PlainWeights:
    """Read the model's weights onto `device`.

    Args:
        model: The checkpoint.
        dtype: Dtype of activations and of weights that are not quantized; None: the checkpoint's.
        device: Device of the weights.
        part: The part that is read; None: the whole model.
        weight_dtype: int8 or fp8: matrices are quantized to it; any other value: they are not.
        kept: If set, matrices that the checkpoint has quantized stay so where that is supported; not together
            with int8 or fp8.

    Raises:
        ConfigError: As `load_weights_into`; or matrices are to be fp8, and the GPU does not multiply float8.
    """
    dtype = dtype or stored_dtype(model)
    sink = TorchSink(dtype, device, weight_dtype)
    return load_weights_into(sink, model, dtype, device, part or Part.whole(model.decoder), kept)


@dataclass
class TorchSink(Sink[LayerWeights, Linear]):
    """Makes the linear layers of torch's operators, choosing the class by each matrix's format.

    Routers, embeddings and the projections inside latent attention are not quantized. If the output projection
    is quantized and its matrix is also the embedding, this matrix is stored twice.

    Args:
        computed: Data type of activations.
        device: The model's device.
        weight_dtype: int8 or fp8: numbers are quantized to it; any other value: they are not.

    Raises:
        ConfigError: `weight_dtype` is fp8, and the GPU does not multiply float8.
    """

    computed: torch.dtype
    device: torch.device
    weight_dtype: str | None = None
    _products: Products = field(init=False)
    _tried: dict[tuple[object, ...], bool] = field(default_factory=dict[tuple[object, ...], bool])

    def __post_init__(self) -> None:
        self._products = Products(self.computed, self.device)
        is_on_gpu = self.weight_dtype == FP8 and self.device.type == "cuda"
        if is_on_gpu and (reason := self._products.why_no_float8):
            name = torch.cuda.get_device_name(self.device)
            raise ConfigError(
                f"dtype is fp8, which torch {torch.__version__} does not multiply on {name} ({reason}): "
                "processors of compute capability 8.9 (Ada) or later do; take int8 or bfloat16"
            )

    def linear(self, matrix: StoredMatrix, bias: Tensor | None = None, is_gated: bool = False) -> Linear:
        return replace(self._linear(matrix), bias=bias)

    def stack(
        self, matrices: Iterator[StoredMatrix], shape: tuple[int, ...], bias: Tensor | None, is_gated: bool
    ) -> Linear:
        first, count = self._linear(next(matrices)), shape[0]
        stacked = {name: tensor.new_empty((count, *tensor.shape)) for name, tensor in _tensors(first)}
        for index, linear in zip(range(count), chain((first,), map(self._linear, matrices)), strict=True):
            for name, tensor in _tensors(linear):
                stacked[name][index].copy_(tensor)
        return replace(first, bias=bias, **stacked)

    def layer(self, layer: LayerWeights) -> LayerWeights:
        return layer

    def why_unpacked(self, matrix: GroupedMatrix, is_stack: bool) -> str:
        if not tile_of(matrix.group_size, matrix.scales.shape[1]):
            return f"groups of {matrix.group_size} inputs, not a multiple of {MIN_GROUP}"
        if matrix.zeros is not None and (matrix.zeros.min() < 0 or matrix.zeros.max() > 255):
            return "zero points that are not bytes"
        return ""

    def _linear(self, matrix: StoredMatrix) -> Linear:
        """Return the layer of one matrix, without a bias."""
        stored = quantize_matrix(matrix, self.weight_dtype) if isinstance(matrix, Tensor) else matrix
        if isinstance(stored, Tensor):
            return Linear(stored)
        if self._is_multiplied_by_row(stored):
            levels, scales = (
                each.to(self.device).contiguous() for each in (stored.values, stored.scales[:, 0])
            )
            product = self._products.find(levels, scales)
            return QuantizedLinear(levels, scales=scales, computed=self.computed, product=product)
        linear = GroupedLinear.of(stored, self.computed, self.device)
        return replace(linear, has_kernel=self._has_kernel(stored, linear))

    def _is_multiplied_by_row(self, matrix: GroupedMatrix) -> bool:
        """Whether a `QuantizedLinear` computes matrices of this format and shape."""
        if matrix.kind is MatrixKind.INT8_BY_ROW:
            # Not a checkpoint's levels: their sums, not yet scaled, may overflow in float16.
            return self.weight_dtype == INT8
        if matrix.kind is not MatrixKind.FLOAT8_BY_ROW:
            return False
        if self._products.why_no_float8:
            return self.weight_dtype == FP8
        return all(side % FLOAT8_MULTIPLE == 0 for side in matrix.shape)

    def _has_kernel(self, matrix: GroupedMatrix, linear: GroupedLinear) -> bool:
        """Whether the kernel multiplies matrices of this form correctly on this device; False on a CPU."""
        if self.device.type != "cuda":
            return False
        form = (*matrix.form, matrix.zeros is None)
        if form not in self._tried:
            reason = why_not(linear, self.device)
            if reason:
                _log.warning(
                    "matrices of %d x %d in %s are unpacked by torch's operators for every product, which is "
                    "slower: the kernel cannot be used here: %s",
                    *matrix.shape,
                    matrix.kind.value,
                    reason,
                )
            self._tried[form] = not reason
        return self._tried[form]


def _tensors(linear: Linear) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a layer, by the names of its attributes."""
    for each in fields(linear):
        value = getattr(linear, each.name)
        if isinstance(value, Tensor):
            yield each.name, value

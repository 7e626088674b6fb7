"""Weights in the layout that the compiled products read, and the structs that point to them.

A matrix becomes panels of 32 columns (source/gemm.h), in its own dtype or quantized to int8 with a scale for each
column. Layers are packed as they are read from the checkpoint, so that no more than one is there twice.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import torch
from torch import Tensor

from inflight.engine.torch.host_memory import Arena
from inflight.engine.torch.native.structs import LayerStruct, LinearStruct, NormStruct
from inflight.models import LayerWeights, Linear, Norm

PackedHead = tuple[LinearStruct, tuple[Tensor, ...]]
"""The output projection's struct, and what it points into."""

PANEL = 32
_HALF = PANEL // 2
_INT8_LEVELS = 127


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """One layer, packed.

    Attributes:
        struct: Without its part of the KV cache.
        tensors: What the struct points into.
        output_bias: Of the attention's output projection, which is added once to the sum over all ranks.
        down_bias: Of the MLP's second projection, likewise.
    """

    struct: LayerStruct
    tensors: tuple[Tensor, ...]
    output_bias: Tensor | None
    down_bias: Tensor | None


@dataclass(slots=True)
class Packer:
    """Packs a model's weights.

    Attributes:
        library: The compiled code, for these types.
        dtype: Of activations and, unless they are quantized, weights.
        is_gated: Whether the MLP is.
        int8: Whether to quantize matrices.
        num_threads: To pack with.
    """

    library: ctypes.CDLL
    dtype: torch.dtype
    is_gated: bool
    int8: bool
    num_threads: int
    _arena: Arena = field(default_factory=Arena)
    _tensors: list[Tensor] = field(default_factory=list)

    def layer(self, layer: LayerWeights) -> PackedLayer:
        """Pack one layer."""
        self._tensors = []
        struct = LayerStruct(
            attention_norm=self._norm(layer.attention_norm),
            mlp_norm=self._norm(layer.mlp_norm),
            qkv=self._linear(layer.qkv),
            output=self._linear(layer.output),
            up=self._linear(layer.up, self.is_gated),
            down=self._linear(layer.down),
        )
        if layer.query_norm is not None and layer.key_norm is not None:
            struct.query_norm = self._norm(layer.query_norm).weight
            struct.key_norm = self._norm(layer.key_norm).weight
        return PackedLayer(struct, tuple(self._tensors), layer.output.bias, layer.down.bias)

    def linear(self, linear: Linear) -> PackedHead:
        """Pack a matrix by itself."""
        self._tensors = []
        return self._linear(linear), tuple(self._tensors)

    def norm(self, norm: Norm) -> tuple[NormStruct, tuple[Tensor, ...]]:
        """Pack a norm by itself."""
        self._tensors = []
        return self._norm(norm), tuple(self._tensors)

    def _norm(self, norm: Norm) -> NormStruct:
        return NormStruct(self._keep(norm.weight.float()), self._keep(norm.bias, torch.float32))

    def _linear(self, linear: Linear, gated: bool = False) -> LinearStruct:
        rows, inner = linear.weight.shape
        order = _gated_order(rows) if gated else torch.arange(rows)
        width = -(-len(order) // PANEL) * PANEL
        weight, scales, corrections = linear.weight.contiguous(), None, None
        if self.int8:
            weight, of_rows, sums = self._quantize(weight)
            scales = _in_order(of_rows, order, width)
            corrections = _in_order(sums * (_INT8_LEVELS + 1), order, width)
        together = 4 // weight.itemsize  # of what a lane multiplies at a time
        padded = -(-inner // together) * together
        packed = self._arena.empty(width * padded, weight.dtype)
        pack = self.library.pack_int8 if self.int8 else self.library.pack
        pack(
            weight.data_ptr(),
            inner,
            order.data_ptr(),
            len(order),
            inner,
            packed.data_ptr(),
            self.num_threads,
        )
        bias = None if linear.bias is None else _in_order(linear.bias.float(), order, width)
        return LinearStruct(
            self._keep(packed),
            self._keep(bias),
            self._keep(scales),
            self._keep(corrections),
            len(order),
            padded,
            int(self.int8),
        )

    def _quantize(self, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What `quantize` returns, and the sum of each row."""
        rows, inner = weight.shape
        result = torch.empty_like(weight, dtype=torch.int8)
        scales, sums = torch.empty(rows), torch.empty(rows, dtype=torch.int32)
        places = (result.data_ptr(), scales.data_ptr(), sums.data_ptr())
        self.library.quantize(weight.data_ptr(), rows, inner, *places, self.num_threads)
        return result, scales, sums

    def _keep(self, tensor: Tensor | None, dtype: torch.dtype | None = None) -> int | None:
        if tensor is None:
            return None
        kept = tensor.to(dtype or tensor.dtype).contiguous()
        self._tensors.append(kept)
        return kept.data_ptr()


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [rows, inner] and a float32 scale for each row; the largest of a row is 127 scales."""
    wide = weight.float()
    scales = wide.abs().amax(1) / _INT8_LEVELS
    return (wide / scales.clamp_min(1e-30)[:, None]).round_().to(torch.int8), scales


def _gated_order(rows: int) -> Tensor:
    """Source rows of the columns: 16 of the gate, then the same 16 of what it gates; -1 fills up."""
    inner = rows // 2
    gate = torch.arange(-(-inner // _HALF) * _HALF)
    gate[inner:] = -1
    gated = torch.where(gate >= 0, gate + inner, -1)
    return torch.stack([gate.view(-1, _HALF), gated.view(-1, _HALF)], dim=1).flatten()


def _in_order(values: Tensor, order: Tensor, width: int) -> Tensor:
    result = values.new_zeros(width)
    result[: len(order)] = torch.where(order >= 0, values[order.clamp_min(0)], 0)
    return result

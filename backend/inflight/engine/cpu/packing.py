"""Weights in the layout that the compiled products read, and the structs that point to them.

A matrix becomes panels of 32 columns (source/gemm.h). Its values stay in their dtype, are quantized here to int8
with a scale per column, or were quantized in the checkpoint, to int8 with a scale per column or to 4 or 8 bits in
groups (source/groups.h). Matrices are packed as they are read from the checkpoint, so that at most one is in
memory twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.engine.cpu import layout
from inflight.engine.cpu.layout import HALF, PANEL
from inflight.engine.cpu.library import CompiledCode
from inflight.engine.cpu.structs import (
    LatentLayerStruct,
    LayerStruct,
    LinearStruct,
    NormStruct,
    RecurrentStruct,
)
from inflight.engine.host_memory import Arena, zeros
from inflight.engine.quantize import INT8_LEVELS
from inflight.models.decoder_config import LatentAttention
from inflight.models.decoder_weights import ExpertWeights, LatentWeights, Layer, Norm
from inflight.models.levels import GroupedMatrix, MatrixKind
from inflight.models.recurrent import RecurrentWeights
from inflight.models.sink import Sink, StoredMatrix

_NUMBERS_AT_ONCE = 1 << 21  # a matrix is quantized in steps of the fewest whole panels with this many values


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A weight matrix, with its bias, in the memory layout that compiled layers read.

    Attributes:
        struct: The packed matrix with its bias.
        tensors: The tensors that the struct points to.
        bias: The bias as it was read, for sums over ranks; None if there is none.
    """

    struct: LinearStruct
    tensors: tuple[Tensor, ...]
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class Contribution:
    """The steps from the all-reduce over ranks to the addition to the residual stream, for attention or an MLP.

    Attributes:
        bias: Bias of the last projection, added once to the sum of all ranks; None if there is none.
        post_norm: The norm after the bias; None if there is none.
    """

    bias: Tensor | None
    post_norm: Norm | None


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """A decoder layer whose matrices are all in the memory layout that compiled layers read.

    Attributes:
        struct: The packed layer; its addresses in the KV cache or the recurrent states are set later.
        tensors: The tensors that the struct points to.
        attention: Steps after the all-reduce of attention's output.
        mlp: Steps after the all-reduce of the MLP's output.
    """

    struct: LayerStruct
    tensors: tuple[Tensor, ...]
    attention: Contribution
    mlp: Contribution


@dataclass(slots=True)
class Packer(Sink[PackedLayer, PackedLinear]):
    """Packs every matrix of a model as it is read.

    Attributes:
        library: The compiled code for these dtypes.
        dtype: Dtype of activations and of weights that are not quantized.
        int8: Whether to quantize matrices to int8.
        num_threads: Number of threads that pack.
        has_int8_head: Whether to quantize the output projection.
        arena: The memory of packed matrices.
        latent: Sizes of the model's latent attention; None: the model has ordinary attention.
    """

    library: CompiledCode
    dtype: torch.dtype
    int8: bool
    num_threads: int
    has_int8_head: bool = False
    arena: Arena = field(default_factory=Arena)
    latent: LatentAttention | None = None
    _tensors: list[Tensor] = field(default_factory=list[Tensor])

    def layer(self, layer: Layer[PackedLinear]) -> PackedLayer:
        """Pack one layer, whose projections are already packed."""
        self._tensors = []
        struct = LayerStruct(
            attention_norm=self._norm(layer.attention_norm),
            mlp_norm=self._norm(layer.mlp_norm),
            attention_post_norm=self._norm(layer.attention_post_norm),
            mlp_post_norm=self._norm(layer.mlp_post_norm),
            qkv=layer.qkv.struct,
            output=layer.output.struct,
        )
        projections = [layer.qkv, layer.output]
        if layer.up is not None and layer.down is not None:
            struct.up, struct.down = layer.up.struct, layer.down.struct
            projections += [layer.up, layer.down]
        if layer.experts is not None:
            struct.router = self._router(layer.experts)
            struct.expert_up, struct.expert_down = layer.experts.up.struct, layer.experts.down.struct
            struct.choice_bias = self._keep(layer.experts.choice_bias, torch.float32)
            projections += [layer.experts.up, layer.experts.down]
        for linear in projections:
            self._tensors += linear.tensors
        if layer.query_norm is not None and layer.key_norm is not None:
            struct.query_norm = self._norm(layer.query_norm).weight
            struct.key_norm = self._norm(layer.key_norm).weight
        struct.learned_sinks = self._keep(layer.sinks, torch.float32)
        if layer.latent is not None and self.latent is not None:
            struct.latent = self._latent(layer.latent, self.latent)
        if layer.recurrent is not None:
            struct.recurrent = self._recurrent(layer.recurrent)
        return PackedLayer(
            struct,
            tuple(self._tensors),
            Contribution(layer.output.bias, layer.attention_post_norm),
            Contribution(layer.down.bias if layer.down and not layer.experts else None, layer.mlp_post_norm),
        )

    @property
    def keeps_tied_embedding(self) -> bool:
        """Whether a tied embedding is stored too, as columns of an int8 output projection cannot replace its
        rows."""
        return self.has_int8_head

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a tensor to read weights into; the memory of a matrix is freed after packing."""
        return torch.empty(shape, dtype=dtype) if len(shape) == 1 else zeros(shape, dtype)

    def linear(
        self, matrix: StoredMatrix, bias: Tensor | None = None, is_gated: bool = False
    ) -> PackedLinear:
        """Return one weight matrix, with its bias, in the memory layout that compiled layers read."""
        return self._packed(iter((matrix,)), (1, *matrix.shape), bias, is_gated)

    def head(self, matrix: StoredMatrix) -> PackedLinear:
        """Pack the output projection [vocab_size, hidden_size]: as levels, or in `has_int8_head`'s format."""
        if isinstance(matrix, GroupedMatrix):
            return self.linear(matrix)
        self._tensors = []
        return PackedLinear(
            self._pack((matrix,), (1, *matrix.shape), self.has_int8_head), tuple(self._tensors), None
        )

    @property
    def keeps_head(self) -> bool:
        return True

    def stack(
        self,
        matrices: Iterator[StoredMatrix],
        shape: tuple[int, ...],
        bias: Tensor | None = None,
        is_gated: bool = False,
    ) -> PackedLinear:
        """Pack the matrices [rows, inner] of experts, reading each from the iterator only when it is packed.

        `shape`: [count, rows, inner]; `bias`: [count, rows].
        """
        return self._packed(matrices, shape, bias, is_gated, is_stack=True)

    def why_unpacked(self, matrix: GroupedMatrix, is_stack: bool) -> str:
        """Return the reason why compiled layers cannot use a quantized matrix directly; empty if they can."""
        if matrix.kind not in KEPT:
            return f"{matrix.kind.value}, which int8 by row would quantize again"
        if matrix.scales.shape[1] > 1 and matrix.group_size % layout.GROUP_MULTIPLE:
            return f"groups of {matrix.group_size} inputs, not a multiple of {layout.GROUP_MULTIPLE}"
        if is_stack and matrix.order is not None:
            return "experts whose inputs are in an order of their own"
        return ""

    def norm(self, norm: Norm) -> tuple[NormStruct, tuple[Tensor, ...]]:
        """Pack a norm outside the layers."""
        self._tensors = []
        return self._norm(norm), tuple(self._tensors)

    def _norm(self, norm: Norm | None) -> NormStruct:
        if norm is None:
            return NormStruct()
        return NormStruct(self._keep(norm.weight.float()), self._keep(norm.bias, torch.float32))

    def _recurrent(self, weights: RecurrentWeights) -> RecurrentStruct:
        """Pack the weights of a recurrent layer other than its projections; never as int8."""
        return RecurrentStruct(
            self._keep(weights.conv.T, torch.float32),
            self._keep(weights.conv_bias, torch.float32),
            self._keep(weights.decay, torch.float32),
            self._keep(weights.step_bias, torch.float32),
            self._keep(weights.skip, torch.float32),
            self._keep(weights.norm, torch.float32),
        )

    def _router(self, experts: ExpertWeights[PackedLinear]) -> LinearStruct:
        """Pack the router's columns, followed by the shared gate's column, which has no bias; never as int8."""
        router, bias = experts.router.weight, experts.router.bias
        if experts.shared_gate is not None:
            router = torch.cat((router, experts.shared_gate.weight))
            bias = None if bias is None else F.pad(bias, (0, 1))
        return self._pack((router,), (1, *router.shape), int8=False, bias=bias)

    def _latent(self, weights: LatentWeights, sizes: LatentAttention) -> LatentLayerStruct:
        """Pack the weights of latent attention other than the first projection; never as int8."""
        widths = sizes.nope_head_dim, sizes.value_head_dim
        by_head = torch.unflatten(weights.kv_up.weight, 0, (-1, sum(widths)))
        keys, values = by_head.split_with_sizes(widths, dim=1)
        queries = weights.query_up
        return LatentLayerStruct(
            self._norm(weights.query_norm),
            self._norm(weights.kv_norm),
            LinearStruct()
            if queries is None
            else self._pack((queries.weight,), (1, *queries.weight.shape), int8=False),
            *(
                self._pack(stack.unbind(), tuple(stack.shape), int8=False, is_stack=True)
                for stack in (keys.transpose(1, 2), values, by_head)
            ),
        )

    def _packed(
        self,
        matrices: Iterator[StoredMatrix],
        shape: tuple[int, ...],
        bias: Tensor | None,
        is_gated: bool,
        is_stack: bool = False,
    ) -> PackedLinear:
        """Pack matrices one after the other; all have the format of the first one."""
        self._tensors = []
        first = next(matrices)
        matrices = chain((first,), matrices)
        if isinstance(first, GroupedMatrix) and first.kind in GROUPED:
            struct = self._pack_groups(matrices, shape, is_gated, bias, is_stack)
        else:
            int8 = self.int8 or isinstance(first, GroupedMatrix)
            struct = self._pack(matrices, shape, int8, is_gated, bias, is_stack)
        return PackedLinear(struct, tuple(self._tensors), bias)

    def _pack(
        self,
        matrices: Iterable[StoredMatrix],
        shape: tuple[int, ...],
        int8: bool,
        is_gated: bool = False,
        bias: Tensor | None = None,
        is_stack: bool = False,
    ) -> LinearStruct:
        """Pack matrices one after the other, `shape` [count, rows, inner]; in a stack each has whole panels.

        With `int8`, matrices are quantized here, unless the checkpoint has 8-bit levels with a scale per row.
        """
        count, rows, inner = shape
        order, width = _column_order(rows, is_gated, is_stack)
        dtype = torch.int8 if int8 else self.dtype
        together = layout.PAIR_BYTES // dtype.itemsize  # inputs that a lane multiplies at a time
        padded = -(-inner // together) * together
        packed = self.arena.empty(count * width * padded, dtype).view(count, width, padded)
        scales = torch.zeros((count if int8 else 0, width))
        corrections = torch.zeros(scales.shape, dtype=torch.int32)
        for index, (matrix, target) in enumerate(zip(matrices, packed, strict=True)):
            if int8:
                self._pack_int8(matrix, order, target, scales[index], corrections[index])
            else:
                assert isinstance(matrix, Tensor), "quantized matrices are packed with int8"
                weight, sizes = matrix.contiguous(), (inner, order.data_ptr(), len(order), inner)
                self.library.pack(weight.data_ptr(), *sizes, target.data_ptr(), self.num_threads)
        return LinearStruct(
            self._keep(packed),
            self._keep(None if bias is None else _packed_bias(bias, order, width)),
            self._keep(scales) if int8 else None,
            self._keep(corrections) if int8 else None,
            None,
            count * len(order),
            padded,
            layout.INT8 if int8 else layout.ELEMENT,
        )

    def _pack_groups(
        self,
        matrices: Iterator[StoredMatrix],
        shape: tuple[int, ...],
        is_gated: bool,
        bias: Tensor | None = None,
        is_stack: bool = False,
    ) -> LinearStruct:
        """Pack matrices one after the other as `_pack` does, with the checkpoint's levels in groups.

        All matrices have the same groups and the same order of inputs.
        """
        count, rows, inner = shape
        order, width = _column_order(rows, is_gated, is_stack)
        first = next(matrices)
        assert isinstance(first, GroupedMatrix), "matrices in groups are quantized"
        kind = GROUPED[first.kind]
        size = -(-first.group_size // layout.GROUP_MULTIPLE) * layout.GROUP_MULTIPLE
        groups = first.scales.shape[1]
        row_bytes = groups * (size + layout.OF_GROUP)
        column_bytes = groups * (size * first.bits // 8 + layout.GROUP_WORDS[kind])
        packed = self.arena.empty(count * width * column_bytes, torch.uint8).view(count, -1)
        for matrix, target in zip(chain((first,), matrices), packed, strict=True):
            assert isinstance(matrix, GroupedMatrix), "all matrices have the first one's format"
            values, words = matrix.values.contiguous(), _words(matrix)
            sources = values.data_ptr(), words.data_ptr(), order.data_ptr()
            sizes = len(order), inner, groups, size
            self.library.pack_groups(kind, *sources, *sizes, target.data_ptr(), self.num_threads)
        return LinearStruct(
            self._keep(packed),
            self._keep(None if bias is None else _packed_bias(bias, order, width)),
            None,
            None,
            self._keep(first.order, torch.int32),
            count * len(order),
            row_bytes,
            kind,
            groups,
            size,
        )

    def _pack_int8(
        self, matrix: StoredMatrix, order: Tensor, packed: Tensor, scales: Tensor, corrections: Tensor
    ) -> None:
        """Fill `packed` [width, padded], a few columns at a time, and each column's scale and correction, [width].

        The matrix is quantized here with a scale per row, unless the checkpoint has 8-bit levels with a single
        group of inputs, which is equivalent.
        """
        values = matrix.values if isinstance(matrix, GroupedMatrix) else matrix
        inner = values.shape[1]
        step = min(-(-_NUMBERS_AT_ONCE // (PANEL * inner)) * PANEL, len(order))
        rows = torch.empty((step, inner), dtype=values.dtype)
        levels = rows if isinstance(matrix, GroupedMatrix) else torch.empty(rows.shape, dtype=torch.int8)
        for begin in range(0, len(order), step):
            own = order[begin : begin + step]
            end, is_there = begin + len(own), own >= 0
            sources = own[is_there]
            of_columns = torch.index_select(values, 0, sources, out=rows[: len(sources)])
            if isinstance(matrix, GroupedMatrix):
                of_rows, sums = matrix.scales[sources, 0], of_columns.sum(1, dtype=torch.int32)
            else:
                of_rows, sums = self._quantize(of_columns, levels)
            scales[begin:end][is_there] = of_rows
            corrections[begin:end][is_there] = sums * (INT8_LEVELS + 1)
            places = torch.where(is_there, is_there.cumsum(0) - 1, -1)
            target = packed[begin].data_ptr()
            self.library.pack_int8(
                levels.data_ptr(), inner, places.data_ptr(), len(own), inner, target, self.num_threads
            )

    def _quantize(self, weight: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
        """Quantize into the first rows of `levels`; return the scale of each row, and the sum of its levels."""
        rows, inner = weight.shape
        scales, sums = torch.empty(rows), torch.empty(rows, dtype=torch.int32)
        places = (levels.data_ptr(), scales.data_ptr(), sums.data_ptr())
        self.library.quantize(weight.data_ptr(), rows, inner, *places, self.num_threads)
        return scales, sums

    def _keep(self, tensor: Tensor | None, dtype: torch.dtype | None = None) -> int | None:
        if tensor is None:
            return None
        kept = tensor.to(dtype or tensor.dtype).contiguous()
        self._tensors.append(kept)
        return kept.data_ptr()


GROUPED = {
    MatrixKind.INT4: layout.INT4,
    MatrixKind.FLOAT4: layout.FLOAT4,
    MatrixKind.INT8: layout.GROUPED_INT8,
}
"""The kind in compiled code of each format with groups."""
KEPT = frozenset({*GROUPED, MatrixKind.INT8_BY_ROW})
"""Formats of quantized matrices that compiled layers can use directly."""


def _words(matrix: GroupedMatrix) -> Tensor:
    """Return the bits of float32 scales as [outputs, groups] int32, with 4-bit integers' zero points in the lowest
    bits.

    The code multiplies 4-bit floats as twice their values, so their scales are halved.
    """
    scales = matrix.scales / 2 if matrix.is_float4 else matrix.scales.contiguous()
    if matrix.kind is not MatrixKind.INT4:
        return scales.view(torch.int32)
    points = torch.zeros(1) if matrix.zeros is None else matrix.zeros
    return (scales.view(torch.int32) & ~layout.INT4_ZERO_BITS) | points.to(torch.int32)


def _column_order(rows: int, is_gated: bool, is_stack: bool) -> tuple[Tensor, int]:
    """Return the source row of every column, -1 for padding of a stack's matrices, and the padded width."""
    order = gated_order(rows) if is_gated else torch.arange(rows)
    width = -(-len(order) // PANEL) * PANEL
    return F.pad(order, (0, width - len(order)), value=-1) if is_stack else order, width


def _packed_bias(bias: Tensor, order: Tensor, width: int) -> Tensor:
    """Return the bias [count * width] float32 of one matrix [rows] or of a stack's matrices [count, rows]."""
    each = bias.float().view(-1, bias.shape[-1])
    return torch.cat([in_order(own, order, width) for own in each])


def gated_order(rows: int) -> Tensor:
    """Return the source row of each column: 16 rows of gate, then the matching 16 rows of up; -1 for padding."""
    inner = rows // 2
    gate = torch.arange(-(-inner // HALF) * HALF)
    gate[inner:] = -1
    gated = torch.where(gate >= 0, gate + inner, -1)
    return torch.stack([gate.view(-1, HALF), gated.view(-1, HALF)], dim=1).flatten()


def in_order(values: Tensor, order: Tensor, width: int) -> Tensor:
    """Return [width]: the values of the columns' source rows in `order`, and zeros for padding."""
    result = values.new_zeros(width)
    result[: len(order)] = torch.where(order >= 0, values[order.clamp_min(0)], 0)
    return result

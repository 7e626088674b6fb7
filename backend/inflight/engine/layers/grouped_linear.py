"""Linear layers whose weights stay on the device as quantized in the checkpoint, for torch's operators.

4-bit and 8-bit weights keep their bits. Float8 weights with a scale per row or per matrix are multiplied as float8
by a GPU that supports it (`quantized_linear.py`). All other weights are unpacked inside a kernel in Triton's
language, and activations are not quantized. The kernel is tried once per shape of matrix when the model is loaded;
if its results are wrong on the device, torch's operators unpack the matrix for every product.

Created on the loading thread; the layers are called on the loop thread.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.config import FP8
from inflight.engine.layers.quantized_linear import QuantizedLinear, Quantizing
from inflight.errors import ConfigError
from inflight.models import Linear
from inflight.models.levels import GroupedMatrix, Levels, MatrixKind, float4_pairs
from inflight.models.sink import PlainSink, StoredMatrix

_log = logging.getLogger(__name__)
_LEAST_GROUP = 16  # smallest tile of inputs; it must divide the group size
_POWERS = torch.float8_e8m0fnu  # powers of 2 in a byte: scales of 4-bit floats
_NUMBERS_OF_TILE = 1 << 20  # 2 MiB in bfloat16
_MANY_ROWS = 256  # from this many rows on, unpacking the whole matrix once is faster
_TRIED_ROWS = (1, 17, 64)
_TOLERANCE = 0.02  # relative to the largest result, as in quantized_linear.py


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedLinear(Linear):
    """A `Linear` whose `weight` is quantized levels: [out, in] with 8 bits, or packed with 4 bits, [out, bytes]
    uint8.

    It may also be a stack of experts, with an additional first axis on all tensors.

    Attributes:
        scales: [out, groups] float32; float8_e8m0fnu for 4-bit floats.
        zeros: [out, groups] uint8; None: all are 0.
        order: [in] int64, the input that belongs to each column of `weight`; None: in order.
        group_size: Number of inputs of a group.
        bits: 4 or 8.
        tile: Number of inputs that the kernel multiplies at a time, see `pack`; 1 for 4-bit floats on a CPU.
        computed: Data type of inputs and outputs.
        has_kernel: Whether the kernel is used.
    """

    scales: Tensor
    zeros: Tensor | None
    order: Tensor | None
    group_size: int
    bits: int
    tile: int
    computed: torch.dtype
    has_kernel: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return self.computed

    def __call__(self, x: Tensor) -> Tensor:
        if self.has_kernel and x.shape[0] < _MANY_ROWS:
            from inflight.engine.cuda.kernels.grouped import multiply  # imports triton

            taken = x.contiguous() if self.order is None else x.index_select(1, self.order)
            groups = self.scales, self.zeros, self.group_size
            y = multiply(taken, self.weight, *groups, self.bits, self.tile)
            return y if self.bias is None else y.add_(self.bias)
        if self.tile == 1:
            return self._by_tile(x)
        return F.linear(x, self.dequantized().to(x.dtype), self.bias)

    def at(self, index: int) -> Linear:

        def of(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[index]

        scales = self.scales[index]
        parts = {"bias": of(self.bias), "zeros": of(self.zeros), "order": of(self.order)}
        return replace(self, weight=self.weight[index], scales=scales, **parts)

    def dequantized(self) -> Tensor:
        """Return the dequantized weight, [out, in] float32."""
        num_inputs = self.group_size * self.scales.shape[1]
        values = unpack(self.weight, self.tile)[:, :num_inputs] if self.bits == 4 else self.weight
        is_float4 = self.scales.dtype is _POWERS
        levels = Levels(values, self.scales.float(), self.zeros, None, self.bits, is_float4)
        weight = levels.dequantized()
        return weight if self.order is None else torch.empty_like(weight).index_copy_(1, self.order, weight)

    def _by_tile(self, x: Tensor) -> Tensor:
        """Multiply with 4-bit floats, dequantizing the rows of one tile at a time.

        The two values of a byte are looked up together, in bfloat16, which represents every 4-bit float exactly. A
        tile's values stay in the processor's cache until they are multiplied.
        """
        num_outputs, num_groups = self.scales.shape
        num_inputs = self.group_size * num_groups
        y = x.new_empty((len(x), num_outputs))
        step = max(1, _NUMBERS_OF_TILE // num_inputs)
        for begin in range(0, num_outputs, step):
            rows = slice(begin, begin + step)
            values = torch.unflatten(float4_pairs(self.weight[rows])[:, :num_inputs], 1, (num_groups, -1))
            values = values.mul_(self.scales[rows, :, None].to(values.dtype)).flatten(1)
            bias = None if self.bias is None else self.bias[rows]
            y[:, rows] = F.linear(x, values.to(x.dtype), bias)
        return y


def tile_of(group_size: int, num_groups: int) -> int:
    """Return the number of inputs of a tile of the kernel; 0: the kernel does not support such groups."""
    sizes = (64,) if num_groups == 1 else (64, 32, _LEAST_GROUP)
    return next((size for size in sizes if num_groups == 1 or group_size % size == 0), 0)


def pack(levels: Tensor, tile: int) -> Tensor:
    """Pack levels 0 to 15 [out, in], two per byte: `tile` inputs in lower halves, the next `tile` in upper
    halves."""
    padded = torch.unflatten(F.pad(levels, (0, -levels.shape[1] % (2 * tile))), 1, (-1, 2, tile))
    return (padded[:, :, 0] | padded[:, :, 1] << 4).flatten(1)


def unpack(packed: Tensor, tile: int) -> Tensor:
    """Invert `pack`, including its padding."""
    both = torch.unflatten(packed, 1, (-1, tile))
    return torch.stack((both & 15, both >> 4), dim=2).flatten(1)


@dataclass
class KeepingLevels(PlainSink):
    """Makes layers that keep quantized matrices as levels and scales; other matrices become plain layers.

    Args:
        computed: Data type of activations.
        device: The model's device.
    """

    computed: torch.dtype
    device: torch.device
    _float8: Quantizing | None = None
    _tried: dict[tuple[object, ...], bool] = field(default_factory=dict[tuple[object, ...], bool])

    def __post_init__(self) -> None:
        if self.device.type == "cuda":
            try:
                self._float8 = Quantizing(FP8, self.computed, self.device)
            except ConfigError:  # the GPU does not multiply float8
                self._float8 = None

    def why_unpacked(self, matrix: GroupedMatrix, is_stack: bool) -> str:
        if not tile_of(matrix.group_size, matrix.scales.shape[1]):
            return f"groups of {matrix.group_size} inputs, not a multiple of {_LEAST_GROUP}"
        if matrix.zeros is not None and (matrix.zeros.min() < 0 or matrix.zeros.max() > 255):
            return "zero points that are not bytes"
        return ""

    def linear(self, matrix: StoredMatrix, bias: Tensor | None = None, is_gated: bool = False) -> Linear:
        if isinstance(matrix, Tensor):
            return super().linear(matrix, bias, is_gated)
        parts = self._parts(matrix)
        return self._made(matrix, parts, parts, bias)

    def stack(
        self, matrices: Iterator[StoredMatrix], shape: tuple[int, ...], bias: Tensor | None, is_gated: bool
    ) -> Linear:
        first = next(matrices)
        if isinstance(first, Tensor):
            return super().stack(chain((first,), matrices), shape, bias, is_gated)
        parts = self._parts(first)
        stacked = [None if part is None else part.new_empty((shape[0], *part.shape)) for part in parts]
        for index, matrix in enumerate(chain((first,), matrices)):
            assert isinstance(matrix, GroupedMatrix), "all matrices are quantized if the first is"
            for target, part in zip(stacked, self._parts(matrix), strict=True):
                if target is not None and part is not None:
                    target.view(part.dtype)[index].copy_(part)
        return self._made(first, parts, stacked, bias)

    def _parts(self, matrix: GroupedMatrix) -> list[Tensor | None]:
        """Return values, scales, zero points and order, on the device."""
        values = pack(matrix.values, self._tile(matrix)) if matrix.bits == 4 else matrix.values
        zeros = None if matrix.zeros is None else matrix.zeros.to(torch.uint8)
        # Copied: mapped tensors may become invalid, and expanded tensors share memory.
        scales = matrix.scales.to(_POWERS) if matrix.is_float4 else matrix.scales
        parts = (values, scales, zeros, matrix.order)
        return [None if part is None else self._moved(part) for part in parts]

    def _tile(self, matrix: GroupedMatrix) -> int:
        """Return `GroupedLinear.tile`: 1 for 4-bit floats on a CPU, where a table unpacks them in pairs, as there
        is no kernel."""
        if matrix.is_float4 and self.device.type == "cpu":
            return 1
        return tile_of(matrix.group_size, matrix.scales.shape[1])

    def _moved(self, tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device).copy_(tensor)

    def _made(
        self,
        matrix: GroupedMatrix,
        first: list[Tensor | None],
        parts: list[Tensor | None],
        bias: Tensor | None,
    ) -> Linear:
        """Make a layer of `parts`; `first` are the parts of a single matrix, with which the kernel is tried."""
        values, scales, zeros, order = parts
        assert values is not None and scales is not None, "every matrix has values and scales"
        assert first[0] is not None and first[1] is not None, "every matrix has values and scales"
        if matrix.kind is MatrixKind.FLOAT8_BY_ROW and self._float8 is not None:
            product = self._float8.product(first[0], first[1][:, 0])
            by_row = scales[..., 0].contiguous()
            return QuantizedLinear(values, bias, scales=by_row, computed=self.computed, product=product)
        one = GroupedLinear(
            first[0],
            None,
            scales=first[1],
            zeros=first[2],
            order=first[3],
            group_size=matrix.group_size,
            bits=matrix.bits,
            tile=self._tile(matrix),
            computed=self.computed,
        )
        made = replace(one, weight=values, scales=scales, zeros=zeros, order=order, bias=bias)
        return replace(made, has_kernel=self._has_kernel(matrix, one))

    def _has_kernel(self, matrix: GroupedMatrix, one: GroupedLinear) -> bool:
        """Whether the kernel multiplies matrices of this form correctly on this device; False on a CPU."""
        if self.device.type != "cuda":
            return False
        form = (*matrix.form, matrix.zeros is None)
        if form not in self._tried:
            reason = why_not(one, self.device)
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


def why_not(linear: GroupedLinear, device: torch.device) -> str:
    """Return the reason why the kernel cannot be used for a matrix with the form of `linear`; empty if it can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    tried, generator = replace(linear, has_kernel=True), torch.Generator().manual_seed(0)
    weight = linear.dequantized()
    for rows in _TRIED_ROWS if len(weight) else ():  # a rank may have no outputs
        x = torch.randn((rows, weight.shape[1]), generator=generator).to(device, linear.computed)
        try:
            found = tried(x).float()
        except Exception as error:  # an unsupported kernel may raise anything
            return str(error).split("\n")[0]
        exact = F.linear(x.float(), weight)
        error = (found - exact).abs().max().item()
        if not error <= _TOLERANCE * exact.abs().max().item():
            return f"its results of {rows} rows are wrong by {error:.3g}"
    return ""

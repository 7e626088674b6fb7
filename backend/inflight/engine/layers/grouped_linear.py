"""Linear layers whose weights stay on the device as quantized in the checkpoint, for torch's operators.

4-bit and 8-bit weights stay in 4 and 8 bits. Float8 weights with a scale per row or per matrix are multiplied
as float8 by a GPU that supports it for their shape (`quantized_linear.py`). All other weights are unpacked
inside a kernel in Triton's language, and activations are not quantized. The kernel is tried once per shape of
matrix when the model is loaded; if its results are wrong on the device, torch's operators unpack the matrix
for every product.

Created on the loading thread; the layers are called on the loop thread.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.models.decoder_weights import Linear
from inflight.models.levels import GroupedMatrix, Levels, float4_pairs

MIN_GROUP = 16
"""The smallest tile of inputs; it must divide the group size."""
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

    @classmethod
    def of(cls, matrix: GroupedMatrix, computed: torch.dtype, device: torch.device) -> GroupedLinear:
        """Copy a matrix to a device, without a bias, for products without the kernel."""
        # 4-bit floats on a CPU are unpacked in pairs by a table, as there is no kernel.
        is_by_table = matrix.is_float4 and device.type == "cpu"
        tile = 1 if is_by_table else tile_of(matrix.group_size, matrix.scales.shape[1])

        def copied(tensor: Tensor) -> Tensor:
            # Mapped tensors may become invalid, and expanded tensors share memory.
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=device).copy_(tensor)

        return cls(
            copied(pack(matrix.values, tile) if matrix.bits == 4 else matrix.values),
            scales=copied(matrix.scales.to(_POWERS) if matrix.is_float4 else matrix.scales),
            zeros=None if matrix.zeros is None else copied(matrix.zeros.to(torch.uint8)),
            order=None if matrix.order is None else copied(matrix.order),
            group_size=matrix.group_size,
            bits=matrix.bits,
            tile=tile,
            computed=computed,
        )

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
    sizes = (64,) if num_groups == 1 else (64, 32, MIN_GROUP)
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

"""Quantized matrices as levels and scales, and their conversion to numbers.

    weight[o, i] = (level[o, i] - zero[o, group of i]) * scale[o, group of i]

4-bit values may also be floats (e2m1), stored as indices into `FLOAT4`.
The computation is exact in float32, except that the product is rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import gcd

import torch
from torch import Tensor

FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The 4-bit floats (e2m1) by bit pattern: a sign, two exponent bits, one mantissa bit."""
# For each byte, the floats of its lower and its upper half: two bfloat16, which are looked up as one int32.
_PAIRS = (
    torch.tensor([(FLOAT4[byte % 16], FLOAT4[byte // 16]) for byte in range(256)], dtype=torch.bfloat16)
    .view(torch.int32)
    .flatten()
)


def float4_pairs(packed: Tensor) -> Tensor:
    """Return both 4-bit floats of each byte of uint8 [..., n], lower half first: [..., 2 * n] bfloat16."""
    found = _PAIRS.to(packed.device).index_select(0, packed.flatten().int())
    return found.view(packed.shape).view(torch.bfloat16)


class MatrixKind(Enum):
    """The format of a quantized matrix; the values are descriptions for the log."""

    INT4 = "4 bits"
    FLOAT4 = "4-bit floats"
    INT8_BY_ROW = "int8 with a scale for each row"
    INT8 = "8 bits in groups of inputs"
    INT8_ZEROS = "8 bits with zero points"
    FLOAT8_BY_ROW = "float8 with a scale for each row"
    FLOAT8 = "float8 in blocks"


@dataclass(frozen=True, slots=True)
class Levels:
    """A quantized matrix in a checkpoint's format.

    Attributes:
        values: [outputs, inputs]: uint8, int8 or float8_e4m3fn.
        scales: [outputs or 1, groups] float32.
        zeros: [outputs or 1, groups or 1]; None: all are 0.
        groups: [inputs] int64, each input's group; None: groups of equal size, of consecutive inputs.
        bits: 4 or 8; with 4, values are 0 to 15.
        is_float4: Whether values are indices into `FLOAT4`; scales are then powers of 2, and there are no
            zero points.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor | None
    groups: Tensor | None
    bits: int
    is_float4: bool = False

    @property
    def group_size(self) -> int:
        """Number of inputs in a group, if `groups` is None."""
        return self.values.shape[1] // self.scales.shape[1]

    def dequantized(self) -> Tensor:
        """Return the represented numbers, [outputs, inputs] float32."""
        if self.is_float4:
            table = torch.tensor(FLOAT4, device=self.values.device)
            weight = table.index_select(0, self.values.flatten().int()).view(self.values.shape)
        else:
            weight = self.values.float()
        num_outputs, num_inputs = weight.shape
        if self.groups is not None:
            if self.zeros is not None:
                weight.sub_(self._each(self.zeros)[:, self.groups])
            return weight.mul_(self.scales[:, self.groups])
        of_groups = weight.contiguous().view(num_outputs, self.scales.shape[1], -1)
        if self.zeros is not None:
            of_groups.sub_(self.zeros[..., None])
        of_groups.mul_(self.scales[..., None])
        return of_groups.view(num_outputs, num_inputs)

    def part(self, rows: tuple[int, ...], columns: tuple[int, int]) -> Levels:
        """Return the levels of the outputs in slice(*rows) and the inputs in slice(*columns)."""
        here = slice(*rows)
        scales, zeros, groups = self.scales, self.zeros, self.groups
        if columns != (0, self.values.shape[1]):
            groups = self._group_of_each()[slice(*columns)]
        return Levels(
            self.values[here, slice(*columns)],
            scales if len(scales) == 1 else scales[here],
            zeros if zeros is None or len(zeros) == 1 else zeros[here],
            groups,
            self.bits,
            self.is_float4,
        )

    def grouped(self) -> GroupedMatrix:
        """Return the matrix with each group's inputs side by side, in groups of equal size; groups are split if
        necessary."""
        num_outputs, num_inputs = self.values.shape
        scales = self.scales.expand(num_outputs, -1)
        zeros = None if self.zeros is None else self._each(self.zeros).expand(num_outputs, -1)
        if self.groups is None:
            size = num_inputs // scales.shape[1]
            return GroupedMatrix(self.values, scales, zeros, size, None, self.bits, self.is_float4)
        of_inputs, order = self.groups.sort(stable=True)
        ids, counts = _count_groups(of_inputs)
        size = gcd(*map(int, counts))
        taken = ids.repeat_interleave(counts // size)
        is_sorted = torch.equal(order, torch.arange(num_inputs))
        return GroupedMatrix(
            self.values if is_sorted else self.values.view(torch.uint8)[:, order].view(self.values.dtype),
            scales[:, taken],
            None if zeros is None else zeros[:, taken],
            size,
            None if is_sorted else order,
            self.bits,
            self.is_float4,
        )

    def _group_of_each(self) -> Tensor:
        if self.groups is not None:
            return self.groups
        num_inputs, num_groups = self.values.shape[1], self.scales.shape[1]
        return torch.arange(num_inputs) // (num_inputs // num_groups)

    def _each(self, numbers: Tensor) -> Tensor:
        return numbers.expand(-1, self.scales.shape[1])


@dataclass(frozen=True, slots=True)
class GroupedMatrix:
    """A quantized matrix with groups of equal size, which kernels can multiply directly.

    Attributes:
        values: [outputs, inputs], as `Levels.values`.
        scales: [outputs, groups] float32.
        zeros: [outputs, groups]; None: all are 0.
        group_size: Number of inputs in a group; they are side by side.
        order: [inputs] int64, the input of each column of `values`; None: columns are in the order of inputs.
        bits: As in `Levels`.
        is_float4: As in `Levels`.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor | None
    group_size: int
    order: Tensor | None
    bits: int
    is_float4: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Number of outputs and inputs."""
        return self.values.shape[0], self.values.shape[1]

    @property
    def kind(self) -> MatrixKind:
        """The format of the values and scales."""
        is_by_row = self.zeros is None and self.scales.shape[1] == 1
        if self.bits == 4:
            return MatrixKind.FLOAT4 if self.is_float4 else MatrixKind.INT4
        if self.values.is_floating_point():
            return MatrixKind.FLOAT8_BY_ROW if is_by_row else MatrixKind.FLOAT8
        if self.zeros is not None:
            return MatrixKind.INT8_ZEROS
        return MatrixKind.INT8_BY_ROW if is_by_row else MatrixKind.INT8

    @property
    def form(self) -> tuple[MatrixKind, int, bool, tuple[int, int]]:
        """The properties that all matrices of a stack must share: kind, group size, whether there is an order,
        shape."""
        return self.kind, self.group_size, self.order is None, self.shape

    def dequantized(self) -> Tensor:
        """Return the represented numbers, [outputs, inputs] float32, in the order of the inputs."""
        weight = Levels(self.values, self.scales, self.zeros, None, self.bits, self.is_float4).dequantized()
        return weight if self.order is None else torch.empty_like(weight).index_copy_(1, self.order, weight)

    def in_groups_of(self, size: int) -> GroupedMatrix:
        """Return this matrix in groups of `size` inputs, a divisor of the current group size."""
        times = self.group_size // size
        if times == 1:
            return self
        scales = self.scales.repeat_interleave(times, 1)
        zeros = None if self.zeros is None else self.zeros.repeat_interleave(times, 1)
        return replace(self, scales=scales, zeros=zeros, group_size=size)


def _count_groups(of_inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the groups in `of_inputs`, which is sorted, and the number of inputs in each group."""
    # torch declares no types for this method.
    return of_inputs.unique_consecutive(return_counts=True)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def stack_rows(matrices: Sequence[GroupedMatrix]) -> GroupedMatrix | None:
    """Concatenate matrices along the outputs; return None if they differ in more than the size of their groups."""
    if len(matrices) == 1:
        return matrices[0]
    first = matrices[0]
    for other in matrices[1:]:
        is_same_order = (first.order is None) == (other.order is None)
        if first.order is not None and other.order is not None:
            is_same_order = torch.equal(first.order, other.order)
        is_same_kind = (first.bits, first.is_float4, first.values.dtype, first.zeros is None) == (
            other.bits, other.is_float4, other.values.dtype, other.zeros is None,
        )  # fmt: skip
        if not (is_same_order and is_same_kind):
            return None
    size = gcd(*(matrix.group_size for matrix in matrices))
    parts = [matrix.in_groups_of(size) for matrix in matrices]
    return GroupedMatrix(
        torch.cat([part.values.view(torch.uint8) for part in parts]).view(first.values.dtype),
        torch.cat([part.scales for part in parts]),
        None if first.zeros is None else torch.cat([part.zeros for part in parts if part.zeros is not None]),
        size,
        first.order,
        first.bits,
        first.is_float4,
    )

"""Products with 8-bit weights, int8 or float8, whose levels are converted to half precision inside the kernel.

Weights are read once for up to 256 rows, so with few rows a product takes half as long as with half-precision
weights. The order in which a result is summed does not depend on the other rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from inflight.engine.cuda.kernels.language import Value, constexpr, jit, tl
from inflight.engine.cuda.kernels.launching import launch

FEW_ROWS = 32
"""Up to this many rows, `float8_product` is faster on an H100 than torch's operator, which is made for many
rows."""

_NARROW = 8192  # outputs; with tiles of 32, a matrix with fewer does not fill a GPU's processors twice
_PARTS = 4  # into which inputs are divided, for matrices with few outputs
_SUMMED = 256  # outputs per program of `_add_parts`


class Tiling(NamedTuple):
    """The division of a product into tiles.

    Attributes:
        rows: Rows per tile.
        outputs: Outputs per tile.
        inputs: Inputs that a program multiplies at a time.
        parts: Number of parts of a tile's inputs, which are summed separately before their sums are added.
        is_shared: Whether each part has its own program; then another kernel adds their sums.
        num_warps: Warps per program.
        num_stages: Pipeline stages.
    """

    rows: int
    outputs: int
    inputs: int
    parts: int
    is_shared: bool
    num_warps: int
    num_stages: int


@jit(do_not_specialize=["num_rows"])  # one compilation for all numbers of rows
def _multiply_levels(
    x: Value, levels: Value, scales: Value, row_scales: Value, results: Value, num_rows: Value,
    num_outputs: Value, size: Value, x_row: Value, ROWS: constexpr, OUTPUTS: constexpr, INPUTS: constexpr,
    PARTS: constexpr, IS_SHARED: constexpr, HAS_ROW_SCALES: constexpr,
):  # fmt: skip
    """Compute a tile of results [num_rows, num_outputs]: x times levels [num_outputs, size], times scales.

    Grid: tiles of rows, tiles of outputs and, with IS_SHARED, parts; `results` are then the parts' unscaled sums,
    [PARTS, num_rows, num_outputs] float32. With HAS_ROW_SCALES x is float8, and its rows have scales too.
    Levels are converted in registers, and are the left operand of the product: on some GPUs the right
    operand cannot come from registers.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    outputs = tl.program_id(1).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    inputs = tl.arange(0, INPUTS)
    is_row, is_output = rows < num_rows, outputs < num_outputs
    x_places = x + rows[None, :] * x_row + inputs[:, None]
    level_places = levels + outputs[:, None] * size + inputs[None, :]
    is_result = is_output[:, None] & is_row[None, :]
    places = rows[None, :] * num_outputs + outputs[:, None]
    part_size = tl.cdiv(tl.cdiv(size, 256), PARTS) * 256  # independent of INPUTS
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for part in range(tl.program_id(2), PARTS, tl.num_programs(2)):
        added = tl.zeros([OUTPUTS, ROWS], tl.float32)
        for first in range(part * part_size, tl.minimum((part + 1) * part_size, size), INPUTS):
            inside = inputs < size - first
            is_level = is_output[:, None] & inside[None, :]
            is_number = is_row[None, :] & inside[:, None]
            if HAS_ROW_SCALES:
                # Half precision represents every float8, and the product of two float8 is exact in float32.
                some_levels = tl.load(level_places + first, mask=is_level, other=0.0)
                some_x = tl.load(x_places + first, mask=is_number, other=0.0).to(tl.float16)
            else:
                some_levels = tl.load(level_places + first, mask=is_level, other=0)
                some_x = tl.load(x_places + first, mask=is_number, other=0.0)
            added = tl.dot(some_levels.to(some_x.dtype), some_x, added, input_precision="ieee")
        if IS_SHARED:
            tl.store(results + part * num_rows * num_outputs + places, added, mask=is_result)
        else:
            total += added
    if not IS_SHARED:
        total = total * tl.load(scales + outputs, mask=is_output, other=0.0)[:, None]
        if HAS_ROW_SCALES:
            total = total * tl.load(row_scales + rows, mask=is_row, other=0.0)[None, :]
        tl.store(results + places, total.to(results.dtype.element_ty), mask=is_result)


@jit(do_not_specialize=["num_rows"])
def _add_parts(
    sums: Value, scales: Value, results: Value, num_rows: Value, num_outputs: Value, PARTS: constexpr,
    BLOCK: constexpr,
):  # fmt: skip
    """Add the sums of parts to results [num_rows, num_outputs]. Grid: rows, blocks of outputs."""
    row = tl.program_id(0).to(tl.int64)
    outputs = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_output = outputs < num_outputs
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(sums + (part * num_rows + row) * num_outputs + outputs, mask=is_output, other=0.0)
    total = total * tl.load(scales + outputs, mask=is_output, other=0.0)
    tl.store(results + row * num_outputs + outputs, total.to(results.dtype.element_ty), mask=is_output)


def int8_product(x: Tensor, levels: Tensor, scales: Tensor) -> Tensor:
    """Return x times the quantized weights, [rows, outputs] in x's dtype.

    Args:
        x: [rows, inputs], the last dimension contiguous.
        levels: [outputs, inputs] int8, contiguous.
        scales: [outputs] float32.
    """
    num_rows, num_outputs = len(x), len(levels)
    results = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    if not (num_rows and num_outputs):
        return results
    tiling = int8_tiling(num_rows, num_outputs)
    if not tiling.is_shared:
        _launch(x, levels, scales, None, results, tiling)
        return results
    sums = torch.empty((tiling.parts, num_rows, num_outputs), dtype=torch.float32, device=x.device)
    _launch(x, levels, scales, None, sums, tiling)
    launch(
        _add_parts, (num_rows, -(-num_outputs // _SUMMED)), sums, scales, results, num_rows, num_outputs,
        PARTS=tiling.parts, BLOCK=_SUMMED, num_warps=2,
    )  # fmt: skip
    return results


def float8_product(
    x: Tensor, row_scales: Tensor, levels: Tensor, scales: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return the product of two quantized matrices, [rows, outputs] in `dtype`.

    Args:
        x: [rows, inputs] float8_e4m3fn, the last dimension contiguous; at most FEW_ROWS rows.
        row_scales: [rows] float32, contiguous.
        levels: [outputs, inputs] float8_e4m3fn, contiguous.
        scales: [outputs] float32.
        dtype: Data type of the results.
    """
    num_rows, num_outputs = len(x), len(levels)
    results = torch.empty((num_rows, num_outputs), dtype=dtype, device=x.device)
    if num_rows and num_outputs:
        _launch(x, levels, scales, row_scales, results, float8_tiling(num_rows, num_outputs))
    return results


def _launch(
    x: Tensor, levels: Tensor, scales: Tensor, row_scales: Tensor | None, results: Tensor, tiling: Tiling
) -> None:
    num_rows, (num_outputs, size) = len(x), levels.shape
    launch(
        _multiply_levels,
        (-(-num_rows // tiling.rows), -(-num_outputs // tiling.outputs), tiling.parts if tiling.is_shared else 1),
        x, levels, scales, scales if row_scales is None else row_scales, results, num_rows, num_outputs, size,
        x.stride(0), ROWS=tiling.rows, OUTPUTS=tiling.outputs, INPUTS=tiling.inputs, PARTS=tiling.parts,
        IS_SHARED=tiling.is_shared, HAS_ROW_SCALES=row_scales is not None, num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )  # fmt: skip


def int8_tiling(num_rows: int, num_outputs: int) -> Tiling:
    """Return the tiling of `int8_product`: the fastest tiling tried on an H100 with matrices of an 8B model.

    With few rows, reading weights dominates, so many reads are in flight. With few outputs, several programs share
    the inputs of each tile, as otherwise too few warps would convert levels.
    """
    if num_outputs <= _NARROW:
        # The same number of parts for any number of rows, so that each row's sum is made in the same order.
        if num_rows <= 32:
            rows, outputs = (16, 32) if num_rows <= 16 else (32, 64)
            return Tiling(rows, outputs, 256, _PARTS, True, 2, 3)
        return Tiling(64 if num_rows <= 128 else 128, 64, 128, _PARTS, False, 4, 3)
    if num_rows <= 32:
        return Tiling(16 if num_rows <= 16 else 32, 64, 256, 1, False, 2, 3)
    if num_rows <= 64:
        return Tiling(64, 64, 128, 1, False, 4, 3)
    return Tiling(128 if num_rows <= 128 else 256, 128, 64, 1, False, 8, 3)


def float8_tiling(num_rows: int, num_outputs: int) -> Tiling:
    """Return the tiling of `float8_product`, chosen by measurements like `int8_tiling`."""
    rows = 16 if num_rows <= 16 else 32
    if num_outputs <= _NARROW:
        return Tiling(rows, 16, 512, 1, False, 2, 3)
    return Tiling(rows, 32, 256, 1, False, 2, 3)

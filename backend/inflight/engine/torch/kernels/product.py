"""Products with int8 weights, whose levels become activations' dtype on the way to the multiplication.

Weights are read once for up to 128 rows, so few rows take half the time of half-precision weights. A result's sum
is made in one order, whatever the other rows are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from inflight.engine.torch.kernels.launching import launch

_MANY_OUTPUTS = 16_384  # which fill a GPU with tiles of twice as many
_MOST_ROWS = 128  # of a tile


@triton.jit(do_not_specialize=["num_rows"])  # compiled for no number of rows alone
def _int8_product(
    x, levels, scales, results, num_rows, num_outputs, size, x_row,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """A tile of results [num_rows, num_outputs]: x times levels [num_outputs, size], times scales.

    Grid: tiles of rows, tiles of outputs. Levels are the left side of the product: only that one may come from
    registers on every processor, where they are converted.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    outputs = tl.program_id(1).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    inputs = tl.arange(0, INPUTS)
    is_row, is_output = rows < num_rows, outputs < num_outputs
    x_places = x + rows[None, :] * x_row + inputs[:, None]
    level_places = levels + outputs[:, None] * size + inputs[None, :]
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for first in range(0, size, INPUTS):
        inside = inputs < size - first
        some_levels = tl.load(level_places + first, mask=is_output[:, None] & inside[None, :], other=0)
        some_x = tl.load(x_places + first, mask=is_row[None, :] & inside[:, None], other=0.0)
        total = tl.dot(some_levels.to(some_x.dtype), some_x, total, input_precision="ieee")
    factors = tl.load(scales + outputs, mask=is_output, other=0.0)
    result = (total * factors[:, None]).to(results.dtype.element_ty)
    places = results + rows[None, :] * num_outputs + outputs[:, None]
    tl.store(places, result, mask=is_output[:, None] & is_row[None, :])


def int8_product(x: Tensor, levels: Tensor, scales: Tensor) -> Tensor:
    """[rows, outputs] in x's dtype: x times the weights that levels and scales stand for.

    Args:
        x: [rows, inputs], the last dimension contiguous.
        levels: [outputs, inputs] int8, contiguous.
        scales: [outputs] float32.
    """
    num_rows, (num_outputs, size) = len(x), levels.shape
    results = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    if not (num_rows and num_outputs):
        return results
    rows, outputs, inputs, num_warps = tiling(num_rows, num_outputs)
    launch(
        _int8_product, (-(-num_rows // rows), -(-num_outputs // outputs)),
        x, levels, scales, results, num_rows, num_outputs, size, x.stride(0),
        ROWS=rows, OUTPUTS=outputs, INPUTS=inputs, num_warps=num_warps, num_stages=4,
    )  # fmt: skip
    return results


def tiling(num_rows: int, num_outputs: int) -> tuple[int, int, int, int]:
    """Rows, outputs and inputs of a tile, and the warps that compute it.

    With few rows weights are waited for: many of them are on their way, and each is converted by one warp alone.
    """
    if num_rows <= 16:
        return (16, 64, 256, 4) if num_outputs >= _MANY_OUTPUTS else (16, 32, 256, 2)
    if num_rows <= 64:
        return 32 if num_rows <= 32 else 64, 64, 128, 4
    return _MOST_ROWS, 128, 64, 8

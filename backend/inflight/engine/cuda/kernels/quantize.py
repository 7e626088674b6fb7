"""Quantizes rows to float8, each with its own scale, in one kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.engine.cuda.kernels.language import Value, constexpr, jit, tl
from inflight.engine.cuda.kernels.launching import launch, power_of_two

_OF_LARGEST = 1 / 448  # largest float8_e4m3fn


@jit()
def _quantize_rows(
    x: Value, levels: Value, scales: Value, x_row: Value, size: Value, OF_LARGEST: constexpr,
    MIN_SCALE: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """Compute a row's levels and its scale. Grid: rows.

    Multiplies by OF_LARGEST, as Triton's `/` is at times wrong by a bit, which may change a level.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    numbers = tl.load(x + row * x_row + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(numbers), axis=0) * OF_LARGEST, MIN_SCALE)
    tl.store(scales + row, scale)
    tl.store(
        levels + row * size + columns, tl.div_rn(numbers, scale).to(levels.dtype.element_ty), mask=inside
    )


def quantize_float8(x: Tensor, min_scale: float) -> tuple[Tensor, Tensor]:
    """Return float8_e4m3fn levels [rows, size], and a float32 scale per row; a row's largest value becomes 448.

    Args:
        x: [rows, size], the last dimension contiguous.
        min_scale: The scale of rows of zeros.
    """
    num_rows, size = x.shape
    levels = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    block = power_of_two(size)
    if num_rows:
        launch(
            _quantize_rows, (num_rows,), x, levels, scales, x.stride(0), size,
            OF_LARGEST=_OF_LARGEST, MIN_SCALE=min_scale, BLOCK=block, num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
    return levels, scales

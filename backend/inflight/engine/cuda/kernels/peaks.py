"""The highest logit of each row, for sampling: two kernels, which read each row once."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inflight.engine.cuda.kernels.language import Value, constexpr, jit, tl
from inflight.engine.cuda.kernels.launching import launch, power_of_two
from inflight.sampling.nan_check import Peaks
from inflight.sampling.row_kernels import RowKernels
from inflight.sampling.rows import Rows, select_rows

_BLOCK = 4096  # logits per program


@jit()
def _peak(numbers: Value, places: Value) -> tuple[Value, Value]:
    """Return the highest of `numbers` and the lowest of its `places`; NaN and its place if there is any NaN."""
    is_nan = numbers != numbers
    ordered = tl.where(is_nan, float("inf"), numbers)
    has_nan = tl.max(is_nan.to(tl.int32), axis=0) > 0
    peak = tl.max(ordered, axis=0)
    candidates = tl.where(has_nan, is_nan, ordered == peak)
    place = tl.min(tl.where(candidates, places, 0x7FFFFFFF), axis=0)
    return tl.where(has_nan, float("nan"), peak), place


@jit()
def _peaks_of_blocks(
    logits: Value, highest: Value, tokens: Value, row_size: Value, size: Value, BLOCK: constexpr,
):  # fmt: skip
    """Find the highest logit of a block of a row (NaN if it has one) and the first token that has it.

    Grid: rows, blocks; results [rows, blocks].
    """
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    columns = first + tl.arange(0, BLOCK)
    numbers = tl.load(logits + row * row_size + columns, mask=columns < size, other=float("-inf"))
    peak, place = _peak(numbers, columns)
    at = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(highest + at, peak)
    tl.store(tokens + at, place.to(tl.int64))


@jit()
def _peaks_of_rows(
    block_highest: Value, block_tokens: Value, highest: Value, tokens: Value, num_blocks: Value,
    BLOCKS: constexpr,
):  # fmt: skip
    """Combine the results of a row's blocks. Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, BLOCKS)
    inside = blocks < num_blocks
    numbers = tl.load(block_highest + row * num_blocks + blocks, mask=inside, other=float("-inf"))
    places = tl.load(block_tokens + row * num_blocks + blocks, mask=inside, other=0x7FFFFFFF)
    peak, place = _peak(numbers, places)
    tl.store(highest + row, peak)
    tl.store(tokens + row, place.to(tl.int64))


def find_peaks(logits: Tensor) -> Peaks:
    """Like `nan_check.find_peaks`, for logits [rows, vocab_size] float32, the last dimension contiguous."""
    num_rows, size = logits.shape
    num_blocks = -(-size // _BLOCK)
    device = logits.device
    of_blocks, of_rows = (
        (torch.empty(shape, device=device), torch.empty(shape, dtype=torch.int64, device=device))
        for shape in ((num_rows, num_blocks), (num_rows,))
    )
    if num_rows:
        launch(
            _peaks_of_blocks, (num_rows, num_blocks), logits, *of_blocks, logits.stride(0), size, BLOCK=_BLOCK
        )
        launch(_peaks_of_rows, (num_rows,), *of_blocks, *of_rows, num_blocks, BLOCKS=power_of_two(num_blocks))
    return Peaks(*of_rows)


class KernelRowKernels(RowKernels):
    """`RowKernels` on a GPU: the highest logits by this module's kernels, everything else by torch's operators."""

    def find_peaks(self, logits: Tensor) -> Peaks:
        return find_peaks(logits)

    def find_likeliest(self, rows: Rows, indices: NDArray[np.int64]) -> Tensor:
        return find_peaks(select_rows(rows.logits, indices)).tokens

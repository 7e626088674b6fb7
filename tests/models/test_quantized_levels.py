"""Levels of quantized matrices, where another program can dequantize them for comparison."""

from __future__ import annotations

import pytest
import torch
from transformers.integrations import finegrained_fp8

from inflight.models.dequantize import scaled_levels
from inflight.models.levels import MatrixKind, stack_rows


def float8(rows: int, columns: int) -> torch.Tensor:
    """Return all 254 finite values of the format, in some order."""
    bits = torch.arange(rows * columns).remainder(256).to(torch.uint8)
    levels = bits[torch.randperm(len(bits), generator=torch.Generator().manual_seed(0))].view(rows, columns)
    levels[(levels & 127) == 127] = 3  # NaN
    return levels.view(torch.float8_e4m3fn)


@pytest.mark.parametrize("block", [(32, 16), (48, 40), (64, 32), None])
def test_float8_is_dequantized_as_by_transformers(block: tuple[int, int] | None) -> None:
    levels = float8(64, 96)
    shape = () if block is None else (-(-64 // block[0]), -(-96 // block[1]))
    scales = torch.rand(shape, generator=torch.Generator().manual_seed(1)) + 0.1
    theirs = finegrained_fp8._dequantize_fp8_weight(
        levels, scales, None if block is None else list(block), torch.float32
    )
    found = scaled_levels(levels, scales, block)
    assert torch.equal(found.dequantized(), theirs)
    assert torch.equal(found.grouped().dequantized(), theirs)
    assert found.grouped().kind is (MatrixKind.FLOAT8_BY_ROW if block is None else MatrixKind.FLOAT8)
    parts = [found.part(rows, (8, 72)).grouped() for rows in ((0, 10), (10, 64))]
    stacked = stack_rows(parts)
    assert stacked is not None and torch.equal(stacked.dequantized(), theirs[:, 8:72])

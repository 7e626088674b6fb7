"""The highest values of long rows, and the order of equal ones."""

from __future__ import annotations

import pytest
import torch

from inflight.sampling.argmax import reduce_blocks, top_indices


@pytest.mark.parametrize("width", [1, 63, 1000, 4096, 10_007])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.2, 1.0])
@pytest.mark.parametrize("distinct", [1, 3, 40, 100_000])
def test_the_highest_values_are_those_of_a_stable_sort(width: int, share: float, distinct: int) -> None:
    """Few distinct values, with 0.0, -0.0 and -inf, give ties inside blocks, between them and at the edge."""
    count = max(1, round(share * width))
    generator = torch.Generator().manual_seed(width + distinct)
    values = torch.randint(-distinct, distinct + 1, (3, width), generator=generator) / 8.0
    values[1, torch.randperm(width, generator=generator)[: width // 2]] = -0.0
    values[2, torch.randperm(width, generator=generator)[: width - width // 300]] = -torch.inf
    expected = values.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    assert torch.equal(top_indices(values, count), expected)


@pytest.mark.parametrize("width", [5, 64, 130])
def test_rows_need_not_be_multiples_of_the_block_size(width: int) -> None:
    values = torch.arange(width, dtype=torch.float32)[None]
    sums = reduce_blocks(values, 64, torch.sum)
    assert sums.tolist() == [
        [float(sum(range(first, min(first + 64, width)))) for first in range(0, width, 64)]
    ]

"""torch.distributed between ranks under mpirun: over gloo, and over NCCL with two GPUs.

By default, test_mpi checks gloo on its four ranks.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.ranks.mpirun import run_ranks
from tests.ranks.torch_collectives_program import DTYPES, FAILED, NUM_HIDDENS, hidden, mine
from tests.tiers import with_all

_MODULE = "tests.ranks.torch_collectives_program"
_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices"),
]


def reports(said: str) -> list[dict[str, Any]]:
    """Return the reports in the output of all ranks, by rank."""
    ranks = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    return sorted(ranks, key=lambda rank: rank["rank"])


@pytest.mark.parametrize(
    ("tp_size", "pp_size", "device"),
    [
        *with_all([(2, 1, "cpu"), (1, 3, "cpu")], []),
        pytest.param(2, 1, "cuda", marks=_GPU),
        pytest.param(1, 2, "cuda", marks=_GPU),
    ],
)
def test_sums_gathers_and_hidden_states_are_those_of_plain_tensors(
    tp_size: int, pp_size: int, device: str
) -> None:
    said = run_ranks(tp_size * pp_size, _MODULE, str(tp_size), str(pp_size), device)
    check(reports(said), tp_size, pp_size)


def check(ranks: list[dict[str, Any]], tp_size: int, pp_size: int) -> None:
    assert [rank["rank"] for rank in ranks] == list(range(tp_size * pp_size))
    for rank in ranks:
        stage, place = divmod(rank["rank"], tp_size)
        assert rank["size"] == tp_size
        check_collectives(rank, range(stage * tp_size, (stage + 1) * tp_size))
        expected = [
            None if index == FAILED else (hidden(place, index) + stage).tolist()
            for index in range(NUM_HIDDENS)
        ]
        assert rank["passed on"] == (expected if pp_size > 1 else [])


def check_collectives(said: dict[str, Any], group: range) -> None:
    for dtype in DTYPES:
        total = sum(mine(rank, dtype, 5, 4).double() for rank in group)
        together = torch.cat([mine(rank, dtype, 2, 3, 4).double() for rank in group], dim=-1)
        assert said[dtype] == [total.tolist(), together.tolist()]

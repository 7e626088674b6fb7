"""Messages between ranks over MPI and over torch.distributed, under one mpirun."""

from __future__ import annotations

import pytest

from tests.ranks import test_torch_collectives as over_torch
from tests.ranks.mpirun import run_ranks
from tests.tiers import with_all


@pytest.mark.parametrize(
    "network",
    with_all([pytest.param(False, id="shared memory"), pytest.param(True, id="tcp")], [True]),
)
def test_messages_arrive_as_they_were_sent(network: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a network large messages need calls of MPI on both sides."""
    if network:
        for name, value in (("pml", "ob1"), ("btl", "tcp,self"), ("btl_tcp_if_include", "lo")):
            monkeypatch.setenv(f"OMPI_MCA_{name}", value)
    said = run_ranks(4, "tests.ranks.mpi_program")
    content = [line for line in said.splitlines() if not line.startswith("{")]
    assert sorted(content) == [f"rank {rank} is content" for rank in range(4)]
    over_torch.check(over_torch.reports(said), 2, 2)

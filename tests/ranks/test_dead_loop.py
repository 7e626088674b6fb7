"""A loop that dies on one rank only: all ranks are notified, wherever they wait."""

from __future__ import annotations

import pytest

from tests.ranks.mpirun import TIMEOUT_S, start_ranks


@pytest.mark.parametrize(("moment", "answer"), [("busy", "UNAVAILABLE"), ("idle", "well")])
def test_the_rank_of_a_dead_loop_is_lost(moment: str, answer: str) -> None:
    """Rank 0's loop dies in a callback; rank 1 waits in the next broadcast, or sleeps."""
    with start_ranks(2, "tests.ranks.dying_program", moment) as ranks:
        said, complained = ranks.communicate(timeout=TIMEOUT_S)
    lines = set(said.splitlines())
    assert f"answered {answer}" in lines, complained
    assert "rank 0: rank 0 of 2 (this process) is lost: it is no longer in lockstep with the others" in lines
    (told,) = (line for line in lines if line.startswith("rank 1: "))
    assert told.startswith("rank 1: rank 0 of 2 (") and "is lost" in told

"""A rank that is killed or stopped asleep, in a broadcast or in a collective: each request has one final response.

Rank 0 survives, as in leader mode; it answers on a thread outside MPI while its loop is inside.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading

import pytest

from tests.ranks.mpirun import start_ranks
from tests.tiers import with_all

DEADLINE_S = 180.0


@pytest.mark.parametrize("number", with_all(["SIGKILL", "SIGSTOP"], ["SIGKILL"]))
@pytest.mark.parametrize("place", with_all(["asleep", "broadcast", "collective"], ["broadcast"]))
def test_every_request_is_answered_although_the_loop_waits_in_mpi(place: str, number: str) -> None:
    program = "tests.ranks.losing_program"
    with start_ranks(2, program, place, number, mpirun_arguments=["--enable-recovery"]) as ranks:
        deadline = threading.Timer(DEADLINE_S, ranks.kill)
        deadline.start()
        lines = []
        assert ranks.stdout is not None
        for line in ranks.stdout:
            lines.append(line.strip())
            if line.startswith(("finals", "asleep")) and _is_complete(lines):
                _end_stopped(lines)
        deadline.cancel()
    (lost,) = (line for line in lines if line.startswith("lost: "))
    assert "rank 1 of 2" in lost
    expected = "its process has ended" if number == "SIGKILL" else "has been silent for"
    assert expected in lost
    if place == "asleep":
        assert "asleep UNAVAILABLE" in lines
    else:
        assert lines.count("finals 1 UNAVAILABLE") == 3


def _is_complete(lines: list[str]) -> bool:
    return lines[-1].startswith("asleep") or sum(line.startswith("finals") for line in lines) == 3


def _end_stopped(lines: list[str]) -> None:
    """Kill a stopped rank, for which mpirun would wait."""
    (pid,) = (int(line.split()[1]) for line in lines if line.startswith("pid "))
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)

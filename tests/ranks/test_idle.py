"""Ranks with nothing to do cost nothing, and still come when they are woken."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tests.ranks.mpirun import start_ranks

_IDLE_S = 5.0


def cpu_s(pid: int) -> float:
    """What the process has used of the cores since it began, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_idle_ranks_use_less_than_a_hundredth_of_a_core_and_wake_up():
    with start_ranks(3, "tests.ranks.idle_program") as ranks:
        try:
            said = [ranks.stdout.readline().split() for _ in range(3)]
            assert [word for word, _ in said] == ["asleep"] * 3, ranks.stderr.read()
            pids = [int(pid) for _, pid in said]
            time.sleep(1.0)  # what follows upon the start
            before = [cpu_s(pid) for pid in pids]
            time.sleep(_IDLE_S)
            used = [cpu_s(pid) - earlier for pid, earlier in zip(pids, before)]
            assert max(used) < 0.01 * _IDLE_S, used
            said, complained = ranks.communicate("go\ngo\nend\n", timeout=60)
        except BaseException:
            ranks.terminate()
            raise
    assert sorted(said.splitlines()) == ["followed 0"] * 2 + ["followed 1"] * 2
    assert (ranks.returncode, complained) == (0, "")

"""Idle ranks sleep, and resume when they are woken."""

from __future__ import annotations

import time
from pathlib import Path

from tests.ranks.mpirun import start_ranks

_IDLE_S = 2.0
_MAX_TRIES = 10
_MAX_WAKES = 100
"""Bound of wakes of all threads of a rank.

Heartbeats come once a second; a polling loop wakes thousands of times.
"""


def num_wakes(pid: int) -> int:
    """Count how often the threads of a process have gone to sleep and come back."""
    texts = [file.read_text() for file in Path(f"/proc/{pid}/task").glob("*/status")]
    return sum(int(text.partition("\nvoluntary_ctxt_switches:")[2].split()[0]) for text in texts)


def test_idle_ranks_sleep_and_wake_up():
    with start_ranks(3, "tests.ranks.idle_program") as ranks:
        try:
            said = [ranks.stdout.readline().split() for _ in range(3)]
            assert [word for word, _ in said] == ["asleep"] * 3, ranks.stderr.read()
            pids = [int(pid) for _, pid in said]
            for _ in range(_MAX_TRIES):  # the start may not have finished
                before = [num_wakes(pid) for pid in pids]
                time.sleep(_IDLE_S)
                wakes = [num_wakes(pid) - earlier for pid, earlier in zip(pids, before)]
                if max(wakes) < _MAX_WAKES:
                    break
            assert max(wakes) < _MAX_WAKES, wakes
            before = [num_wakes(pid) for pid in pids]
            time.sleep(_IDLE_S)
            wakes = [num_wakes(pid) - earlier for pid, earlier in zip(pids, before)]
            assert max(wakes) < _MAX_WAKES, wakes
            said, complained = ranks.communicate("go\ngo\nend\n", timeout=60)
        except BaseException:
            ranks.terminate()
            raise
    assert sorted(said.splitlines()) == ["followed 0"] * 2 + ["followed 1"] * 2
    assert (ranks.returncode, complained) == (0, "")

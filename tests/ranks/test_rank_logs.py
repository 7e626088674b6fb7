"""Ranks write their log to mpirun's stderr if it is a pipe, and otherwise to mpirun, which copies it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from inflight.ranks.launch import LOG_PAST_MPIRUN, find_mpirun

RANKS = 2
TIMEOUT_S = 120
SHOW_STDERR = LOG_PAST_MPIRUN + "readlink /proc/$$/fd/2 >&2"


def run(stderr: int) -> bytes:
    """Have each rank write the name of its stderr to its stderr; return what mpirun's stderr pipe got."""
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    command = [find_mpirun(), *as_root, "--oversubscribe", "-n", str(RANKS), "sh", "-c", SHOW_STDERR]
    return subprocess.run(command, stderr=stderr, check=True, timeout=TIMEOUT_S).stderr


def test_ranks_write_to_the_pipe_that_is_mpiruns_stderr() -> None:
    read_end, write_end = os.pipe()
    with open(read_end, "rb") as pipe:
        name = os.readlink(f"/proc/self/fd/{read_end}")
        run(write_end)
        os.close(write_end)
        assert pipe.read().decode().splitlines() == [name] * RANKS


def test_mpirun_copies_the_log_into_a_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as file:
        run(file.fileno())
    names = path.read_text().splitlines()
    assert len(set(names)) == RANKS and all(name.startswith("pipe:") for name in names)

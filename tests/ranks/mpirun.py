"""Start of a test's ranks on this machine, each with one thread."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from inflight.ranks.launch import find_mpirun

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 240


def start_ranks(
    num_ranks: int, module: str, *arguments: str, mpirun_arguments: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """Start `python -m module arguments` on several ranks, with pipes to rank 0 and from all outputs."""
    command = [find_mpirun(), "--allow-run-as-root", "--oversubscribe", *mpirun_arguments]
    return subprocess.Popen(
        [*command, "-n", str(num_ranks), sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_ranks(num_ranks: int, module: str, *arguments: str) -> str:
    """Run the ranks and return their output. Raises AssertionError with their errors if any failed."""
    with start_ranks(num_ranks, module, *arguments) as ranks:
        try:
            said, complained = ranks.communicate(timeout=TIMEOUT_S)
        except BaseException:
            ranks.terminate()  # mpirun ends its ranks
            raise
    assert ranks.returncode == 0, complained
    return said

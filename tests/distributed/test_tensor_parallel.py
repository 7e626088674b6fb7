"""Ranks that mpirun starts give what one rank gives: greedy, sampled, beams and drafts, chunked and paused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from inflight.engine.torch import TorchEngine, TorchEngineConfig
from tests.distributed.requests import CONFIG, ENGINE, answers, make_requests
from tests.engine.serving import serve
from tests.models.zoo import Zoo

ROOT = Path(__file__).parents[2]
MPIRUN = Path(sys.executable).parent / "mpirun"


def run_ranks(num_ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(MPIRUN), "--allow-run-as-root", "--oversubscribe", "-n", str(num_ranks), sys.executable]
    program = ["-m", "tests.distributed.rank_program", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, *program], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
    )


@pytest.mark.parametrize(("case", "tp_size"), [("llama-gqa", 2), ("llama-gqa", 4), ("gpt2", 2), ("qwen3", 2)])
def test_ranks_in_step_answer_as_one(zoo: Zoo, case: str, tp_size: int) -> None:
    folder = zoo[case].folder
    one = serve(TorchEngine.load(TorchEngineConfig(str(folder), **ENGINE)), CONFIG, make_requests())
    done = run_ranks(tp_size, str(folder), str(tp_size))
    assert done.returncode == 0, done.stderr
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert sorted(rank["rank"] for rank in said) == list(range(tp_size))
    for rank in said:
        assert rank["answers"] == answers(one)


def test_a_world_of_another_size_is_refused(zoo: Zoo) -> None:
    done = run_ranks(2, str(zoo["llama"].folder), "4")
    assert done.returncode != 0
    assert "tp_size 4 times pp_size 1 needs 4 ranks, but MPI has 2" in done.stderr

"""Tokens per second beside busy loops: the shares, and a run on a small model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.busy import Round, busy_loops, fair_share, summarize
from inflight.testing.make_model import make_model


def test_shares_are_relative_to_the_round_without_loops_and_with_the_same_spin_time() -> None:
    rounds = {
        (0, 0): [Round(90.0, 1.9), Round(100.0, 2.0), Round(400.0, 1.8)],
        (0, 2): [Round(40.0, 0.9)],
        (50, 0): [Round(200.0, 2.0)],
        (50, 2): [Round(50.0, 1.0)],
    }
    found = summarize(rounds, num_processors=2, num_threads=2)
    assert [(each.spin_us, each.loops, each.tokens_per_s, each.share) for each in found] == [
        (0, 0, 100.0, 1.0),
        (0, 2, 40.0, 0.4),
        (50, 0, 200.0, 1.0),
        (50, 2, 50.0, 0.25),
    ]
    assert [each.fair_share for each in found] == [1.0, 0.5, 1.0, 0.5]


@pytest.mark.parametrize(
    ("processors", "threads", "loops", "expected"),
    [(2, 2, 0, 1), (2, 2, 1, 2 / 3), (2, 2, 2, 0.5), (4, 2, 2, 1), (4, 2, 6, 0.5), (1, 2, 2, 0.5)],
)
def test_a_fair_share_is_that_of_equal_threads(
    processors: int, threads: int, loops: int, expected: float
) -> None:
    assert fair_share(processors, threads, loops) == pytest.approx(expected)


def test_busy_loops_run_until_the_block_ends() -> None:
    before = set(psutil.Process().children())
    with busy_loops(2):
        loops = set(psutil.Process().children()) - before
        assert len(loops) == 2 and all(each.is_running() for each in loops)
    assert not any(each.is_running() for each in loops)


@pytest.mark.smoke
def test_a_run_prints_the_shares(tmp_path: Path) -> None:
    options = ["--requests", "2", "--loops", "1", "--spin-us", "0", "50", "--max-num-tokens", "256"]
    command = [sys.executable, "-m", "benchmarks.busy", "--model", str(make_model(tmp_path, shape="tiny"))]
    done = subprocess.run(
        [*command, *options], capture_output=True, text=True, timeout=600, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    figures = json.loads(last)["figures"]
    assert [(each["spin_us"], each["loops"]) for each in figures] == [(0, 0), (50, 0), (0, 1), (50, 1)]
    assert len(lines) == 4 and all(each["tokens_per_s"] > 0 for each in figures)

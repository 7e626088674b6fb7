"""The command that searches random seeds for faults."""

from __future__ import annotations

import random
import sys
from functools import partial

import pytest

from inflight.core.kv.block_pool import BlockPool
from inflight.testing.simulation import simulate


def run_command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["simulate", *arguments])
    return simulate.main()


def test_a_seed_runs_all_its_scenarios(monkeypatch, capsys):
    assert run_command(monkeypatch, "--seed", "3") == 0
    names = [name for name, _ in simulate.scenarios(3)]
    assert len(set(names)) == 67
    assert "seeds 1, runs 67, failed runs 0" in capsys.readouterr().out


def test_a_search_ends_after_some_minutes(monkeypatch, capsys):
    monkeypatch.setattr(random, "SystemRandom", partial(random.Random, 3))  # the search draws its first seed
    assert run_command(monkeypatch, "--minutes", "0.001") == 0
    assert "failed runs 0" in capsys.readouterr().out


def test_a_fault_is_reported_with_its_seed(monkeypatch, capsys):
    monkeypatch.setattr(BlockPool, "num_held", property(lambda self: 1))
    assert run_command(monkeypatch, "--seed", "3") == 1
    assert (
        "seed 3 failed (usual, one batch in flight, attention): AssertionError: " in capsys.readouterr().out
    )


@pytest.mark.parametrize("arguments", [["--minutes", "0"], ["--seed", "-1"], ["--seeds", "3"]])
def test_wrong_usage_is_refused(arguments, monkeypatch, capsys):
    with pytest.raises(SystemExit) as ended:
        run_command(monkeypatch, *arguments)
    assert ended.value.code == 2
    assert arguments[0] in capsys.readouterr().err

"""The command that searches random seeds for faults."""

from __future__ import annotations

import random
import sys
from functools import partial

import pytest

from inflight.core.kv.block_pool import BlockPool
from inflight.testing.simulation import simulate
from inflight.testing.simulation.scenario import DEVICES, DRAWS, MODELS, Scenario


def run_command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["simulate", *arguments])
    return simulate.main()


def test_a_seed_runs_all_its_scenarios(monkeypatch, capsys):
    assert run_command(monkeypatch, "--seed", "3") == 0
    names = [name for name, _ in simulate.scenarios(3)]
    assert len(set(names)) == 68
    assert "seeds 1, runs 68, failed runs 0" in capsys.readouterr().out


def test_a_search_ends_after_some_minutes(monkeypatch, capsys):
    monkeypatch.setattr(random, "SystemRandom", partial(random.Random, 3))  # the search draws its first seed
    assert run_command(monkeypatch, "--minutes", "0.001") == 0
    assert "failed runs 0" in capsys.readouterr().out


def test_a_fault_is_reported_with_its_seed(monkeypatch, capsys):
    monkeypatch.setattr(BlockPool, "num_held", property(lambda self: 1))
    assert run_command(monkeypatch, "--seed", "3") == 1
    said = capsys.readouterr().out
    assert "seed 3 failed (usual, one batch in flight, attention): AssertionError: " in said
    assert "seed 3 fails with 1 of its " in said


def test_a_failing_scenario_is_reduced_to_the_requests_that_it_needs(monkeypatch):
    scenario = MODELS["attention"](DEVICES["one batch in flight"](DRAWS["usual"](3)))
    culprits = list(scenario.requests)[2:7:4]

    def fail(given: Scenario) -> None:
        assert not given.requests.keys() >= set(culprits)
        if len(given.requests) == 1:
            raise ValueError("another failure")

    monkeypatch.setattr(simulate, "run", fail)
    said = simulate.fewest_requests(scenario, AssertionError())
    first, last = culprits
    assert said == f"with 2 of its {len(scenario.requests)} requests: {first}, {last}"


def test_a_scenario_with_some_of_its_requests_runs():
    scenario = DRAWS["usual"](3)
    some = list(scenario.requests)[::3]
    assert simulate.run(scenario.only(some)).num_iterations
    assert list(scenario.only(some).requests) == some
    assert {each.request_id for stops in scenario.only(some).stops.values() for each in stops} <= set(some)


@pytest.mark.parametrize("arguments", [["--minutes", "0"], ["--seed", "-1"], ["--seeds", "3"]])
def test_wrong_usage_is_refused(arguments, monkeypatch, capsys):
    with pytest.raises(SystemExit) as ended:
        run_command(monkeypatch, *arguments)
    assert ended.value.code == 2
    assert arguments[0] in capsys.readouterr().err

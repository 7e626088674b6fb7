"""Planted faults of the core, each of which the simulation must detect."""

from __future__ import annotations

import pytest

from inflight.testing.simulation.scenario import (
    Scenario,
    draw,
    draw_with_a_bad_device,
    draw_with_everybody_leaving,
    draw_with_failing_rows,
    draw_with_longest_prefix_first,
)
from inflight.testing.simulation.simulated_server import run
from tests.tiers import with_all

from .faults import FAULTS, FAULTS_OF_PIPELINES
from .faults_of_adapters import pages_taken_before_their_turn
from .faults_of_spans import FAULTS_OF_SPANS
from .faults_of_states import FAULTS_OF_STATES, snapshot_found_before_its_batch_is_back
from .faults_of_turns import overtaken_without_bound

SEEDS = range(200)
DETECTED_LATE = (pages_taken_before_their_turn, snapshot_found_before_its_batch_is_back)
"""Faults that few seeds detect, so that many are tried."""
SOON_DETECTED = [each for each in FAULTS if each not in DETECTED_LATE]


@pytest.mark.parametrize("plant", with_all(FAULTS, SOON_DETECTED[::5]), ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_detected(plant, monkeypatch):
    plant(monkeypatch)
    assert any(map(_notices, SEEDS)), f"{len(SEEDS)} seeds and nothing noticed"


@pytest.mark.parametrize(
    "plant", with_all(FAULTS_OF_PIPELINES, FAULTS_OF_PIPELINES[::4]), ids=lambda plant: plant.__name__
)
def test_a_fault_planted_in_a_pipeline_is_detected(plant, monkeypatch):
    plant(monkeypatch)
    assert any(map(_notices_in_a_pipeline, SEEDS)), f"{len(SEEDS)} seeds and nothing noticed"


@pytest.mark.parametrize(
    "plant",
    with_all(FAULTS_OF_STATES, [each for each in FAULTS_OF_STATES if each not in DETECTED_LATE]),
    ids=lambda plant: plant.__name__,
)
def test_a_fault_planted_in_recurrent_states_is_detected(plant, monkeypatch):
    plant(monkeypatch)
    assert any(map(_notices_with_state, SEEDS)), f"{len(SEEDS)} seeds and nothing noticed"


@pytest.mark.parametrize("plant", FAULTS_OF_SPANS, ids=lambda plant: plant.__name__)
def test_a_fault_planted_in_picture_spans_is_detected(plant, monkeypatch):
    plant(monkeypatch)
    found = (_is_noticed(draw(seed).with_spans()) for seed in SEEDS)
    assert any(found), f"{len(SEEDS)} seeds and nothing noticed"


def test_overtaking_without_a_bound_is_detected(monkeypatch):
    overtaken_without_bound(monkeypatch)
    found = (_is_noticed(draw_with_longest_prefix_first(seed)) for seed in SEEDS)
    assert any(found), f"{len(SEEDS)} seeds and nothing noticed"


def _notices_with_state(seed: int) -> bool:
    ahead, bad = draw(seed).with_state().ahead(), draw_with_a_bad_device(seed).with_state()
    return _is_noticed(
        ahead.in_turn(), ahead.without_host_waits(), bad.in_turn(), bad.ahead().without_host_waits()
    )


def _notices(seed: int) -> bool:
    ahead = draw(seed).ahead()
    bad = draw_with_a_bad_device(seed).ahead().without_host_waits()
    leaving = draw_with_everybody_leaving(seed)
    return _is_noticed(
        ahead.in_turn(), ahead, ahead.without_host_waits(), bad, draw_with_failing_rows(seed), leaving
    )


def _notices_in_a_pipeline(seed: int) -> bool:
    return _is_noticed(draw(seed).pipelined(2 + seed % 2), draw_with_a_bad_device(seed).pipelined(3))


def _is_noticed(*scenarios: Scenario) -> bool:
    """Whether a check fails or the core raises."""
    try:
        for scenario in scenarios:
            run(scenario)
    except (AssertionError, LookupError, ValueError):
        return True
    return False

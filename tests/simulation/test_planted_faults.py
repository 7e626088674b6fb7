"""Proof that the simulation would notice if the core were wrong."""

from __future__ import annotations

import dataclasses

import pytest

from .faults import FAULTS
from .scenario import draw, draw_with_a_bad_device
from .simulated_server import run

SEEDS = range(200)


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_noticed(plant, monkeypatch):
    plant(monkeypatch)
    assert any(map(_notices, SEEDS)), f"{len(SEEDS)} seeds and nothing noticed"


def _notices(seed: int) -> bool:
    """Whether something is amiss, or the core breaks down over it."""
    try:
        for depth in (1, 2):
            run(dataclasses.replace(draw(seed), depth=depth))
        run(dataclasses.replace(draw_with_a_bad_device(seed), depth=2))
    except (AssertionError, LookupError, ValueError):
        return True
    return False

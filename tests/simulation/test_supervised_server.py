"""The supervision of a server on a simulated machine, and planted mistakes that it must reveal."""

from __future__ import annotations

from collections import Counter

import pytest

from inflight.testing.machine import supervised_server
from tests.tiers import examples, with_all

from .mutations import Mutation
from .mutations_of_supervision import MUTATIONS_OF_SUPERVISION

_NUM_SEEDS = 2000


def test_lost_processes_are_started_again_and_none_is_left() -> None:
    faults: Counter[str] = Counter()
    endings: Counter[str] = Counter()
    for seed in range(examples(100, _NUM_SEEDS)):
        report = supervised_server.run(seed)
        faults += report.faults
        endings += report.endings
    assert faults.keys() == supervised_server.FAULTS.keys()
    assert endings.keys() == {"asked to end", "given up", "killed", "not started"}


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_seed_always_does_the_same(seed: int) -> None:
    assert supervised_server.run(seed) == supervised_server.run(seed)


@pytest.mark.parametrize(
    "mutation", with_all(MUTATIONS_OF_SUPERVISION, MUTATIONS_OF_SUPERVISION[::4]), ids=lambda each: each.name
)
def test_a_planted_mistake_is_revealed(mutation: Mutation) -> None:
    with mutation.planted():
        assert any(map(_fails, range(_NUM_SEEDS))), f"{_NUM_SEEDS} seeds and nothing noticed"


def _fails(seed: int) -> bool:
    try:
        supervised_server.run(seed)
    except AssertionError:
        return True
    return False

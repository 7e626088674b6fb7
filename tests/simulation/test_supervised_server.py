"""The supervision of a server on a simulated machine, and planted mistakes that it must reveal."""

from __future__ import annotations

from collections import Counter

import pytest

from inflight.testing.machine import supervised_server
from tests.tiers import examples, with_all

from .mutations import NUM_SEEDS, Mutation
from .mutations_of_supervision import MUTATIONS_OF_SUPERVISION


def test_lost_processes_are_started_again_and_none_is_left() -> None:
    faults: Counter[str] = Counter()
    endings: Counter[str] = Counter()
    for seed in range(examples(100, NUM_SEEDS)):
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
    assert mutation.is_revealed_by(supervised_server.run), f"{NUM_SEEDS} seeds and nothing noticed"

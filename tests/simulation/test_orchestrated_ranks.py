"""An orchestrator of ranks on a simulated machine, and planted mistakes that it must reveal."""

from __future__ import annotations

from collections import Counter

import pytest

from inflight.testing.machine import orchestrated_ranks
from tests.tiers import examples, with_all

from .mutations import NUM_SEEDS, Mutation, every
from .mutations_of_orchestration import MUTATIONS_OF_ORCHESTRATION


def test_lost_ranks_are_started_again_and_none_is_left() -> None:
    faults: Counter[str] = Counter()
    endings: Counter[str] = Counter()
    for seed in range(examples(60, all=400)):
        report = orchestrated_ranks.run(seed)
        faults += report.faults
        endings += report.endings
    assert faults.keys() == orchestrated_ranks.FAULTS.keys()
    assert endings.keys() == {"ended", "not started"}


@pytest.mark.parametrize("seed", [1, 2])
def test_a_seed_always_does_the_same(seed: int) -> None:
    assert orchestrated_ranks.run(seed) == orchestrated_ranks.run(seed)


@pytest.mark.parametrize(
    "mutation",
    with_all(MUTATIONS_OF_ORCHESTRATION, every(3, MUTATIONS_OF_ORCHESTRATION)),
    ids=lambda each: each.name,
)
def test_a_planted_mistake_is_revealed(mutation: Mutation) -> None:
    assert mutation.is_revealed_by(orchestrated_ranks.run), f"{NUM_SEEDS} seeds and nothing noticed"

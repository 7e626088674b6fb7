"""A server with several ranks on a simulated machine, and planted mistakes that it must reveal."""

from __future__ import annotations

from collections import Counter

import pytest

from inflight.testing.machine import ranked_server, whole_server
from tests.tiers import examples, with_all

from .mutations import NUM_SEEDS, Mutation, every
from .mutations_of_ranks import MUTATIONS_OF_RANKS


def test_promises_are_kept_although_ranks_are_lost() -> None:
    faults: Counter[str] = Counter()
    for seed in range(examples(50, all=400)):
        faults += ranked_server.run(seed).faults
    assert faults.keys() == {*whole_server.FAULTS, "failed iteration"}


def test_a_seed_always_does_the_same() -> None:
    assert ranked_server.run(1) == ranked_server.run(1)


@pytest.mark.parametrize(
    "mutation", with_all(MUTATIONS_OF_RANKS, every(3, MUTATIONS_OF_RANKS)), ids=lambda each: each.name
)
def test_a_planted_mistake_is_revealed(mutation: Mutation) -> None:
    assert mutation.is_revealed_by(ranked_server.run), f"{NUM_SEEDS} seeds and nothing noticed"

"""A server with guides on a simulated machine, and planted mistakes that it must reveal."""

from __future__ import annotations

from collections import Counter

import pytest

from inflight.testing.machine import guided_server, whole_server
from tests.tiers import examples, with_all

from .mutations import Mutation
from .mutations_of_guides import MUTATIONS_OF_GUIDES

_NUM_SEEDS = 2000


def test_guides_are_followed_through_all_faults() -> None:
    faults: Counter[str] = Counter()
    for seed in range(examples(50, _NUM_SEEDS)):
        faults += guided_server.run(seed).faults
    assert faults.keys() == {*whole_server.FAULTS, "failed iteration"}


def test_a_seed_always_does_the_same() -> None:
    assert guided_server.run(1) == guided_server.run(1)


@pytest.mark.parametrize(
    "mutation", with_all(MUTATIONS_OF_GUIDES, MUTATIONS_OF_GUIDES[::3]), ids=lambda each: each.name
)
def test_a_planted_mistake_is_revealed(mutation: Mutation) -> None:
    with mutation.planted():
        assert any(map(_fails, range(_NUM_SEEDS))), f"{_NUM_SEEDS} seeds and nothing noticed"


def _fails(seed: int) -> bool:
    try:
        guided_server.run(seed)
    except AssertionError:
        return True
    return False

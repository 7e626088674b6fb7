"""A server with the front ends of /v1 on a simulated machine, and planted mistakes that it must reveal."""

from __future__ import annotations

from collections import Counter

import pytest

from inflight.testing.machine import openai_server, whole_server
from tests.tiers import examples, with_all

from .mutations import NUM_SEEDS, Mutation, every
from .mutations_of_openai import MUTATIONS_OF_OPENAI


def test_promises_are_kept_to_clients_of_v1() -> None:
    faults: Counter[str] = Counter()
    for seed in range(examples(40, all=400)):
        faults += openai_server.run(seed).faults
    assert faults.keys() == {*whole_server.FAULTS, "failed iteration"}


@pytest.mark.parametrize("seed", [1, 38])  # in 38 a front end ends while requests are in flight
def test_a_seed_always_does_the_same(seed: int) -> None:
    assert openai_server.run(seed) == openai_server.run(seed)


@pytest.mark.parametrize(
    "mutation", with_all(MUTATIONS_OF_OPENAI, every(3, MUTATIONS_OF_OPENAI)), ids=lambda each: each.name
)
def test_a_planted_mistake_is_revealed(mutation: Mutation) -> None:
    assert mutation.is_revealed_by(openai_server.run), f"{NUM_SEEDS} seeds and nothing noticed"

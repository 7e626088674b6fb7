"""A whole server on a simulated machine, and planted mistakes that it must reveal."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from inflight.endpoint import local
from inflight.testing.machine import whole_server
from inflight.testing.machine.whole_server import WholeServer
from tests.tiers import examples, with_all

from .mutations import MUTATIONS, NUM_SEEDS, Mutation, every
from .mutations_of_steps import MUTATIONS_OF_STEPS
from .mutations_of_storage import MUTATIONS_OF_STORAGE

_ALL = (*MUTATIONS, *MUTATIONS_OF_STORAGE, *MUTATIONS_OF_STEPS)
_SOON = every(3, _ALL)


def test_promises_are_kept_through_all_faults() -> None:
    faults: Counter[str] = Counter()
    endings: Counter[str] = Counter()
    for seed in range(examples(60, all=400)):
        report = whole_server.run(seed)
        faults += report.faults
        endings += report.endings
    assert faults.keys() == {*whole_server.FAULTS, "failed iteration"}
    assert endings.keys() >= {"LENGTH", "END_ID", "CANCELLED", "TIMED_OUT", "STOP_WORDS", "UNAVAILABLE"}


@pytest.mark.parametrize("seed", [0, 1, 3, 6])  # 3 and 6 have a disk and adapters
def test_a_seed_always_does_the_same(seed: int) -> None:
    assert whole_server.run(seed) == whole_server.run(seed)


@pytest.mark.parametrize("mutation", with_all(_ALL, _SOON), ids=lambda each: each.name)
def test_a_planted_mistake_is_revealed(mutation: Mutation) -> None:
    assert mutation.is_revealed_by(whole_server.run), f"{NUM_SEEDS} seeds and nothing noticed"


@pytest.mark.parametrize("seed", [16, 22])  # fail with the sixth or an earlier fault
def test_a_failing_seed_is_reduced_to_the_faults_that_it_needs(seed: int) -> None:
    mutation = next(each for each in MUTATIONS if each.name == "the socket of a dead engine is not replaced")
    with mutation.planted():
        said = WholeServer.fewest_faults(seed)
    assert said in (
        "with 1 of its faults (1 engine killed)",
        "with 2 of its faults (1 loop died, 1 engine killed)",
    )
    assert WholeServer.fewest_faults(seed) == "no more: it is not deterministic", "without the mistake"


def test_the_package_is_as_before_after_a_run() -> None:
    whole_server.run(0)
    assert local.threading is threading

"""A server with all its parts at once on a simulated machine, and planted mistakes that it must reveal."""

from __future__ import annotations

from collections import Counter

import pytest

from inflight.testing.machine import complete_server, launched_server, whole_server
from inflight.testing.machine.run import RunReport
from tests.tiers import examples, with_all

from .mutations import MUTATIONS, NUM_SEEDS, Mutation
from .mutations_of_guides import MUTATIONS_OF_GUIDES
from .mutations_of_openai import MUTATIONS_OF_OPENAI
from .mutations_of_ranks import MUTATIONS_OF_RANKS
from .mutations_of_storage import MUTATIONS_OF_STORAGE
from .mutations_of_supervision import MUTATIONS_OF_SUPERVISION
from .mutations_of_triton import MUTATIONS_OF_TRITON

_WORK = (
    "requests of endpoint",
    "requests of Triton",
    "requests of /v1",
    "guides compiled",
    "adapters read",
    "blocks loaded",
    "starts of the server",
)
_NAMES = (
    "answers of two threads are mixed",
    "no more connections after descriptors ran out",
    "the last response overtakes other sequences",
    "a slow guide is not interrupted for new ones",
    "pieces are counted instead of tokens",
    "a streamed chat has no usage",
    "a block that one rank could not read counts as loaded",
    "iterations without new requests are not shared",
    "a request that an iteration has no room for is forgotten",
    "the memory of a dropped adapter stays counted",
    "a guard does not note that it ends the server",
    "a guard only asks the server to end",
    "the final flag is sent twice",
)
"""Mistakes in every part, which few seeds reveal."""
_ALL = (
    *MUTATIONS,
    *MUTATIONS_OF_GUIDES,
    *MUTATIONS_OF_OPENAI,
    *MUTATIONS_OF_RANKS,
    *MUTATIONS_OF_STORAGE,
    *MUTATIONS_OF_SUPERVISION,
    *MUTATIONS_OF_TRITON,
)
_CHOSEN = [each for each in _ALL if each.name in _NAMES]
_SOON = [each for each in _CHOSEN if each.name == "a guard does not note that it ends the server"]


def uses_all_parts(report: RunReport) -> bool:
    """Whether every part of a server with several ranks had something to do in a run."""
    return report.work["ranks"] > 1 and all(report.work[name] for name in _WORK)


def test_promises_are_kept_by_all_parts_together() -> None:
    reports = [complete_server.run(seed) for seed in range(examples(8, all=60))]
    faults = sum((each.faults for each in reports), Counter[str]())
    assert faults.keys() == {
        *whole_server.FAULTS,
        *launched_server.FAULTS_OF_LAUNCHER,
        "failed iteration",
    }
    assert sum(map(uses_all_parts, reports)) > len(reports) / 20
    assert {each.work["ranks"] for each in reports} == {1, 2, 3}


def test_a_seed_always_does_the_same() -> None:
    assert complete_server.run(6) == complete_server.run(6)


@pytest.mark.parametrize("mutation", with_all(_CHOSEN, _SOON), ids=lambda each: each.name)
def test_a_planted_mistake_is_revealed(mutation: Mutation) -> None:
    assert mutation.is_revealed_by(complete_server.run), f"{NUM_SEEDS} seeds and nothing noticed"

"""A server with all its parts at the same time on a simulated machine, and planted mistakes that it must reveal."""

from __future__ import annotations

from collections import Counter

import pytest

from inflight.testing.machine import complete_server, whole_server
from inflight.testing.machine.run import RunReport
from tests.tiers import examples, with_all

from .mutations import MUTATIONS, NUM_SEEDS, Mutation
from .mutations_of_guides import MUTATIONS_OF_GUIDES
from .mutations_of_openai import MUTATIONS_OF_OPENAI
from .mutations_of_ranks import MUTATIONS_OF_RANKS
from .mutations_of_storage import MUTATIONS_OF_STORAGE
from .mutations_of_triton import MUTATIONS_OF_TRITON

_WORK = (
    "requests of endpoint",
    "requests of Triton",
    "requests of /v1",
    "guides compiled",
    "adapters read",
    "blocks loaded",
)


def uses_all_parts(report: RunReport) -> bool:
    """Whether every part of a server with several ranks had something to do in a run."""
    return report.work["ranks"] > 1 and all(report.work[name] for name in _WORK)


def test_promises_are_kept_by_all_parts_together() -> None:
    reports = [complete_server.run(seed) for seed in range(examples(16, NUM_SEEDS))]
    faults = sum((each.faults for each in reports), Counter[str]())
    assert faults.keys() == {*whole_server.FAULTS, "failed iteration"}
    assert any(map(uses_all_parts, reports))
    assert {each.work["ranks"] for each in reports} == {1, 2, 3}

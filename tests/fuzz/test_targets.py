"""Earlier findings, a small corpus and random inputs; `python -m tests.fuzz` searches further."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.fuzz.targets import DATA, TARGETS
from tests.tiers import examples

FINDINGS: dict[str, list[str]] = json.loads(Path(__file__).with_name("findings.json").read_text("utf-8"))
CORPUS: dict[str, list[str]] = json.loads(Path(__file__).with_name("corpus.json").read_text("utf-8"))
NUM_RANDOM = examples(fast=100, all=2000)


@pytest.mark.parametrize(
    ("target", "data"), [(name, each) for name, found in FINDINGS.items() for each in found]
)
def test_a_former_finding_is_answered(target: str, data: str) -> None:
    TARGETS[target](bytes.fromhex(data))


@pytest.mark.parametrize("target", CORPUS)
def test_inputs_that_reach_different_code_are_answered(target: str) -> None:
    for data in CORPUS[target]:
        TARGETS[target](bytes.fromhex(data))


@pytest.mark.parametrize("target", TARGETS)
def test_random_bytes_are_answered(target: str) -> None:
    rng = random.Random(target)
    for _ in range(NUM_RANDOM):
        TARGETS[target](rng.randbytes(rng.choice([0, 1, 4, 8, 20, 60])))


def test_the_page_of_promises_has_the_number_of_random_inputs() -> None:
    page = DATA.parents[1].joinpath("docs", "promises.md").read_text("utf-8")
    (row,) = (line for line in page.splitlines() if "test_random_bytes_are_answered" in line)
    fast, every = 100 * len(TARGETS), 2000 * len(TARGETS)
    assert row.endswith(f"| {fast:,}, {every:,} |")


def test_documents_are_really_changed() -> None:
    from tests.fuzz.targets import Choices, changed

    rng = random.Random(5)
    document = {"a": 1, "b": {"c": [1, 2]}}
    results = {json.dumps(changed(document, Choices(rng.randbytes(6)))) for _ in range(256)}
    assert len(results) > 25 and document == {"a": 1, "b": {"c": [1, 2]}}

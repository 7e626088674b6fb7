"""A short soak of a real server: requests of every kind, and the figures of every process."""

from __future__ import annotations

import argparse
import csv
import re
from dataclasses import replace
from pathlib import Path
from random import Random
from unittest.mock import Mock

import pytest

from benchmarks import soak, soak_kinds

PROMISES = Path(__file__).resolve().parents[2] / "docs/promises.md"

SAMPLE = soak.Sample(0, "stub", 1, 100.0, 50.0, 10, 5, 24.0, 6, 0)


@pytest.mark.smoke
def test_figures_are_those_after_the_start_and_at_the_end() -> None:
    samples = [replace(SAMPLE, second=60 * n, private_mib=50.0 + n) for n in range(1, 61)]
    assert soak.judge(samples)["stub"]["private_mib"] == (65.0, 107.5 - 2.5 + 0.0)
    assert soak.judge(samples)["stub"]["threads"] == (5.0, 5.0)


@pytest.mark.smoke
def test_the_documentation_has_the_number_of_kinds() -> None:
    said = re.search(r"There\s+are\s+(\d+)\s+kinds\s+of\s+requests", PROMISES.read_text())
    assert said and int(said[1]) == len(soak_kinds.all_kinds(Mock(), Mock()))


@pytest.mark.smoke
def test_ids_are_left_out_of_answers_at_every_depth() -> None:
    answer = [{"id": "a", "output": [{"call_id": "b", "name": "count", "content": [{"id": "c"}]}]}]
    assert soak_kinds.without_ids(answer) == [{"output": [{"name": "count", "content": [{}]}]}]


@pytest.mark.smoke
def test_an_answer_must_equal_the_first_one_of_its_kind_or_of_an_equal_kind(monkeypatch) -> None:
    answers = iter(["a", "a", "b"])
    kinds = {"drafts": lambda chance, text: next(answers), "grpc": lambda chance, text: next(answers)}
    monkeypatch.setattr(soak, "all_kinds", lambda server, client: kinds)
    load = soak.Load(Mock(grpc="localhost:1"), rate=1)
    for kind in ("grpc", "drafts", "drafts"):
        load.send(kind, 0, Random(0))
    assert load.ended == {"grpc": 1, "drafts": 2, "wrong": 1}
    assert load.wrong == ["drafts 0: 'b', grpc 0 before 'a'"]


@pytest.mark.exhaustive
def test_every_kind_of_request_is_sent_and_answered(tmp_path: Path) -> None:
    given = argparse.Namespace(minutes=0.6, rate=25, interval=6.0, csv=tmp_path / "soak.csv", tp=None, set=[])
    load, samples = soak.soak(given, tmp_path / "files")
    assert not load.wrong, load.wrong
    assert load.ended.keys() == load.kinds.keys()
    with open(given.csv, newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(samples)
    assert {"tritonserver", "stub tensorrt_llm", "inflight.openai"} <= {row["process"] for row in rows}
    assert all(int(row["descriptors"]) > 0 and float(row["private_mib"]) > 0 for row in rows)

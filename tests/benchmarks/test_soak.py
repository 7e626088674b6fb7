"""A short soak of a real server: requests of every kind, and the figures of every process."""

from __future__ import annotations

import argparse
import csv
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import soak

SAMPLE = soak.Sample(0, "stub", 1, 100.0, 50.0, 10, 5, 24.0, 6, 0)


@pytest.mark.smoke
def test_figures_are_those_after_the_start_and_at_the_end() -> None:
    samples = [replace(SAMPLE, second=60 * n, private_mib=50.0 + n) for n in range(1, 61)]
    assert soak.judge(samples)["stub"]["private_mib"] == (65.0, 107.5 - 2.5 + 0.0)
    assert soak.judge(samples)["stub"]["threads"] == (5.0, 5.0)


@pytest.mark.exhaustive
def test_every_kind_of_request_is_sent_and_answered(tmp_path: Path) -> None:
    given = argparse.Namespace(minutes=0.4, rate=25, interval=6.0, csv=tmp_path / "soak.csv")
    load, samples = soak.soak(given, tmp_path / "files")
    assert not load.wrong, load.wrong
    assert load.ended.keys() == load.kinds.keys()
    with open(given.csv, newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(samples)
    assert {"tritonserver", "stub tensorrt_llm", "inflight.openai"} <= {row["process"] for row in rows}
    assert all(int(row["descriptors"]) > 0 and float(row["private_mib"]) > 0 for row in rows)

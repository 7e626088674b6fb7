"""perf_analyzer against a real server."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks.measuring import perf_analyzer

REQUESTS = Path(__file__).with_name("requests.json")


@pytest.mark.exhaustive
def test_perf_analyzer_streams_at_every_concurrency_without_an_error(fake_server, tmp_path):
    report = tmp_path / "report.csv"
    experiments = perf_analyzer.export(
        ["-m", "tensorrt_llm", "-i", "grpc", "-u", fake_server.grpc, "--streaming", "--async"]
        + ["--input-data", str(REQUESTS), "--concurrency-range", "1:16:5", "--measurement-interval", "300"]
        + ["--stability-percentage", "999", "-f", str(report)],
        timeout=180,
    )
    rows = list(csv.DictReader(report.open()))
    assert sorted(int(row["Concurrency"]) for row in rows) == [1, 6, 11, 16]
    requests = [request for experiment in experiments for request in experiment["requests"]]
    assert len(requests) > 50
    assert all(
        request["success"] if "success" in request else request["response_timestamps"] for request in requests
    )

"""perf_analyzer, an idle server, and what a stopped one leaves."""

from __future__ import annotations

import csv
import time
from pathlib import Path

import psutil

from benchmarks.measuring import perf_analyzer
from tests.commands import group_members

from .clients import ask

REQUESTS = Path(__file__).with_name("requests.json")


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


def cpu_seconds(group: int) -> float:
    """Processor time of every process in a process group."""
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in group_members(group))


def test_an_idle_server_uses_under_one_percent_of_a_core(demo_server):
    ask(demo_server.grpc, input_ids=[1, 2, 3], request_output_len=2)
    samples = []

    def idle_second() -> bool:
        before = cpu_seconds(demo_server.pid)
        time.sleep(4.0)
        samples.append((cpu_seconds(demo_server.pid) - before) / 4.0)
        return samples[-1] < 0.01

    assert idle_second() or idle_second(), f"{samples} of a core"

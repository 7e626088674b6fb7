"""Measurements of a real server by `scripts/bench serve`."""

from __future__ import annotations

import pytest

from benchmarks import stream
from benchmarks.analyzer import analyze
from benchmarks.measuring.workload import BenchRequest
from benchmarks.serve import ServedEngine
from inflight.server.errors import ServeError
from inflight.testing.fake_server import make_fake_repository, serve_fake

REQUESTS = [BenchRequest((10 + number, 2, 3), 4 + number) for number in range(12)]
STEP_MS = 2
SETTINGS = {
    "fake_engine": f"vocab=1000,step_us={STEP_MS * 1000}",
    "max_sequence_length": "256",
    "max_tokens_in_paged_kv_cache": "4096",
}


def test_perf_analyzer_sends_every_request_once_within_the_concurrency(fake_server):
    timelines = [answer.timeline for answer in analyze(fake_server, REQUESTS, 4)]
    assert sorted(timeline.num_output_tokens for timeline in timelines) == [*range(4, 16)]
    for timeline in timelines:
        took_ns = timeline.responses_ns[-1] - timeline.sent_ns
        assert took_ns >= timeline.num_output_tokens * STEP_MS * 1e6 / 2
        others = [t for t in timelines if t.sent_ns < timeline.sent_ns < t.responses_ns[-1]]
        assert len(others) < 4


def test_fewer_requests_than_the_concurrency_are_sent_at_once(fake_server):
    assert len(analyze(fake_server, REQUESTS[:2], 16)) == 2


def test_a_request_that_the_server_refuses_is_reported(fake_server):
    with pytest.raises(ServeError, match="request_output_len"):
        analyze(fake_server, [BenchRequest((1, 2), 1_000_000)], 1)


@pytest.mark.exhaustive
def test_memory_of_the_engines_and_all_server_processes_is_measured(elsewhere, tmp_path):
    models = make_fake_repository(tmp_path / "models")
    with ServedEngine(SETTINGS | {"max_batch_size": "4"}, models) as engine:
        engine.run(REQUESTS[:4], 4)
        resources = engine.resources()
    assert resources.server_peak_rss_bytes is not None
    assert 10 << 20 < resources.peak_rss_bytes < resources.server_peak_rss_bytes
    assert resources.load_s > 0


@pytest.mark.exhaustive
def test_lags_are_between_the_sampling_of_a_token_and_its_arrival(elsewhere, tmp_path):
    trace = tmp_path / "trace"
    with serve_fake(settings=stream.settings(2000, 1, trace)) as server:
        row = stream.Bench(server, trace).measure(num_streams=4, num_tokens=300)
    assert 0 < row["lag_ms_median_of_quickest_stream"] <= row["lag_ms_max"] < 10_000
    assert 1 <= row["tokens_behind_max"] <= 300
    # Processor time is counted in hundredths of a second; each process must take at least one.
    assert min(row["cpu_us_per_response"].values()) > 0

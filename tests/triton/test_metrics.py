"""The metrics page agrees with the log line and the counters, even when the server's metrics fail."""

from __future__ import annotations

import json
import logging
import mmap
import queue
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.core.kv.store_stats import StoreStats, TierStats
from inflight.core.report.metrics import TOKENS, Histogram, ServiceMetrics
from inflight.core.report.stats import AdapterStats, IterationCounts, MemoryUsage, StaticBatchStats
from inflight.core.request.stop import FinishReason
from inflight.serving.memory import _torch_memory, measure_memory
from inflight.serving.metric_table import (
    COUNTERS,
    HISTOGRAMS,
    LENGTHS,
    TIMESTAMP,
    Batching,
    HistogramFamily,
)
from inflight.triton.metric_families import FamilyMaker, MetricValues, lengths_between
from inflight.triton.metrics import MetricsPublisher
from tests.prometheus import Page, parse, shown
from tests.tiers import examples
from tests.triton.fake_metrics import FakeMetrics
from tests.triton.fake_pb_utils import FakePbUtils

NOW = 1_785_000_000.25
NOTHING = ServiceMetrics().snapshot()
STATS = IterationCounts(
    iteration=17, num_active_requests=9, max_num_requests=8, max_num_blocks=300, num_free_blocks=200,
    tokens_per_block=16, num_scheduled_requests=6, num_context_requests=2, num_generation_requests=4,
    num_context_tokens=70, micro_batch_id=1, num_waiting_requests=4, num_paused_requests=1, num_reused_blocks=30,
    num_missed_blocks=10,
)  # fmt: skip
STATIC = replace(STATS, static_batch=StaticBatchStats(7, 7, 500, 60, 11))
TIMEOUT_S = 30


class Stage:
    """A publisher on a fake server, and its log lines."""

    def __init__(self, pb_utils: FakePbUtils | SimpleNamespace, batching: Batching) -> None:
        self.pb_utils = pb_utils
        self.lines: queue.Queue[str] = queue.Queue()
        self.publisher = MetricsPublisher(pb_utils, "tensorrt_llm", "1", self.lines.put, batching, 0.0)

    def publish(self, stats: IterationCounts = STATS, metrics=NOTHING, wall_clock_s: float = NOW) -> dict:
        """Publish, and return the log line's fields."""
        self.publisher.put(stats, metrics, wall_clock_s)
        return json.loads(self.lines.get(timeout=TIMEOUT_S))

    @property
    def page(self) -> Page:
        return parse(self.pb_utils.metrics.page())


@contextmanager
def stage(
    pb_utils: FakePbUtils | SimpleNamespace | None = None, stats: IterationCounts = STATS
) -> Iterator[Stage]:
    """Make a stage for an engine with the batching mode of `stats`."""
    on_stage = Stage(pb_utils or FakePbUtils(), Batching.STATIC if stats.static_batch else Batching.INFLIGHT)
    try:
        yield on_stage
    finally:
        on_stage.publisher.close()


@pytest.mark.parametrize("stats", [STATS, STATIC], ids=["in flight", "static"])
def test_gauges_and_the_log_line_have_the_same_values(stats):
    with stage(stats=stats) as on:
        fields = on.publish(stats)
        page = shown(on.page)
    assert page.pop(TIMESTAMP) == 1_785_000_000_250_000
    assert fields.pop(TIMESTAMP).endswith(".250000")
    assert page == fields and len(fields) > 15
    assert fields["Runtime CPU Memory Usage"] > 1_000_000


@pytest.mark.parametrize(
    ("stats", "there", "absent"),
    [
        (STATS, "nv_trt_llm_inflight_batcher_metrics", "nv_trt_llm_v1_metrics"),
        (STATIC, "nv_trt_llm_v1_metrics", "nv_trt_llm_inflight_batcher_metrics"),
    ],
)
def test_in_flight_and_static_batching_have_their_own_family(stats, there, absent):
    with stage(stats=stats) as on:
        on.publish(stats)
        assert on.page.has(there) and not on.page.has(absent)


def test_all_metrics_have_the_models_label():
    with stage() as on:
        on.publish()
        values = on.page.values
    assert len(values) > 150
    assert all({("model", "tensorrt_llm"), ("version", "1")} <= labels for _, labels in values)


def test_gauges_rise_and_fall_with_the_statistics():
    idle = replace(STATS, iteration=18, num_active_requests=0, num_scheduled_requests=0, num_free_blocks=300)
    with stage() as on:
        on.publish()
        on.publish(idle, wall_clock_s=NOW + 1)
        page = shown(on.page)
    assert (page["Active Request Count"], page["Scheduled Requests"], page["Used KV cache blocks"]) == (
        0,
        0,
        0,
    )
    assert (page["Fraction used KV cache blocks"], page["Iteration Counter"]) == (0, 18)


def test_only_changed_metrics_are_set(monkeypatch):
    monkeypatch.setattr("inflight.triton.metrics.measure_memory", lambda: MemoryUsage(5, 0, 0))
    with stage() as on:
        on.publish()
        calls = on.pb_utils.metrics.calls
        before = len(calls)
        on.publish(wall_clock_s=NOW + 1)
        assert calls[before:] == ["set nv_trt_llm_general_metrics"], "time goes on, nothing else does"


# ---------------------------------------------------------------- counters and histograms


def test_counters_start_at_zero_and_grow():
    metrics = ServiceMetrics(num_preemptions=2, num_hit_tokens=96, num_missed_tokens=32)
    metrics.finished = {FinishReason.LENGTH: 3, FinishReason.CANCELLED: 1}
    metrics.failed = {"UNAVAILABLE": 4}
    with stage() as on:
        on.publish()
        page = on.page
        assert set(page.series("inflight_finished_sequences_total", "finish_reason")) == {
            "END_ID", "STOP_WORDS", "LENGTH", "TIMED_OUT", "CANCELLED",
        }  # fmt: skip
        assert {page.value(family.name) for family in COUNTERS if not family.label} == {0}
        on.publish(metrics=metrics.snapshot())
        metrics.finished[FinishReason.LENGTH] = 10
        metrics.failed["SOMETHING_NEW"] = 1
        on.publish(metrics=metrics.snapshot())
        page = on.page
    reasons = page.series("inflight_finished_sequences_total", "finish_reason")
    assert {reason: count for reason, count in reasons.items() if count} == {"LENGTH": 10, "CANCELLED": 1}
    codes = page.series("inflight_failed_requests_total", "code")
    assert {code: count for code, count in codes.items() if count} == {"UNAVAILABLE": 4, "SOMETHING_NEW": 1}
    assert page.value("inflight_preemptions_total") == 2
    assert page.value("inflight_kv_cache_hit_tokens_total") == 96
    assert page.value("inflight_kv_cache_missed_tokens_total") == 32


def test_adapter_gauges_rise_and_fall_and_new_names_appear():
    metrics = ServiceMetrics(adapters=AdapterStats(3, 2, 8, 4, 5, 1))
    metrics.running_by_adapter = Counter({"tidy": 2})
    with stage() as on:
        on.publish()
        assert not on.page.has("inflight_adapter_running_requests")
        on.publish(metrics=metrics.snapshot())
        page = on.page
        metrics.running_by_adapter = Counter({"terse": 1})
        on.publish(metrics=metrics.snapshot())
        later = on.page
    assert page.kinds["inflight_adapters"] == "gauge"
    assert page.series("inflight_adapters", "place") == {"stored": 3, "on_device": 2}
    assert page.series("inflight_adapter_pages", "use") == {"all": 8, "used": 4}
    assert page.value("inflight_adapter_loads_total") == 5
    assert page.series("inflight_adapter_running_requests", "lora_name") == {"tidy": 2}
    assert later.series("inflight_adapter_running_requests", "lora_name") == {"tidy": 0, "terse": 1}


def test_tiers_of_saved_blocks_have_a_series_each():
    host = TierStats("host", 1000, 3, 300, 5, 500, 2, 200, 2, 200)
    disk = TierStats("disk", 9000, 4, 464, 6, 696, 1, 116, 2, 232)
    metrics = ServiceMetrics(block_store=StoreStats(100, 6, 600, 3, 300, (host, disk)))
    with stage() as on:
        on.publish()
        assert on.page.series("inflight_kv_cache_tier_max_bytes", "medium") == {"host": 0, "disk": 0}
        on.publish(metrics=metrics.snapshot())
        page = on.page
    expected = {
        "tier_max_bytes": (1000, 9000), "tier_blocks": (3, 4), "tier_bytes": (300, 464),
        "offload_blocks_total": (5, 6), "offload_bytes_total": (500, 696), "onboard_blocks_total": (2, 1),
        "onboard_bytes_total": (200, 116), "dropped_blocks_total": (2, 2),
    }  # fmt: skip
    for name, (in_host, in_files) in expected.items():
        found = page.series(f"inflight_kv_cache_{name}", "medium")
        assert found == {"host": in_host, "disk": in_files}, name
    assert page.kinds["inflight_kv_cache_tier_blocks"] == "gauge"
    assert page.kinds["inflight_kv_cache_dropped_blocks_total"] == "counter"


def test_every_histogram_has_its_own_observations():
    metrics = ServiceMetrics()
    by_name = {
        "inflight_time_to_first_token_seconds": metrics.time_to_first_token,
        "inflight_inter_token_latency_seconds": metrics.inter_token_latency,
        "inflight_queue_time_seconds": metrics.queue_time,
        "inflight_end_to_end_seconds": metrics.end_to_end,
        "inflight_prompt_tokens": metrics.prompt_tokens,
        "inflight_output_tokens": metrics.output_tokens,
        "inflight_cancel_to_free_seconds": metrics.cancel_to_free,
        "inflight_guide_wait_seconds": metrics.guide_wait,
    }
    assert set(by_name) == {family.name for family in HISTOGRAMS}
    for number, histogram in enumerate(by_name.values(), start=1):
        histogram.observe(7.0, number)
    with stage() as on:
        on.publish(metrics=metrics.snapshot())
        page = on.page
    for number, name in enumerate(by_name, start=1):
        assert (page.value(f"{name}_count"), page.value(f"{name}_sum")) == (number, 7 * number)


@settings(max_examples=examples(40, all=100), deadline=None)
@given(
    st.lists(st.lists(st.floats(0, 200), max_size=20), min_size=1, max_size=5),
)
def test_counters_of_a_histogram_are_consistent_after_every_call(periods):
    """After every call buckets are cumulative, and in the end they are exact."""
    server = FakeMetrics()
    spec = HistogramFamily("h", "help", "seconds", "end_to_end")
    update = FamilyMaker(server.family_class, {}).make(spec)
    metrics, values = ServiceMetrics(), []
    pages: list[Page] = []
    said = server.said
    server.said = lambda *what: (said(*what), pages.append(parse(server.page())))[0]
    for period in periods:
        for value in period:
            metrics.end_to_end.observe(value)
        values += period
        update(MetricValues({}, 0, metrics.snapshot()))
    for page in [*pages, parse(server.page())]:
        buckets = page.cumulative("h")
        assert buckets == sorted(buckets)
    page = parse(server.page())
    assert page.value("h_count") == len(values) == page.value("h_bucket", le="+Inf")
    assert page.value("h_sum") == pytest.approx(sum(values))
    for le, count in page.series("h_bucket", "le").items():
        assert count == sum(value <= float(le) for value in values)


@settings(deadline=None)
@given(st.lists(st.integers(0, 200_000), max_size=30), st.lists(st.integers(0, 200_000), max_size=30))
def test_generated_lengths_reproduce_the_difference_of_two_snapshots(first, then):
    histogram = Histogram(TOKENS)
    for value in first:
        histogram.observe(value)
    before = histogram.snapshot()
    for value in then:
        histogram.observe(value)
    again = Histogram(TOKENS)
    made = list(lengths_between(before, histogram.snapshot()))
    for value in [*first, *made]:
        again.observe(value)
    assert again.snapshot() == histogram.snapshot()
    assert len(made) == len(then) and sum(made) == sum(then)


def test_lengths_are_histograms_of_the_server_with_its_labels():
    lengths = [3, 10, 11, 700, 5000]
    metrics = ServiceMetrics()
    for length in lengths:
        metrics.prompt_tokens.observe(length)
    metrics.output_tokens.observe(60)
    with stage() as on:
        on.publish(metrics=metrics.snapshot())
        on.publish(metrics=metrics.snapshot())
        text, page = on.pb_utils.metrics.page(), on.page
    assert page.kinds["nv_llm_input_token_len"] == page.kinds["nv_llm_output_token_len"] == "histogram"
    assert page.cumulative("nv_llm_input_token_len") == [2, 3, 3, 3, 4, 5]
    assert page.cumulative("nv_llm_output_token_len") == [0, 0, 1, 1, 1, 1]
    assert page.value("nv_llm_input_token_len_sum") == sum(lengths)
    labels = 'model="tensorrt_llm",response_metric_type="total_input_tokens",version="1"'
    for le, count in (("10", 2), ("+Inf", 5)):
        assert f'nv_llm_input_token_len_bucket{{{labels},le="{le}"}} {count}\n' in text


def test_the_buckets_of_lengths_are_a_subset_of_the_counted_ones():
    for family in LENGTHS:
        assert set(family.bounds) <= set(family.read(NOTHING).bounds)


# ---------------------------------------------------------------- threads


def test_only_the_publishers_thread_calls_the_server():
    with stage() as on:
        on.publish()
        assert on.pb_utils.metrics.threads == {"inflight-metrics"}


def test_the_newest_statistics_replace_waiting_ones_without_blocking():
    held, release = threading.Event(), threading.Event()
    lines: list[str] = []

    def hold(line: str) -> None:
        lines.append(line)
        held.set()
        assert release.wait(TIMEOUT_S)

    publisher = MetricsPublisher(FakePbUtils(), "m", "1", hold, seconds_per_call=0.0)
    publisher.put(STATS, NOTHING, NOW)
    assert held.wait(TIMEOUT_S)
    for iteration in range(20, 30):
        publisher.put(replace(STATS, iteration=iteration), NOTHING, NOW)
    release.set()
    publisher.close()
    assert [json.loads(line)["Iteration Counter"] for line in lines] == [17, 29]


def test_close_publishes_the_last_statistics_during_a_pause():
    pb_utils, lines = FakePbUtils(), queue.Queue()
    publisher = MetricsPublisher(pb_utils, "m", "1", lines.put, seconds_per_call=1000.0)
    publisher.put(STATS, NOTHING, NOW)
    lines.get(timeout=TIMEOUT_S)
    publisher.put(replace(STATS, num_active_requests=0), NOTHING, NOW)
    publisher.close()
    assert json.loads(lines.get_nowait())["Active Request Count"] == 0
    assert shown(parse(pb_utils.metrics.page()))["Active Request Count"] == 0
    publisher.close()


def test_flush_publishes_the_last_metrics_during_a_pause():
    pb_utils, lines = FakePbUtils(), queue.Queue()
    publisher = MetricsPublisher(pb_utils, "m", "1", lines.put, seconds_per_call=1000.0)
    publisher.put(STATS, NOTHING, NOW)
    lines.get(timeout=TIMEOUT_S)
    publisher.put(replace(STATS, num_active_requests=0), NOTHING, NOW)
    publisher.flush(TIMEOUT_S)
    assert shown(parse(pb_utils.metrics.page()))["Active Request Count"] == 0
    publisher.close()


def test_a_models_next_process_continues_the_series_and_the_last_deletes_none():
    """Triton loads the next process before it unloads the last, and a deletion would then end the server."""
    pb_utils = FakePbUtils()
    metrics = ServiceMetrics(num_preemptions=2)
    idle = replace(STATS, num_active_requests=0)
    with stage(pb_utils) as last:
        last.publish(STATS, metrics.snapshot())
        with stage(pb_utils) as following:
            following.publish(idle, metrics.snapshot())
            last.publisher.close()
            assert shown(following.page)["Active Request Count"] == 0
            assert following.page.value("inflight_preemptions_total") == 4, "of both"
    del last, following
    assert pb_utils.metrics.deleted == []


def test_close_without_new_statistics_publishes_nothing():
    with stage() as on:
        pass
    assert on.lines.empty()


# ---------------------------------------------------------------- servers that cannot


def messages_of(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records]


@pytest.fixture
def heard(caplog) -> Iterator[pytest.LogCaptureFixture]:
    logger = logging.getLogger("inflight")
    before, logger.propagate = logger.propagate, True
    with caplog.at_level(logging.WARNING, "inflight"):
        yield caplog
    logger.propagate = before


def test_the_log_line_is_written_without_custom_metrics(heard):
    with stage(SimpleNamespace()) as on:
        assert on.publish()["Active Request Count"] == 9
        on.publish()
    assert messages_of(heard) == ["this server has no custom metrics: statistics go to the log only"]


def test_without_histograms_all_other_metrics_are_published(heard):
    with stage(FakePbUtils(FakeMetrics(kinds=("COUNTER", "GAUGE")))) as on:
        fields = on.publish()
        page = on.page
    assert shown(page)["Active Request Count"] == fields["Active Request Count"]
    assert page.has("inflight_end_to_end_seconds_count") and not page.has("nv_llm_input_token_len_count")
    said = messages_of(heard)
    assert len(said) == 2 and all("HISTOGRAM" in line and "is not published" in line for line in said)


def test_a_family_that_the_server_refuses_is_left_out(heard):
    pb_utils = FakePbUtils()
    pb_utils.metrics.failures["nv_trt_llm_request_metrics"] = RuntimeError("not now")
    with stage(pb_utils) as on:
        on.publish()
        assert not on.page.has("nv_trt_llm_request_metrics") and on.page.has("nv_trt_llm_general_metrics")
    assert messages_of(heard) == ["metric nv_trt_llm_request_metrics is not published: not now"]


def test_a_family_that_fails_later_does_not_affect_others(heard):
    with stage() as on:
        on.publish()
        on.pb_utils.metrics.failures["nv_trt_llm_request_metrics"] = RuntimeError("gone")
        later = replace(STATS, num_active_requests=1, num_free_blocks=10)
        on.publish(later)
        on.publish(replace(later, num_free_blocks=20))
        assert shown(on.page)["Free KV cache blocks"] == 20
    assert messages_of(heard) == ["metric nv_trt_llm_request_metrics is not published any more: gone"]


def test_publishing_continues_after_a_log_line_fails(heard):
    iterations: list[int] = []
    failed = threading.Event()

    def log(line: str) -> None:
        iterations.append(json.loads(line)["Iteration Counter"])
        if not failed.is_set():
            failed.set()
            raise OSError("no room")

    publisher = MetricsPublisher(FakePbUtils(), "m", "1", log, seconds_per_call=0.0)
    publisher.put(STATS, NOTHING, NOW)
    assert failed.wait(TIMEOUT_S)
    publisher.put(replace(STATS, iteration=18), NOTHING, NOW)
    publisher.close()
    assert iterations == [17, 18]
    assert messages_of(heard) == ["statistics of iteration 17 were not published"]


# ---------------------------------------------------------------- memory


def fake_torch(initialized: bool, **cuda) -> SimpleNamespace:
    return SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: initialized, **cuda))


def test_device_memory_is_the_memory_reserved_by_torch():
    cuda = {"device_count": lambda: 2, "memory_reserved": lambda device: 100 + device}
    assert _torch_memory(fake_torch(True, **cuda)) == (201, 0)
    cuda["host_memory_stats"] = lambda: {"allocated_bytes.current": 64}
    assert _torch_memory(fake_torch(True, **cuda)) == (201, 64)


@pytest.mark.parametrize(
    "torch",
    [None, SimpleNamespace(), fake_torch(False)],
    ids=["not imported", "being imported", "without a device"],
)
def test_torch_is_not_called_without_a_device_in_use(torch):
    assert _torch_memory(torch) == (0, 0)


def test_resident_memory_grows_with_allocations():
    before = measure_memory().cpu
    with mmap.mmap(-1, 50_000_000) as held:  # pages of its own, because an allocator may have free ones
        held.write(b"x" * len(held))
        assert measure_memory().cpu - before > 40_000_000


def test_measuring_imports_no_torch():
    code = "import sys, inflight.triton.metrics as m; m.measure_memory(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"

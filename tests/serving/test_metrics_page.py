"""The engine's metrics page without a tritonserver has the values of the page with one."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from inflight.core.kv.store_stats import DISK, StoreStats, TierStats
from inflight.core.report.metrics import SECONDS, TOKENS, Histogram, HistogramSnapshot, ServiceMetrics
from inflight.core.report.stats import AdapterStats, MemoryUsage, StaticBatchStats
from inflight.core.request.stop import FinishReason
from inflight.serving.metric_table import FAMILIES, Batching, GaugeFamily, HistogramFamily
from inflight.serving.metrics_page import histogram_lines, metrics_page
from inflight.triton.metrics import MetricsPublisher
from tests.core.test_stats import STATS
from tests.prometheus import Page, parse
from tests.triton.fake_pb_utils import FakePbUtils

NOW = 1_785_000_000.25
MEMORY = MemoryUsage(7_000_000, 8, 9)
LABELS = {"model": "tensorrt_llm", "version": "1"}


def histogram(bounds: tuple[float, ...], *values: float) -> Histogram:
    made = Histogram(bounds)
    for value in values:
        made.observe(value)
    return made


METRICS = ServiceMetrics(
    time_to_first_token=histogram(SECONDS, 0.001, 0.2, 500.0),
    prompt_tokens=histogram(TOKENS, 1, 10, 11, 400, 999, 5000, 200_000),
    output_tokens=histogram(TOKENS, 3),
    finished=Counter({FinishReason.LENGTH: 2, FinishReason.CANCELLED: 1}),
    failed=Counter({"INVALID_ARG": 3}),
    guides=Counter(ready=1),
    running_by_adapter=Counter(sql=2),
    adapters=AdapterStats(4, 3, 2, 1, 5, 6),
    num_generated_tokens=77,
    block_store=StoreStats(64, 3, 192, tiers=(TierStats(DISK, 1000, 3, 240, 4, 320, 2, 160, 1, 80),)),
).snapshot()


def tritons_page(stats, metrics) -> Page:  # type: ignore[no-untyped-def]
    pb_utils = FakePbUtils()
    batching = Batching.INFLIGHT if stats.static_batch is None else Batching.STATIC
    publisher = MetricsPublisher(pb_utils, "tensorrt_llm", "1", lambda text: None, batching, 0.0)
    publisher.put(stats, metrics, NOW, MEMORY)
    publisher.close()
    return parse(pb_utils.metrics.page())


@pytest.mark.parametrize("static_batch", [None, StaticBatchStats(7, 7, 500, 60, 11)], ids=str)
@pytest.mark.parametrize("metrics", [METRICS, ServiceMetrics().snapshot()], ids=["some", "none"])
def test_the_page_has_the_series_and_values_of_tritons(static_batch, metrics) -> None:  # type: ignore[no-untyped-def]
    stats = replace(STATS, static_batch=static_batch)
    page = parse(metrics_page(stats, metrics, NOW, MEMORY, LABELS))
    assert page.values == tritons_page(stats, metrics).values and len(page.values) > 150
    for family in FAMILIES:
        if family.name in page.kinds:
            kind = page.kinds[family.name]
            assert (kind == "histogram") == isinstance(family, HistogramFamily)
            assert kind == "gauge" or not isinstance(family, GaugeFamily)


def test_a_label_with_quotes_is_escaped() -> None:
    metrics = replace(METRICS, running_by_adapter={'a"b\\c\nd': 1})
    page = metrics_page(STATS, metrics, NOW, MEMORY, LABELS)
    assert 'lora_name="a\\"b\\\\c\\nd"} 1\n' in page


def test_the_buckets_of_a_histogram_are_cumulative() -> None:
    snapshot = HistogramSnapshot((0.5, 1.0), (1, 2, 3), 12.5)
    assert list(histogram_lines("x", "help", {"": snapshot}, str)) == [
        "# HELP x help",
        "# TYPE x histogram",
        'x_bucket{le="0.5"} 1',
        'x_bucket{le="1.0"} 3',
        'x_bucket{le="+Inf"} 6',
        "x_sum 12.5",
        "x_count 6",
    ]

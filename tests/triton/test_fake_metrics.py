"""The fake's metrics behave like the real server's where tests rely on it, with the same messages and page."""

from __future__ import annotations

import pytest

from tests.triton.fake_metrics import FakeMetrics, MetricError


@pytest.fixture
def server() -> FakeMetrics:
    return FakeMetrics()


def test_the_fake_page_equals_the_servers_page(server):
    family = server.family_class
    gauge = family(name="g", description="a gauge", kind=family.GAUGE)
    gauge.Metric(labels={"version": "1", "model": "m"}).set(1785000000123456.0)
    histogram = family(name="h", description="a histogram", kind=family.HISTOGRAM)
    metric = histogram.Metric(labels={"model": "m"}, buckets=[1.0, 2.5])
    metric.observe(0.5)
    metric.observe(2.5)
    assert server.page().splitlines() == [
        "# HELP g a gauge",
        "# TYPE g gauge",
        'g{model="m",version="1"} 1785000000123456',
        "# HELP h a histogram",
        "# TYPE h histogram",
        'h_count{model="m"} 2',
        'h_sum{model="m"} 3',
        'h_bucket{model="m",le="1"} 1',
        'h_bucket{model="m",le="2.5"} 2',
        'h_bucket{model="m",le="+Inf"} 2',
    ]


def test_invalid_calls_are_refused_as_by_the_server(server):
    family = server.family_class
    counter = family(name="c", description="", kind=family.COUNTER)
    metric = counter.Metric(labels={})
    with pytest.raises(MetricError, match="monotonically"):
        metric.increment(-1)
    with pytest.raises(MetricError, match="KIND_COUNTER does not support Set"):
        metric.set(1)
    with pytest.raises(MetricError, match="KIND_COUNTER does not support Observe"):
        metric.observe(1)
    with pytest.raises(MetricError, match="Invalid metric name"):
        family(name="a b", description="", kind=family.COUNTER)
    histogram = family(name="h", description="", kind=family.HISTOGRAM)
    with pytest.raises(MetricError, match="Missing required buckets"):
        histogram.Metric(labels={})
    with pytest.raises(AssertionError, match="two kinds of c"):
        family(name="c", description="", kind=family.GAUGE)
    metric.increment(2)
    assert metric.value() == 2


def test_equal_names_and_labels_are_one_series(server):
    make = server.family_class
    one = make(name="c", description="", kind=make.COUNTER).Metric(labels={"model": "m"})
    other = make(name="c", description="", kind=make.COUNTER).Metric(labels={"model": "m"})
    one.increment(2)
    other.increment(3)
    assert 'c{model="m"} 5' in server.page().splitlines()


def test_a_deleted_family_is_noticed(server):
    family = server.family_class(name="g", description="", kind=server.family_class.GAUGE)
    assert server.deleted == []
    del family
    assert server.deleted == ["g"]


def test_a_fake_server_may_lack_a_kind_of_metric():
    assert not hasattr(FakeMetrics(kinds=("COUNTER", "GAUGE")).family_class, "HISTOGRAM")

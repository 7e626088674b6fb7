"""Histograms count observations, and snapshots do not change."""

from __future__ import annotations

import statistics
from dataclasses import FrozenInstanceError, fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.core.report.metrics import SECONDS, TOKENS, Histogram, MetricsSnapshot, ServiceMetrics, seconds
from inflight.core.request.stop import FinishReason


def test_a_value_belongs_to_the_bucket_whose_bound_it_is():
    histogram = Histogram((1.0, 2.5))
    for value in (0.5, 1.0, 1.0001, 2.5, 3.0):
        histogram.observe(value)
    snapshot = histogram.snapshot()
    assert snapshot.counts == (2, 2, 1)
    assert snapshot.num_observations == 5 and snapshot.total == pytest.approx(8.0001)


@given(st.lists(st.tuples(st.floats(0, 200), st.integers(0, 50)), max_size=30))
def test_observing_many_at_once_equals_observing_each(observations):
    at_once, one_by_one = Histogram(SECONDS), Histogram(SECONDS)
    for value, count in observations:
        at_once.observe(value, count)
        for _ in range(count):
            one_by_one.observe(value)
    assert at_once.snapshot().counts == one_by_one.snapshot().counts
    assert at_once.snapshot().total == pytest.approx(one_by_one.snapshot().total)


@given(st.lists(st.floats(0, 200), min_size=1, max_size=50))
def test_cumulative_buckets_count_the_values_up_to_their_bound(values):
    histogram = Histogram(SECONDS)
    for value in values:
        histogram.observe(value)
    snapshot = histogram.snapshot()
    for index, bound in enumerate(snapshot.bounds):
        assert sum(snapshot.counts[: index + 1]) == sum(value <= bound for value in values)
    assert snapshot.total / snapshot.num_observations == pytest.approx(statistics.fmean(values))


def test_bounds_of_buckets_ascend():
    assert list(SECONDS) == sorted(set(SECONDS)) and list(TOKENS) == sorted(set(TOKENS))


def test_a_snapshot_does_not_change_with_its_source():
    metrics = ServiceMetrics()
    metrics.time_to_first_token.observe(0.1)
    metrics.finished[FinishReason.LENGTH] = 1
    before = metrics.snapshot()
    metrics.time_to_first_token.observe(0.1)
    metrics.finished[FinishReason.LENGTH] = 2
    metrics.failed["INTERNAL"] = 1
    metrics.num_preemptions += 1
    assert before.time_to_first_token.num_observations == 1
    assert (before.finished, before.failed, before.num_preemptions) == ({FinishReason.LENGTH: 1}, {}, 0)
    with pytest.raises(FrozenInstanceError):
        before.num_preemptions = 2


def test_a_snapshot_has_every_metric():
    metrics = ServiceMetrics()
    counts = [f.name for f in fields(metrics) if isinstance(getattr(metrics, f.name), int)]
    for number, name in enumerate(counts, start=1):
        setattr(metrics, name, number)
    histograms = [f.name for f in fields(metrics) if isinstance(getattr(metrics, f.name), Histogram)]
    for number, name in enumerate(histograms, start=1):
        getattr(metrics, name).observe(1.0, number)
    snapshot = metrics.snapshot()
    assert {f.name for f in fields(metrics)} == {f.name for f in fields(MetricsSnapshot)}
    assert [getattr(snapshot, name).num_observations for name in histograms] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [getattr(snapshot, name) for name in counts] == list(range(1, 11))


def test_nanoseconds_become_seconds():
    assert seconds(1_500_000_000) == pytest.approx(1.5)

"""The metric families of tritonserver's metrics page: each is created once, and updated with later values.

Runs on the publisher's thread (`metrics.py`). A latency histogram is published as one counter per bucket, so
that an update takes one call per bucket, not one per observation.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from inflight.core.report.metrics import HistogramSnapshot, MetricsSnapshot, ServiceMetrics
from inflight.serving.metric_table import (
    TIMESTAMP,
    CounterFamily,
    Family,
    GaugeFamily,
    HistogramFamily,
    LengthFamily,
    LevelFamily,
)

_CALLS_WITHOUT_PAUSE = 4
_PAUSE_S = 1e-4  # long enough for a waiting thread to wake up and take the GIL

_NOTHING = ServiceMetrics().snapshot()


@dataclass(frozen=True, slots=True)
class MetricValues:
    """The values of all metrics at one moment.

    Attributes:
        fields: Fields of the log line, see `IterationStats.log_fields`.
        time_us: Time of these values, in microseconds since the epoch.
        metrics: Counters and histograms.
    """

    fields: Mapping[str, int | float | str]
    time_us: int
    metrics: MetricsSnapshot


Update = Callable[[MetricValues], None]
"""Function that updates a family's values on the page. It raises the errors of tritonserver's metrics API."""


class FamilyMaker:
    """Creates one model's metric families, counts calls to tritonserver, and releases the GIL between calls.

    Args:
        family_class: `MetricFamily` of `triton_python_backend_utils`.
        labels: Labels of every metric, which name the model.

    Attributes:
        num_calls: Number of calls so far, including those made for updates.
    """

    def __init__(self, family_class: Any, labels: Mapping[str, str]) -> None:
        self._family_class = family_class
        self._labels = dict(labels)
        self.num_calls = 0

    def make(self, spec: Family) -> Update:
        """Put a family on the page and return its update function.

        Raises the errors of tritonserver's metrics API.
        """
        if isinstance(spec, GaugeFamily):
            return _gauges(spec, self)
        if isinstance(spec, LevelFamily):
            return _levels(spec, self)
        if isinstance(spec, CounterFamily):
            return _counters(spec, self)
        return _lengths(spec, self) if isinstance(spec, LengthFamily) else _histogram_counters(spec, self)

    def count_call(self) -> None:
        """Count a call to tritonserver, and release the GIL. Must be called after each call to tritonserver."""
        self.num_calls += 1
        if self.num_calls % _CALLS_WITHOUT_PAUSE == 0:
            time.sleep(_PAUSE_S)

    def family(self, name: str, text: str, kind: str) -> Any:
        """Create a family.

        Raises AttributeError if this tritonserver has no metrics of type `kind`, such as HISTOGRAM.
        """
        made = self._family_class(name=name, description=text, kind=getattr(self._family_class, kind))
        _keep_for_ever(made)
        self.count_call()
        return made

    def metric(self, family: Any, labels: Mapping[str, str], **options: Any) -> Any:
        """Create the series of a family with these labels."""
        made = family.Metric(labels={**self._labels, **labels}, **options)
        self.count_call()
        return made

    def counter(self, family: Any, labels: Mapping[str, str]) -> Callable[[float], None]:
        """Create one series of a counter family, and return a function that raises the counter to a total.

        The function ignores a smaller total, because tritonserver refuses to decrease a counter.
        """
        metric = self.metric(family, labels)
        reached = 0.0

        def grow_to(total: float) -> None:
            nonlocal reached
            if total > reached:
                metric.increment(total - reached)
                self.count_call()
                reached = total

        return grow_to


def _gauges(spec: GaugeFamily, maker: FamilyMaker) -> Update:
    """Make a family of gauges, which show fields of the log line."""
    family = maker.family(spec.name, spec.help, "GAUGE")
    metrics = {gauge.log_key: maker.metric(family, {spec.label: gauge.value}) for gauge in spec.gauges}
    last: dict[str, float] = {}  # published values; those of this model's previous process are unknown

    def update(values: MetricValues) -> None:
        for key, metric in metrics.items():
            value = float(values.time_us if key == TIMESTAMP else values.fields[key])
            if value != last.get(key):
                metric.set(value)
                maker.count_call()
                last[key] = value

    return update


def _counters(spec: CounterFamily, maker: FamilyMaker) -> Update:
    """Make a family of counters. An undeclared label value gets its counter when it is first counted."""
    family = maker.family(spec.name, spec.help, "COUNTER")

    def counter(value: str) -> Callable[[float], None]:
        return maker.counter(family, {spec.label: value} if spec.label else {})

    counters = {value: counter(value) for value in spec.values}

    def update(values: MetricValues) -> None:
        for value, count in spec.read(values.metrics).items():
            if value not in counters:
                counters[value] = counter(value)
            counters[value](count)

    return update


def _levels(spec: LevelFamily, maker: FamilyMaker) -> Update:
    """Make a family of gauges with one label. An undeclared label value gets a series once it is not zero."""
    family = maker.family(spec.name, spec.help, "GAUGE")
    metrics: dict[str, Any] = {}
    last: dict[str, float] = {}

    def update(values: MetricValues) -> None:
        now = spec.read(values.metrics)
        for value in dict.fromkeys((*spec.values, *now, *metrics)):
            if value not in metrics:
                metrics[value] = maker.metric(family, {spec.label: value})
            if (level := float(now.get(value, 0))) != last.get(value):
                metrics[value].set(level)
                maker.count_call()
                last[value] = level

    return update


def _histogram_counters(spec: HistogramFamily, maker: FamilyMaker) -> Update:
    """Make a histogram as counters: NAME_bucket with the label `le`, NAME_sum and NAME_count."""
    buckets = maker.family(f"{spec.name}_bucket", f"{spec.help}; up to le", "COUNTER")
    totals = maker.family(f"{spec.name}_sum", f"{spec.help}; summed up", "COUNTER")
    counts = maker.family(f"{spec.name}_count", f"{spec.help}; how many", "COUNTER")
    labels = [*(format(bound, ".16g") for bound in spec.read(_NOTHING).bounds), "+Inf"]
    grow_buckets = [maker.counter(buckets, {"le": label}) for label in labels]
    grow_total, grow_count = maker.counter(totals, {}), maker.counter(counts, {})

    def update(values: MetricValues) -> None:
        # The widest bucket is updated first, so that a concurrent reader never finds a bucket fuller than a
        # wider one.
        histogram = spec.read(values.metrics)
        up_to = histogram.num_observations
        grow_count(up_to)
        grow_total(histogram.total)
        for grow_to, count in zip(reversed(grow_buckets), reversed(histogram.counts), strict=True):
            grow_to(up_to)
            up_to -= count

    return update


def _lengths(spec: LengthFamily, maker: FamilyMaker) -> Update:
    """Make a histogram of tritonserver's own histogram type, with one observation for each request that ended."""
    family = maker.family(spec.name, spec.help, "HISTOGRAM")
    buckets = [float(bound) for bound in spec.bounds]
    metric = maker.metric(family, {spec.label: spec.value}, buckets=buckets)
    before = spec.read(_NOTHING)

    def update(values: MetricValues) -> None:
        nonlocal before
        now = spec.read(values.metrics)
        for value in lengths_between(before, now):
            metric.observe(float(value))
            maker.count_call()
        before = now

    return update


def _keep_for_ever(family: Any) -> None:
    """Keep the family from being deleted, even when the interpreter exits.

    Triton may start a model's next process before it ends the previous one. Both processes then own the same
    series. If one of them deletes it, writes by the other process make tritonserver 2.51 abort.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(family))


def lengths_between(before: HistogramSnapshot, now: HistogramSnapshot) -> Iterator[int]:
    """Yield integer observations that turn the histogram `before` into `now`: equal bucket counts and equal sum.

    They may differ from the numbers that were really observed, but a histogram with these buckets, or a
    subset of them, has the same contents either way.
    """
    added = [new - old for new, old in zip(now.counts, before.counts, strict=True)]
    lowest = [0, *(int(bound) + 1 for bound in now.bounds)]
    highest = [*(int(bound) for bound in now.bounds), None]
    left = round(now.total - before.total) - sum(n * low for n, low in zip(added, lowest, strict=True))
    for count, low, high in zip(added, lowest, highest, strict=True):
        for _ in range(count):
            more = left if high is None else min(left, high - low)
            left -= more
            yield low + more

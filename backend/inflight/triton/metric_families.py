"""Metric families of `triton_python_backend_utils`, filled from statistics and snapshots.

Owns the server's metric objects and what was last said to them, so that only changes are said. Every call waits
for the server, 20 to 60 µs, with the GIL held. So a histogram of latencies is published as counters, whose calls
are as many as its buckets however much was observed, and other threads get a chance between calls (`Courtesy`).
One thread, the publisher's.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from inflight.core.report.metrics import HistogramSnapshot, MetricsSnapshot, ServiceMetrics
from inflight.triton.metric_table import (
    TIMESTAMP,
    CounterFamily,
    Family,
    GaugeFamily,
    HistogramFamily,
    LengthFamily,
)

_CALLS_WITHOUT_PAUSE = 4
_PAUSE_S = 1e-4  # long enough for a thread that waits for the GIL to wake up and take it

_NOTHING = ServiceMetrics().snapshot()


@dataclass(frozen=True, slots=True)
class News:
    """What is to be published.

    Attributes:
        fields: The log line's, see `IterationStats.log_fields`.
        time_us: Microseconds since the epoch: its timestamp as a number.
        metrics: Taken at the same moment.
    """

    fields: Mapping[str, int | float | str]
    time_us: int
    metrics: MetricsSnapshot


class Published(Protocol):
    """A family on the server's page. What the server says against it is raised."""

    def update(self, news: News) -> None:
        """Show the news."""


class Courtesy:
    """Counts calls to the server, and lets other threads run between them."""

    def __init__(self) -> None:
        self.num_calls = 0

    def called(self) -> None:
        """After each call."""
        self.num_calls += 1
        if self.num_calls % _CALLS_WITHOUT_PAUSE == 0:
            time.sleep(_PAUSE_S)


class _Counter:
    """A counter of the server's that is told totals."""

    def __init__(self, metric: Any, courtesy: Courtesy) -> None:
        self._metric = metric
        self._courtesy = courtesy
        self._total = 0.0

    def grow_to(self, total: float) -> None:
        """Never sends a decrease: the server refuses one."""
        if total > self._total:
            self._metric.increment(total - self._total)
            self._courtesy.called()
            self._total = total


class FamilyMaker:
    """Makes families of one model.

    Args:
        family_class: `MetricFamily` of the module.
        labels: Of every metric: which model.
        courtesy: Is told of every call.
    """

    def __init__(self, family_class: Any, labels: Mapping[str, str], courtesy: Courtesy) -> None:
        self._family_class = family_class
        self._labels = dict(labels)
        self.courtesy = courtesy

    def make(self, spec: Family) -> Published:
        """Put a family on the page. Raises what the server says against it."""
        if isinstance(spec, GaugeFamily):
            return _Gauges(spec, self)
        if isinstance(spec, CounterFamily):
            return _Counters(spec, self)
        return _HistogramCounters(spec, self) if isinstance(spec, HistogramFamily) else _Lengths(spec, self)

    def family(self, name: str, text: str, kind: str) -> Any:
        """`kind` is a constant's name; AttributeError where this server does not have it."""
        made = self._family_class(name=name, description=text, kind=getattr(self._family_class, kind))
        _keep_for_ever(made)
        self.courtesy.called()
        return made

    def metric(self, family: Any, labels: Mapping[str, str], **options: Any) -> Any:
        """One series of a family."""
        made = family.Metric(labels={**self._labels, **labels}, **options)
        self.courtesy.called()
        return made

    def counter(self, family: Any, labels: Mapping[str, str]) -> _Counter:
        """One series of a family of counters."""
        return _Counter(self.metric(family, labels), self.courtesy)


class _Gauges:
    """They show values of the log line."""

    def __init__(self, spec: GaugeFamily, maker: FamilyMaker) -> None:
        self._courtesy = maker.courtesy
        family = maker.family(spec.name, spec.help, "GAUGE")
        self._metrics = {
            gauge.log_key: maker.metric(family, {spec.label: gauge.value}) for gauge in spec.gauges
        }
        self._last: dict[str, float] = {}  # what a predecessor has left there is not known

    def update(self, news: News) -> None:
        for key, metric in self._metrics.items():
            value = float(news.time_us if key == TIMESTAMP else news.fields[key])
            if value != self._last.get(key):
                metric.set(value)
                self._courtesy.called()
                self._last[key] = value


class _Counters:
    def __init__(self, spec: CounterFamily, maker: FamilyMaker) -> None:
        self._spec = spec
        self._maker = maker
        self._family = maker.family(spec.name, spec.help, "COUNTER")
        self._counters: dict[str, _Counter] = {}
        for value in spec.values:
            self._counter(value)

    def update(self, news: News) -> None:
        for value, count in self._spec.read(news.metrics).items():
            self._counter(value).grow_to(count)

    def _counter(self, value: str) -> _Counter:
        if value not in self._counters:
            labels = {self._spec.label: value} if self._spec.label else {}
            self._counters[value] = self._maker.counter(self._family, labels)
        return self._counters[value]


class _HistogramCounters:
    """A histogram as the counters it consists of: name_bucket by `le`, name_sum and name_count."""

    def __init__(self, spec: HistogramFamily, maker: FamilyMaker) -> None:
        self._read = spec.read
        buckets = maker.family(f"{spec.name}_bucket", f"{spec.help}; up to le", "COUNTER")
        total = maker.family(f"{spec.name}_sum", f"{spec.help}; summed up", "COUNTER")
        count = maker.family(f"{spec.name}_count", f"{spec.help}; how many", "COUNTER")
        labels = [*(format(bound, ".16g") for bound in spec.read(_NOTHING).bounds), "+Inf"]
        self._buckets = [maker.counter(buckets, {"le": label}) for label in labels]
        self._total = maker.counter(total, {})
        self._count = maker.counter(count, {})

    def update(self, news: News) -> None:
        """The widest bucket first: who reads meanwhile finds none that is fuller than a wider one."""
        histogram = self._read(news.metrics)
        up_to = histogram.num_observations
        self._count.grow_to(up_to)
        self._total.grow_to(histogram.total)
        for counter, count in zip(reversed(self._buckets), reversed(histogram.counts), strict=True):
            counter.grow_to(up_to)
            up_to -= count


class _Lengths:
    """A histogram of the server's kind, which takes observations one by one: one for each request that ended."""

    def __init__(self, spec: LengthFamily, maker: FamilyMaker) -> None:
        self._read = spec.read
        self._courtesy = maker.courtesy
        family = maker.family(spec.name, spec.help, "HISTOGRAM")
        buckets = [float(bound) for bound in spec.bounds]
        self._metric = maker.metric(family, {spec.label: spec.value}, buckets=buckets)
        self._before = spec.read(_NOTHING)

    def update(self, news: News) -> None:
        now = self._read(news.metrics)
        for value in lengths_between(self._before, now):
            self._metric.observe(float(value))
            self._courtesy.called()
        self._before = now


def _keep_for_ever(family: Any) -> None:
    """Never let it be deleted, not even when the interpreter ends.

    Triton may start a model's next process before it ends the last one. Both have the same series then, and what
    one deletes the other goes on writing to: tritonserver 2.51 aborts.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(family))


def lengths_between(before: HistogramSnapshot, now: HistogramSnapshot) -> Iterator[int]:
    """Whole numbers with which `before` becomes `now`: as many to each bucket, and the same sum.

    They need not be the ones that were observed, but no histogram with these buckets, or some of them, can tell.
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

"""Publishes statistics and metrics on the server's metrics page, and the log line that belongs to them.

Owns one thread, which makes all calls to `triton_python_backend_utils`: each waits for the server, 20 to 60 µs,
with the GIL held, and the loop must not. So only changes are said, other threads get a chance between calls, and a
histogram of latencies is published as counters, whose calls are as many as its buckets however much was observed.
What comes while a publication is under way waits in a mailbox for one, where the newest wins; nothing is lost by
that, since counters only grow. An idle server costs nothing. Does not know where the numbers come from.
"""

from __future__ import annotations

import ctypes
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from inflight.core.report.metrics import HistogramSnapshot, MetricsSnapshot, ServiceMetrics
from inflight.core.report.stats import IterationCounts, MemoryUsage, microseconds
from inflight.serving.memory import measure_memory
from inflight.serving.metric_table import (
    FAMILIES,
    TIMESTAMP,
    Batching,
    CounterFamily,
    Family,
    GaugeFamily,
    HistogramFamily,
    LengthFamily,
    LevelFamily,
)

_SECONDS_PER_CALL = 0.001
"""A call takes about 50 µs with the GIL held: publishing takes a twentieth of the process's Python."""
_LONGEST_PAUSE_S = 0.25
"""Unless thousands of requests a second end, each of which takes two calls."""

_CALLS_WITHOUT_PAUSE = 4
_PAUSE_S = 1e-4  # long enough for a thread that waits for the GIL to wake up and take it

_NOTHING = ServiceMetrics().snapshot()

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Publication:
    stats: IterationCounts
    metrics: MetricsSnapshot
    wall_clock_s: float
    memory: MemoryUsage | None
    engine: int


class MetricsPublisher:
    """Publishes on one thread, from construction to `close`.

    Args:
        pb_utils: The module; metric kinds that it lacks are left out, with a line in the log.
        model_name, model_version: Labels of every metric.
        log_stats: Called on the thread with the JSON of the statistics whenever they are published.
        batching: What the engine does; some families are there with one kind of it alone.
        seconds_per_call: How long to rest after a publication, for each call to the server that it took.
    """

    def __init__(
        self,
        pb_utils: Any,
        model_name: str,
        model_version: str,
        log_stats: Callable[[str], None],
        batching: Batching = Batching.INFLIGHT,
        seconds_per_call: float = _SECONDS_PER_CALL,
    ) -> None:
        self._pb_utils = pb_utils
        self._labels = {"model": model_name, "version": model_version}
        self._log_stats = log_stats
        self._batching = batching
        self._seconds_per_call = seconds_per_call
        self._waiting: _Publication | None = None
        self._engine = 0
        self._change = threading.Condition()
        self._is_publishing = False  # this and the next: under the condition's lock
        self._num_flushing = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="inflight-metrics", daemon=True)
        self._thread.start()

    def put(
        self,
        stats: IterationCounts,
        metrics: MetricsSnapshot,
        wall_clock_s: float,
        memory: MemoryUsage | None = None,
    ) -> None:
        """Publish these instead of others that wait. Never waits.

        Args:
            stats, metrics: What was observed.
            wall_clock_s: When that was, in seconds since the epoch.
            memory: What the engine's process holds; None: it is this one.
        """
        with self._change:
            self._waiting = _Publication(stats, metrics, wall_clock_s, memory, self._engine)
            self._change.notify_all()

    def flush(self, timeout_s: float) -> None:
        """Publish at once what was put until now, and wait until it is on the page, for so long at most."""
        with self._change:
            self._num_flushing += 1
            self._change.notify_all()
            self._change.wait_for(lambda: self._waiting is None and not self._is_publishing, timeout_s)
            self._num_flushing -= 1

    def start_over(self) -> None:
        """Add what follows to what is on the page: it is of another engine, which counts from nothing."""
        with self._change:
            self._waiting = None
            self._engine += 1

    def close(self) -> None:
        """Publish what waits and end the thread; the page keeps what is on it. Idempotent."""
        self._closing.set()
        with self._change:
            self._change.notify_all()
        self._thread.join()

    # ---------------------------------------------------------------- on the thread

    def _run(self) -> None:
        page, engine = self._new_page(), 0
        while (publication := self._wait()) is not None:
            num_before = page.num_calls
            if publication.engine != engine:
                page, engine, num_before = self._new_page(), publication.engine, 0
            try:
                self._publish(publication, page)
            except Exception:  # whatever it is, the thread goes on with the next statistics
                _log.exception("statistics of iteration %d were not published", publication.stats.iteration)
            num_calls = page.num_calls - num_before
            self._rest(min(num_calls * self._seconds_per_call, _LONGEST_PAUSE_S))

    def _new_page(self) -> _Page:
        return _Page(self._pb_utils, self._labels, self._batching)

    def _wait(self) -> _Publication | None:
        """Wait for the next publication; None when there will be none."""
        with self._change:
            self._change.wait_for(lambda: self._waiting is not None or self._closing.is_set())
            publication, self._waiting = self._waiting, None
            self._is_publishing = publication is not None
            return publication

    def _rest(self, seconds: float) -> None:
        """Leave the process's Python to others for so long, unless somebody waits for the page."""
        with self._change:
            self._is_publishing = False
            self._change.notify_all()
            self._change.wait_for(lambda: self._num_flushing or self._closing.is_set(), seconds)

    def _publish(self, publication: _Publication, page: _Page) -> None:
        stats = publication.stats
        memory = publication.memory or measure_memory()
        fields = stats.log_fields(publication.wall_clock_s, memory)
        page.show(MetricValues(fields, microseconds(publication.wall_clock_s), publication.metrics))
        # The page first: who has read the line finds nothing older there.
        self._log_stats(json.dumps(fields))


class _Page:
    """The families that this server takes; one that fails is left out from then on."""

    def __init__(self, pb_utils: Any, labels: dict[str, str], batching: Batching) -> None:
        self._published: dict[str, Update] = {}
        self._maker: FamilyMaker | None = None
        if (family_class := getattr(pb_utils, "MetricFamily", None)) is None:
            _log.warning("this server has no custom metrics: statistics go to the log only")
            return
        self._maker = FamilyMaker(family_class, labels)
        for spec in FAMILIES:
            if isinstance(spec, GaugeFamily) and spec.batching not in (None, batching):
                continue
            try:
                self._published[spec.name] = self._maker.make(spec)
            except Exception as error:  # whatever the server objects to: the other families are published
                _log.warning("metric %s is not published: %s", spec.name, error)

    @property
    def num_calls(self) -> int:
        """Calls to the server so far."""
        return self._maker.num_calls if self._maker else 0

    def show(self, values: MetricValues) -> None:
        """Bring every family up to date."""
        for name, update in list(self._published.items()):
            try:
                update(values)
            except Exception as error:  # the server may object to anything, as above
                del self._published[name]
                _log.warning("metric %s is not published any more: %s", name, error)


@dataclass(frozen=True, slots=True)
class MetricValues:
    """The values of all metrics at one moment.

    Attributes:
        fields: The log line's, see `IterationStats.log_fields`.
        time_us: The moment, in microseconds since the epoch.
        metrics: Counters and histograms at that moment.
    """

    fields: Mapping[str, int | float | str]
    time_us: int
    metrics: MetricsSnapshot


Update = Callable[[MetricValues], None]
"""Brings what a family shows up to date; raises what the server objects to."""


class FamilyMaker:
    """Makes one model's families, counts the calls to the server and lets other threads run between them.

    Args:
        family_class: `MetricFamily` of the module.
        labels: What every metric says: which model it is of.

    Attributes:
        num_calls: Calls so far, those of the families too.
    """

    def __init__(self, family_class: Any, labels: Mapping[str, str]) -> None:
        self._family_class = family_class
        self._labels = dict(labels)
        self.num_calls = 0

    def make(self, spec: Family) -> Update:
        """Put a family on the page; returns what brings it up to date. Raises what the server objects to."""
        if isinstance(spec, GaugeFamily):
            return _gauges(spec, self)
        if isinstance(spec, LevelFamily):
            return _levels(spec, self)
        if isinstance(spec, CounterFamily):
            return _counters(spec, self)
        return _lengths(spec, self) if isinstance(spec, LengthFamily) else _histogram_counters(spec, self)

    def count_call(self) -> None:
        """To be called after each call to the server."""
        self.num_calls += 1
        if self.num_calls % _CALLS_WITHOUT_PAUSE == 0:
            time.sleep(_PAUSE_S)

    def family(self, name: str, text: str, kind: str) -> Any:
        """A family of the server's. `kind` names a constant; AttributeError where this server has no such kind."""
        made = self._family_class(name=name, description=text, kind=getattr(self._family_class, kind))
        _keep_for_ever(made)
        self.count_call()
        return made

    def metric(self, family: Any, labels: Mapping[str, str], **options: Any) -> Any:
        """One series of a family."""
        made = family.Metric(labels={**self._labels, **labels}, **options)
        self.count_call()
        return made

    def counter(self, family: Any, labels: Mapping[str, str]) -> Callable[[float], None]:
        """One series of a family of counters; returns what raises it to a total.

        It never sends a decrease, which the server refuses.
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
    """A family of gauges, which show values of the log line."""
    family = maker.family(spec.name, spec.help, "GAUGE")
    metrics = {gauge.log_key: maker.metric(family, {spec.label: gauge.value}) for gauge in spec.gauges}
    last: dict[str, float] = {}  # what a predecessor has left there is not known

    def update(values: MetricValues) -> None:
        for key, metric in metrics.items():
            value = float(values.time_us if key == TIMESTAMP else values.fields[key])
            if value != last.get(key):
                metric.set(value)
                maker.count_call()
                last[key] = value

    return update


def _counters(spec: CounterFamily, maker: FamilyMaker) -> Update:
    """A family of counters; values of its label that are not declared get a counter when they are counted."""
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
    """A family of gauges by one label; a value that is not declared gets its series when it is first not 0."""
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
    """A histogram as the counters it consists of: name_bucket by `le`, name_sum and name_count."""
    buckets = maker.family(f"{spec.name}_bucket", f"{spec.help}; up to le", "COUNTER")
    totals = maker.family(f"{spec.name}_sum", f"{spec.help}; summed up", "COUNTER")
    counts = maker.family(f"{spec.name}_count", f"{spec.help}; how many", "COUNTER")
    labels = [*(format(bound, ".16g") for bound in spec.read(_NOTHING).bounds), "+Inf"]
    grow_buckets = [maker.counter(buckets, {"le": label}) for label in labels]
    grow_total, grow_count = maker.counter(totals, {}), maker.counter(counts, {})

    def update(values: MetricValues) -> None:
        # The widest bucket first: who reads meanwhile finds none that is fuller than a wider one.
        histogram = spec.read(values.metrics)
        up_to = histogram.num_observations
        grow_count(up_to)
        grow_total(histogram.total)
        for grow_to, count in zip(reversed(grow_buckets), reversed(histogram.counts), strict=True):
            grow_to(up_to)
            up_to -= count

    return update


def _lengths(spec: LengthFamily, maker: FamilyMaker) -> Update:
    """A histogram of the server's kind, which takes observations one by one: one for each request that ended."""
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
    """Never let the family be deleted, not even when the interpreter ends.

    Triton may start a model's next process before it ends the last one. Both have the same series then, and what
    one deletes the other goes on writing to: tritonserver 2.51 aborts.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(family))


def lengths_between(before: HistogramSnapshot, now: HistogramSnapshot) -> Iterator[int]:
    """Whole numbers that turn `before` into `now`: as many in each bucket, and the same sum.

    They need not be those that were observed, but no histogram with these buckets, or some of them, can tell.
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

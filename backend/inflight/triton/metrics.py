"""Publishes statistics and metrics on the server's metrics page, and the log line that belongs to them.

Owns one thread, which makes all calls to `triton_python_backend_utils`: they wait for the server, and the loop
must not. What comes while a publication is under way waits in a mailbox for one, where the newest wins; nothing is
lost by that, since counters only grow. An idle server costs nothing. Does not know where the numbers come from.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from inflight.core.report.metrics import MetricsSnapshot
from inflight.core.report.stats import IterationStats, MemoryUsage, microseconds
from inflight.serving.memory import measure_memory
from inflight.triton.metric_families import Courtesy, FamilyMaker, News, Published
from inflight.triton.metric_table import FAMILIES, Batching, GaugeFamily

_SECONDS_PER_CALL = 0.001
"""A call takes about 50 µs with the GIL held: publishing takes a twentieth of the process's Python."""
_LONGEST_PAUSE_S = 0.25
"""Unless thousands of requests a second end, each of which takes two calls."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Publication:
    stats: IterationStats
    metrics: MetricsSnapshot
    wall_clock_s: float
    memory: MemoryUsage | None
    engine: int


class MetricsPublisher:
    """One thread, from construction to `close`."""

    def __init__(
        self,
        pb_utils: Any,
        model_name: str,
        model_version: str,
        log_stats: Callable[[str], None],
        seconds_per_call: float = _SECONDS_PER_CALL,
    ) -> None:
        """Args:
        pb_utils: The module; metric kinds that it lacks are left out, with a line in the log.
        model_name, model_version: Labels of every metric.
        log_stats: Takes the JSON of the statistics whenever they are published. Called on the thread.
        seconds_per_call: How long to rest after a publication, for each call to the server that it took.
        """
        self._pb_utils = pb_utils
        self._labels = {"model": model_name, "version": model_version}
        self._log_stats = log_stats
        self._seconds_per_call = seconds_per_call
        self._waiting: _Publication | None = None
        self._engine = 0
        self._change = threading.Condition()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="inflight-metrics", daemon=True)
        self._thread.start()

    def put(
        self,
        stats: IterationStats,
        metrics: MetricsSnapshot,
        wall_clock_s: float,
        memory: MemoryUsage | None = None,
    ) -> None:
        """Publish these instead of others that wait. Never waits.

        Args:
            stats, metrics: What was observed.
            wall_clock_s: When.
            memory: What the engine's process holds; None: it is this one.
        """
        with self._change:
            self._waiting = _Publication(stats, metrics, wall_clock_s, memory, self._engine)
            self._change.notify()

    def start_over(self) -> None:
        """What follows is of another engine, which counts from nothing: it is added to what is on the page."""
        with self._change:
            self._waiting = None
            self._engine += 1

    def close(self) -> None:
        """Publish what waits and end the thread; the page keeps what is on it. Idempotent."""
        self._closing.set()
        with self._change:
            self._change.notify()
        self._thread.join()

    # ---------------------------------------------------------------- on the thread

    def _run(self) -> None:
        courtesy = Courtesy()
        page, engine = _Page(self._pb_utils, self._labels, courtesy), 0
        while (publication := self._take()) is not None:
            num_before = courtesy.num_calls
            if publication.engine != engine:
                page, engine = _Page(self._pb_utils, self._labels, courtesy), publication.engine
            try:
                self._publish(publication, page)
            except Exception:
                _log.exception("statistics of iteration %d were not published", publication.stats.iteration)
            num_calls = courtesy.num_calls - num_before
            self._closing.wait(min(num_calls * self._seconds_per_call, _LONGEST_PAUSE_S))

    def _take(self) -> _Publication | None:
        """The next, or None when there will be none."""
        with self._change:
            while self._waiting is None and not self._closing.is_set():
                self._change.wait()
            publication, self._waiting = self._waiting, None
            return publication

    def _publish(self, publication: _Publication, page: _Page) -> None:
        stats = publication.stats
        memory = publication.memory or measure_memory()
        fields = stats.log_fields(publication.wall_clock_s, memory)
        batching = Batching.INFLIGHT if stats.static_batch is None else Batching.STATIC
        page.show(News(fields, microseconds(publication.wall_clock_s), publication.metrics), batching)
        # The page first: who has read the line finds nothing older there.
        self._log_stats(json.dumps(fields))


class _Page:
    """The families that this server takes; one that fails is left out from then on."""

    def __init__(self, pb_utils: Any, labels: dict[str, str], courtesy: Courtesy) -> None:
        self._published: dict[str, Published] = {}
        self._batching: Batching | None = None  # known with the first statistics
        self._maker: FamilyMaker | None = None
        if (family_class := getattr(pb_utils, "MetricFamily", None)) is None:
            _log.warning("this server has no custom metrics: statistics go to the log only")
            return
        self._maker = FamilyMaker(family_class, labels, courtesy)
        self._add_families(None)

    def show(self, news: News, batching: Batching) -> None:
        """Bring every family up to date."""
        if self._batching is None:
            self._batching = batching
            self._add_families(batching)
        for name, family in list(self._published.items()):
            try:
                family.update(news)
            except Exception as error:
                del self._published[name]
                _log.warning("metric %s is not published any more: %s", name, error)

    def _add_families(self, batching: Batching | None) -> None:
        """Those of a kind of batching, or those that are there with every kind."""
        if self._maker is None:
            return
        for spec in FAMILIES:
            if (spec.batching if isinstance(spec, GaugeFamily) else None) is not batching:
                continue
            try:
                self._published[spec.name] = self._maker.make(spec)
            except Exception as error:
                _log.warning("metric %s is not published: %s", spec.name, error)

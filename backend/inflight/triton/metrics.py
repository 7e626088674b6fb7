"""Publish statistics and metrics on tritonserver's metrics page, and log the statistics.

Owns one thread, which makes all calls to `triton_python_backend_utils`. Each call waits for tritonserver for
20 to 60 µs and holds the GIL, so the loop must not make such calls. Only changes are published, and the GIL
is released between calls. Statistics that arrive during a publication wait in a mailbox of size one, where
newer statistics replace older ones; nothing is lost, because counters only grow. Nothing is published while
the server is idle.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from inflight.core.report.metrics import MetricsSnapshot
from inflight.core.report.stats import IterationCounts, MemoryUsage, microseconds
from inflight.serving.memory import measure_memory
from inflight.serving.metric_table import FAMILIES, Batching, GaugeFamily
from inflight.triton.metric_families import FamilyMaker, MetricValues, Update

_SECONDS_PER_CALL = 0.001
"""Pause in seconds per call. A call holds the GIL for about 50 µs, so publishing holds it a twentieth of the
time."""
_LONGEST_PAUSE_S = 0.25
"""Longest pause in seconds, reached only if thousands of requests, with two calls each, end per second."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Publication:
    stats: IterationCounts
    metrics: MetricsSnapshot
    wall_clock_s: float
    memory: MemoryUsage | None
    engine: int


class MetricsPublisher:
    """Publishes on its own thread, from construction to `close`.

    Args:
        pb_utils: The module `triton_python_backend_utils`. Metrics of types that it lacks are not published;
            a log line names them.
        model_name, model_version: Labels of every metric.
        log_stats: Called on the publisher's thread at each publication, with the statistics as JSON.
        batching: Batching mode of the engine. Some families exist for one mode only.
        seconds_per_call: Pause after a publication, in seconds per call to the server that it took.
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
        self._is_publishing = False  # this and the next: guarded by the condition's lock
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
        """Queue statistics for publication, replacing statistics that still wait. Never blocks.

        Args:
            stats, metrics: Statistics and metrics of the iteration.
            wall_clock_s: Time of the observation, in seconds since the epoch.
            memory: Memory of the engine's process; None if the engine is in this process.
        """
        with self._change:
            self._waiting = _Publication(stats, metrics, wall_clock_s, memory, self._engine)
            self._change.notify_all()

    def flush(self, timeout_s: float) -> None:
        """Publish queued statistics now, and wait at most `timeout_s` seconds until they are on the page."""
        with self._change:
            self._num_flushing += 1
            self._change.notify_all()
            self._change.wait_for(lambda: self._waiting is None and not self._is_publishing, timeout_s)
            self._num_flushing -= 1

    def start_over(self) -> None:
        """Add the counters of a new engine, which start at 0, to the values on the page."""
        with self._change:
            self._waiting = None
            self._engine += 1

    def close(self) -> None:
        """Publish queued statistics and end the thread. The page keeps its values. Idempotent."""
        self._closing.set()
        with self._change:
            self._change.notify_all()
        self._thread.join()

    # ---------------------------------------------------------------- on the publisher's thread

    def _run(self) -> None:
        page, engine = self._new_page(), 0
        while (publication := self._wait()) is not None:
            num_before = page.num_calls
            if publication.engine != engine:
                page, engine, num_before = self._new_page(), publication.engine, 0
            try:
                self._publish(publication, page)
            except Exception:  # after any error the thread goes on with the next statistics
                _log.exception("statistics of iteration %d were not published", publication.stats.iteration)
            num_calls = page.num_calls - num_before
            self._rest(min(num_calls * self._seconds_per_call, _LONGEST_PAUSE_S))

    def _new_page(self) -> _Page:
        return _Page(self._pb_utils, self._labels, self._batching)

    def _wait(self) -> _Publication | None:
        """Wait for the next publication. Returns None after `close`."""
        with self._change:
            self._change.wait_for(lambda: self._waiting is not None or self._closing.is_set())
            publication, self._waiting = self._waiting, None
            self._is_publishing = publication is not None
            return publication

    def _rest(self, seconds: float) -> None:
        """Leave the GIL to other threads for `seconds`, unless a caller of `flush` waits."""
        with self._change:
            self._is_publishing = False
            self._change.notify_all()
            self._change.wait_for(lambda: self._num_flushing or self._closing.is_set(), seconds)

    def _publish(self, publication: _Publication, page: _Page) -> None:
        stats = publication.stats
        memory = publication.memory or measure_memory()
        fields = stats.log_fields(publication.wall_clock_s, memory)
        page.show(MetricValues(fields, microseconds(publication.wall_clock_s), publication.metrics))
        # The page is updated before the log line is written, so that it is never older than the log.
        self._log_stats(json.dumps(fields))


class _Page:
    """The metric families that this tritonserver accepts. A family whose update fails is not updated again."""

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
            except Exception as error:  # tritonserver may raise anything; other families are still published
                _log.warning("metric %s is not published: %s", spec.name, error)

    @property
    def num_calls(self) -> int:
        """Number of calls to the server so far."""
        return self._maker.num_calls if self._maker else 0

    def show(self, values: MetricValues) -> None:
        """Update every family."""
        for name, update in list(self._published.items()):
            try:
                update(values)
            except Exception as error:  # tritonserver may raise anything
                del self._published[name]
                _log.warning("metric %s is not published any more: %s", name, error)

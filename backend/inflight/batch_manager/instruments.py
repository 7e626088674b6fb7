"""What watches the loop beside its callbacks: recorder, watchdog, rings of statistics, metrics. All optional.

The loop says what happens; this hands it on to whoever is there. Called on the loop thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from inflight.batch_manager.statistics_rings import StatisticsRings
from inflight.batch_manager.watchdog import Watchdog
from inflight.core.ports import Recorder, ReturnMetricsCallback
from inflight.core.report.metrics import MetricsSnapshot
from inflight.core.report.stats import IterationStats, MemoryUsage
from inflight.core.request.request import IterationInput
from inflight.core.schedule.batch import ModelOutput, ScheduledBatch
from inflight.core.scheduler import Scheduler
from inflight.errors import InflightError


@dataclass(frozen=True, slots=True)
class Instruments:
    """The instruments.

    Attributes:
        recorder: Writes a trace for `replay`.
        watchdog: Notices an iteration that does not end.
        rings: Keep the statistics of the last iterations.
        return_metrics: Takes statistics and metrics, as often as statistics are reported.
        measure_memory: What this process holds now. Any thread.
    """

    recorder: Recorder | None = None
    watchdog: Watchdog | None = None
    rings: StatisticsRings | None = None
    return_metrics: ReturnMetricsCallback | None = None
    measure_memory: Callable[[], MemoryUsage] = MemoryUsage

    def begin(self, iteration: int, scheduler: Scheduler) -> None:
        """An iteration begins that has something to do."""
        if self.watchdog is not None:
            self.watchdog.begin(iteration, lambda: _describe(scheduler))

    def scheduled(self, inputs: IterationInput, batch: ScheduledBatch | None) -> None:
        """Its batch is made, and about to run."""
        if self.recorder is not None:
            self.recorder.begin(inputs, batch)

    def answered(self, outcome: ModelOutput | InflightError, now_ns: int) -> None:
        """The device has answered, or raised."""
        if self.recorder is None:
            return
        if isinstance(outcome, InflightError):
            self.recorder.end(None, outcome, now_ns)
        else:
            self.recorder.end(outcome, None, now_ns)

    def end(self) -> None:
        """The iteration is over, its responses are sent."""
        if self.watchdog is not None:
            self.watchdog.end()

    @property
    def wants_every_iteration(self) -> bool:
        """Whether statistics of every iteration are wanted, and not of one in a period."""
        return self.rings is not None and self.rings.is_on

    def keep(self, stats: IterationStats, scheduler: Scheduler, batch: ScheduledBatch | None) -> None:
        """Put statistics into the rings."""
        if self.rings is not None:
            self.rings.add(stats, scheduler.request_stats(batch) if self.rings.wants_requests else ())

    def tell(self, stats: IterationStats, metrics: MetricsSnapshot) -> None:
        """Publish metrics."""
        if self.return_metrics is not None:
            self.return_metrics(stats, metrics)

    def close(self) -> None:
        """End every instrument. Idempotent."""
        if self.watchdog is not None:
            self.watchdog.close()
        if self.recorder is not None:
            self.recorder.close()


NO_INSTRUMENTS = Instruments()


def _describe(scheduler: Scheduler) -> str:
    """For the watchdog's log; asked by its thread, and only while the loop hangs."""
    running = scheduler.running_sequences
    in_flight = [r for r in running if r.num_scheduled_tokens]
    ids = ", ".join(str(request_id) for request_id in dict.fromkeys(r.request_id for r in in_flight))
    num_tokens = sum(r.num_scheduled_tokens for r in in_flight)
    return (
        f"{len(in_flight)} of {len(running)} running sequences are in it with {num_tokens} tokens, "
        f"of requests {ids or '(none)'}"
    )

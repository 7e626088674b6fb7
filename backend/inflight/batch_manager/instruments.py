"""Observers of the loop: recorder, watchdog, recent statistics, metrics, answers to `state`.

All observers except the answers are optional, and none influences the schedule. The loop reports events on its own
thread; the watchdog has another thread, and any thread may read statistics and ask for the state.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from inflight.batch_manager.kv_event_buffer import KvEventBuffer
from inflight.batch_manager.recording import JsonRecorder
from inflight.batch_manager.statistics_rings import StatisticsRings
from inflight.batch_manager.watchdog import Watchdog, all_stacks
from inflight.core.ports import ReturnMetricsCallback
from inflight.core.report.metrics import MetricsSnapshot
from inflight.core.report.reports import ReportKind, Reports
from inflight.core.report.stats import (
    IterationCounts,
    KeptIteration,
    MemoryUsage,
)
from inflight.core.request.request import IterationInput
from inflight.core.schedule.batch import ModelOutput, ScheduledBatch
from inflight.core.scheduler import Scheduler
from inflight.errors import InflightError, Unavailable
from inflight.executor_stats import iteration_stats, request_stats

if TYPE_CHECKING:
    from inflight.batch_manager.kv_event_publisher import KvEventPublisher  # imports pyzmq


@dataclass(frozen=True, slots=True)
class Instruments:
    """The loop's instruments, each of which is optional.

    Attributes:
        recorder: Writes a trace for `replay`.
        watchdog: Detects an iteration that does not end.
        rings: Keeps the statistics of the last iterations.
        kv_events: Keeps KV cache events.
        kv_publisher: Publishes KV cache events.
        return_metrics: Called with statistics and metrics whenever statistics are reported.
        measure_memory: Returns the process's current memory. Any thread.
    """

    recorder: JsonRecorder | None = None
    watchdog: Watchdog | None = None
    rings: StatisticsRings | None = None
    kv_events: KvEventBuffer | None = None
    kv_publisher: KvEventPublisher | None = None
    return_metrics: ReturnMetricsCallback | None = None
    measure_memory: Callable[[], MemoryUsage] = MemoryUsage

    def begin(self, iteration: int, scheduler: Scheduler) -> None:
        """Record the beginning of an iteration with work."""
        if self.watchdog is not None:
            self.watchdog.begin(iteration, lambda: _describe(scheduler))

    def scheduled(self, inputs: IterationInput, batch: ScheduledBatch | None) -> None:
        """Record the iteration's inputs and batch, before it runs."""
        if self.recorder is not None:
            self.recorder.begin(inputs, batch)

    def answered(self, outcome: ModelOutput | InflightError, now_ns: int) -> None:
        """Record the result or the error of the oldest batch in flight."""
        if self.recorder is not None:
            self.recorder.end(outcome, now_ns)

    def end(self) -> None:
        """Record that the iteration has ended and its responses have been passed on."""
        if self.watchdog is not None:
            self.watchdog.end()

    @property
    def wants_every_iteration(self) -> bool:
        """Whether statistics of every iteration are wanted, instead of one per period."""
        return self.rings is not None and self.rings.is_on

    def keep(self, stats: IterationCounts, scheduler: Scheduler, batch: ScheduledBatch | None) -> None:
        """Add statistics to the rings."""
        if self.rings is not None:
            self.rings.add(stats, scheduler.request_stats(batch) if self.rings.wants_requests else ())

    def collect(self, scheduler: Scheduler) -> None:
        """Pass on the scheduler's KV cache events."""
        if events := scheduler.take_kv_events():
            for receiver in (self.kv_events, self.kv_publisher):
                if receiver is not None:
                    receiver.add(events)

    def publish(self, stats: IterationCounts, metrics: MetricsSnapshot) -> None:
        """Call `return_metrics`, if set, with an iteration's statistics and metrics."""
        if self.return_metrics is not None:
            self.return_metrics(stats, metrics)

    def reports(self, kind: ReportKind, timeout_s: float | None) -> Reports:
        """Return the reports kept since the last call; waits up to `timeout_s` seconds for KV cache events. Any
        thread.

        With `timeout_s` None, waits until there are events.
        """
        if kind is ReportKind.KV_EVENTS:
            return Reports(kv_events=tuple(self.kv_events.take(timeout_s)) if self.kv_events else ())
        if self.rings is None:
            return Reports()
        if kind is ReportKind.REQUESTS:
            return Reports(requests=tuple(self.rings.latest_requests()))
        return Reports(iterations=tuple(self.rings.latest()), memory=self.measure_memory())

    def close(self) -> None:
        """Stop the watchdog, the recorder, and the buffer and the publisher of KV cache events. Idempotent."""
        if self.watchdog is not None:
            self.watchdog.close()
        if self.recorder is not None:
            self.recorder.close()
        if self.kv_events is not None:
            self.kv_events.close()
        if self.kv_publisher is not None:
            self.kv_publisher.close()


NO_INSTRUMENTS = Instruments()


def _describe(scheduler: Scheduler) -> str:
    """Return a summary of the current iteration; for the watchdog's thread, while the loop hangs."""
    running = scheduler.running_sequences
    in_flight = [r for r in running if r.num_scheduled_tokens]
    ids = ", ".join(str(request_id) for request_id in dict.fromkeys(r.request_id for r in in_flight))
    num_tokens = sum(r.num_scheduled_tokens for r in in_flight)
    return (
        f"{len(in_flight)} of {len(running)} running sequences are in it with {num_tokens} tokens, "
        f"of requests {ids or '(none)'}"
    )


_ENDED = "the generation loop has ended"
_RECENT = 10
"""Number of iterations whose statistics are part of an answer to a `state` request."""

_Answer = TypeVar("_Answer")


class _Question(Generic[_Answer]):
    """A function of the current iteration's batch, which the loop calls, and its result."""

    def __init__(self, ask: Callable[[ScheduledBatch | None], _Answer]) -> None:
        self.result: Future[_Answer] = Future()
        self._ask = ask

    def answer(self, batch: ScheduledBatch | None) -> None:
        """Call the function on the loop thread, unless nobody waits for its result any more."""
        if self.result.set_running_or_notify_cancel():
            try:
                self.result.set_result(self._ask(batch))
            except Exception as error:  # the asking thread gets the error; the loop continues
                self.result.set_exception(error)

    def refuse(self) -> None:
        """Answer that the loop has ended."""
        if self.result.set_running_or_notify_cancel():
            self.result.set_exception(Unavailable(_ENDED))


class Inspections:
    """Questions about the scheduler's state, asked on any thread and answered by the loop between two iterations.

    If the loop does not answer in time, the asking thread makes an answer without it: the stuck iteration, the
    stacks of all threads, and the scheduler's state in this iteration.
    """

    def __init__(self, scheduler: Scheduler, instruments: Instruments) -> None:
        self._scheduler = scheduler
        self._instruments = instruments
        self._questions: deque[_Question[Any]] = deque()
        self._is_closed = False

    def ask(self, timeout_s: float, notify: Callable[[], None]) -> str:
        """Return the loop's state as JSON; raises Unavailable once the loop has ended. Not on the loop thread."""
        scheduler = self._scheduler
        answer = self._ask(lambda batch: (scheduler.state(), scheduler.stats(None)), notify)
        try:
            state, stats = answer.result(timeout_s)
        except NotInTime:
            answer.cancel()
            return json.dumps(self._without_the_loop(timeout_s))
        memory = self._instruments.measure_memory()
        statistics = iteration_stats(KeptIteration(stats, time.time()), memory).to_plain()
        return json.dumps({"state": asdict(state), "statistics": statistics, **self._recent(memory)})

    def metrics(self, timeout_s: float | None, notify: Callable[[], None]) -> Reports:
        """Return the statistics of the current iteration and the metrics after it, without them if it does not
        end in time or the loop has ended. Not on the loop thread."""
        scheduler = self._scheduler
        try:
            answer = self._ask(lambda batch: (scheduler.stats(batch), scheduler.metrics()), notify)
            return Reports(metrics=answer.result(timeout_s), memory=self._instruments.measure_memory())
        except (NotInTime, Unavailable):
            return Reports()

    def ask_loop(
        self, ask: Callable[[ScheduledBatch | None], _Answer], notify: Callable[[], None]
    ) -> _Answer:
        """Let the loop call `ask` after its current iteration, and return the result, or raise the error.

        Raises Unavailable once the loop has ended. Not on the loop thread.
        """
        return self._ask(ask, notify).result()

    def _ask(
        self, ask: Callable[[ScheduledBatch | None], _Answer], notify: Callable[[], None]
    ) -> Future[_Answer]:
        """Let the loop call `ask` after its current iteration. Raises Unavailable once the loop has ended."""
        question = _Question(ask)
        self._questions.append(question)
        if self._is_closed:
            raise Unavailable(_ENDED)
        notify()
        return question.result

    def answer(self, batch: ScheduledBatch | None) -> None:
        """Answer all questions after an iteration with this batch. Loop thread, between two iterations."""
        while self._questions:
            self._questions.popleft().answer(batch)

    def close(self) -> None:
        """Answer all questions, and later ones, with Unavailable, as the loop has ended. Idempotent."""
        self._is_closed = True
        while self._questions:
            self._questions.popleft().refuse()

    def _without_the_loop(self, waited_s: float) -> dict[str, object]:
        watchdog = self._instruments.watchdog
        return {
            "unanswered": f"the generation loop finished no iteration within {waited_s:g} s",
            "stuck": watchdog.stuck() if watchdog else None,
            "state": self._left_behind(),
            **self._recent(self._instruments.measure_memory()),
            "threads": all_stacks().splitlines(),
        }

    def _left_behind(self) -> dict[str, object] | None:
        """Return the scheduler's state, read on this thread; None if that fails because the loop changes it."""
        try:
            return asdict(self._scheduler.state())
        except Exception:  # the loop may change the state at any moment
            return None

    def _recent(self, memory: MemoryUsage) -> dict[str, object]:
        """Return the statistics of recent iterations, and of their requests if these are kept."""
        rings = self._instruments.rings
        if rings is None:
            return {"recent_iterations": [], "recent_requests": []}
        return {
            "recent_iterations": [iteration_stats(entry, memory).to_plain() for entry in rings.peek(_RECENT)],
            "recent_requests": [request_stats(entry).to_plain() for entry in rings.peek_requests(_RECENT)],
        }

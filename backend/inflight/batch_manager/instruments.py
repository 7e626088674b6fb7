"""Observers of the loop: recorder, watchdog, recent statistics, metrics, answers to `state`.

Everything but the answers is optional, and none of it decides anything. The loop reports events on its own thread;
the watchdog has its own thread, and any thread may read statistics and ask for the state.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Generic, TypeVar

from inflight.batch_manager.kv_event_buffer import KvEventBuffer
from inflight.batch_manager.recording import JsonRecorder
from inflight.core.ports import ReturnMetricsCallback
from inflight.core.report.metrics import MetricsSnapshot
from inflight.core.report.reports import ReportKind, Reports
from inflight.core.report.state import SchedulerState
from inflight.core.report.stats import (
    IterationStats,
    KeptIteration,
    MemoryUsage,
    RequestStats,
    RequestStatsPerIteration,
)
from inflight.core.request.request import IterationInput
from inflight.core.schedule.batch import ModelOutput, ScheduledBatch
from inflight.core.scheduler import Scheduler
from inflight.errors import InflightError, Unavailable
from inflight.executor_stats import iteration_stats, request_stats

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class StatisticsRings:
    """The statistics of recent iterations, and of every request in them, as kept for the Executor API.

    The loop thread adds; any thread may read, and makes JSON in its own time.

    Args:
        max_iterations: Number of iterations to keep; 0 keeps none.
        max_request_iterations: Number of iterations whose statistics of every request are kept; 0 keeps none.
        clock_s: Seconds since the epoch; injected by tests.
    """

    def __init__(
        self,
        max_iterations: int = 1000,
        max_request_iterations: int = 0,
        clock_s: Callable[[], float] = time.time,
    ) -> None:
        self._iterations: _Ring[KeptIteration] = _Ring(max_iterations)
        self._requests: _Ring[RequestStatsPerIteration] = _Ring(max_request_iterations)
        self._clock_s = clock_s
        self._lock = threading.Lock()

    @property
    def is_on(self) -> bool:
        """Whether any statistics are kept."""
        return self._iterations.size > 0 or self.wants_requests

    @property
    def wants_requests(self) -> bool:
        """Whether statistics of every request are kept, whose cost grows with the number of requests."""
        return self._requests.size > 0

    def add(self, stats: IterationStats, request_stats: tuple[RequestStats, ...] = ()) -> None:
        """Add the statistics of one iteration. Loop thread."""
        entry = KeptIteration(stats, self._clock_s())
        with self._lock:
            self._iterations.add(entry)
            if self.wants_requests:
                self._requests.add(RequestStatsPerIteration(stats.iteration, request_stats))

    def latest(self) -> list[KeptIteration]:
        """Return statistics since the last call, oldest first: the Executor's `getLatestIterationStats`."""
        with self._lock:
            return self._iterations.new_values()

    def latest_requests(self) -> list[RequestStatsPerIteration]:
        """Return request statistics since the last call, oldest first: the Executor's `getLatestRequestStats`."""
        with self._lock:
            return self._requests.new_values()

    def peek(self, count: int) -> list[KeptIteration]:
        """Return the last `count` statistics, oldest first, without taking them from `latest`."""
        with self._lock:
            return self._iterations.last(count)

    def peek_requests(self, count: int) -> list[RequestStatsPerIteration]:
        """Return the last `count` request statistics, oldest first, without taking them from `latest_requests`."""
        with self._lock:
            return self._requests.last(count)


class _Ring(Generic[_T]):
    """The last `size` values, and how many of them are new. Not thread-safe."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._kept: deque[_T] = deque(maxlen=size)
        self._num_new = 0

    def add(self, value: _T) -> None:
        self._kept.append(value)
        self._num_new = min(self._num_new + 1, self.size)

    def new_values(self) -> list[_T]:
        values = self.last(self._num_new)
        self._num_new = 0
        return values

    def last(self, count: int) -> list[_T]:
        first = max(0, len(self._kept) - max(0, count))
        return list(islice(self._kept, first, None))


@dataclass(slots=True)
class _Run:
    """One iteration; `next_report_s` is the duration at which the log is written next."""

    iteration: int
    describe: Callable[[], str]
    begun_s: float
    next_report_s: float
    is_reported: bool = False


class Watchdog:
    """Detects an iteration that does not end, and logs the stacks of all threads.

    Owns one daemon thread, which sleeps until an iteration begins and, while iterations run, wakes at most twice
    per timeout. An iteration costs the loop thread a clock read and a few attributes; it takes no lock except to
    wake a sleeping thread. The watchdog knows neither requests nor a device: the caller that begins an iteration
    can describe it. It needs the interpreter: a native call that hangs without releasing the GIL silences it.

    Args:
        timeout_s: Duration in seconds after which an iteration is stuck; > 0. The log is written at most half a
            timeout late, and again each time that the duration has doubled.
        hang_timeout_s: Duration in seconds after which an iteration is not expected to end; None: never.
        on_hang: Called once, with a line about such an iteration, on the watchdog's thread, at most half a timeout
            late.
        log: Takes each message, of several lines.
        clock: Monotonic clock, in seconds.
        wait: Waits for an event for some seconds (None: without limit), and returns whether it is set.
        start: Whether to start the thread; if not, call `check`.
    """

    def __init__(
        self,
        timeout_s: float,
        log: Callable[[str], None] = _log.error,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[threading.Event, float | None], bool] = threading.Event.wait,
        start: bool = True,
        hang_timeout_s: float | None = None,
        on_hang: Callable[[str], None] = lambda line: None,
    ) -> None:
        if not timeout_s > 0:
            raise ValueError(f"timeout_s is {timeout_s}, expected more than 0")
        self._timeout_s = timeout_s
        self._hang_timeout_s = math.inf if hang_timeout_s is None else hang_timeout_s
        self._on_hang = on_hang
        self._period_s = min(timeout_s, self._hang_timeout_s) / 2
        self._log = log
        self._clock = clock
        self._wait = wait
        self._run: _Run | None = None
        self._is_needed = threading.Event()  # cleared by the thread before it sleeps without timeout
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        if start:
            self._thread.start()

    def begin(self, iteration: int, describe: Callable[[], str]) -> None:
        """Record the beginning of an iteration. Loop thread.

        Args:
            iteration: Its number.
            describe: Describes the iteration; called by other threads, and only while it is stuck.
        """
        self._run = _Run(iteration, describe, self._clock(), self._timeout_s)
        # In this order, as the thread clears the event before it checks for a run a last time.
        if not self._is_needed.is_set():
            self._is_needed.set()

    def end(self) -> None:
        """Record the end of the iteration, successful or not. Loop thread."""
        run, self._run = self._run, None
        if run is not None and run.is_reported:
            self._log(
                f"iteration {run.iteration} has ended after all, after {self._clock() - run.begun_s:.1f} s"
            )

    def stuck(self) -> str | None:
        """Return a line about the stuck iteration and since when it runs; None if none is stuck. Any thread."""
        run = self._run
        if run is None or (seconds := self._clock() - run.begun_s) < self._timeout_s:
            return None
        return _headline(run, seconds)

    def close(self) -> None:
        """End the thread. Idempotent; must not be called on the watchdog's own thread."""
        self._is_closed.set()
        self._is_needed.set()
        if self._thread.is_alive():
            self._thread.join()

    # ---------------------------------------------------------------- the thread

    def _watch(self) -> None:
        while not self._is_closed.is_set():
            if self.check():
                self._wait(self._is_closed, self._period_s)
            else:
                self._wait(self._is_needed, None)

    def check(self) -> bool:
        """Write the log if due; return whether to check again soon. If not, the next check is after `begin`."""
        if (run := self._run) is None:
            self._is_needed.clear()
            # An iteration that began before this line is seen here; a later one sets the event.
            return self._run is not None or self._is_closed.is_set()
        seconds = self._clock() - run.begun_s
        if seconds >= run.next_report_s:
            while run.next_report_s <= seconds:
                run.next_report_s *= 2
            run.is_reported = True
            self._log(f"{_headline(run, seconds)}\n{all_stacks(besides=threading.get_ident())}")
        if seconds >= self._hang_timeout_s:
            self._hang_timeout_s = math.inf  # once
            self._on_hang(_headline(run, seconds))
        return True


def _headline(run: _Run, seconds: float) -> str:
    try:
        described = run.describe()
    except Exception as error:  # the loop may change the described state at any moment
        described = f"cannot be described: {type(error).__name__}: {error}"
    return f"iteration {run.iteration} has been running for {seconds:.1f} s: {described}"


def all_stacks(besides: int | None = None) -> str:
    """Return the Python stacks and names of all threads except `besides`, innermost call last."""
    # The only way to see other threads' stacks; documented in spite of its name.
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, '?')} ({ident}):\n{''.join(traceback.format_stack(frame)).rstrip()}"
        for ident, frame in frames.items()
        if ident != besides
    )


@dataclass(frozen=True, slots=True)
class Instruments:
    """The loop's instruments, each of which is optional.

    Attributes:
        recorder: Writes a trace for `replay`.
        watchdog: Notices an iteration that does not end.
        rings: Keeps the statistics of the last iterations.
        kv_events: Keeps KV cache events.
        return_metrics: Takes statistics and metrics whenever statistics are reported.
        measure_memory: Returns the process's current memory. Any thread.
    """

    recorder: JsonRecorder | None = None
    watchdog: Watchdog | None = None
    rings: StatisticsRings | None = None
    kv_events: KvEventBuffer | None = None
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
        """Record that the iteration is over and its responses are handed over."""
        if self.watchdog is not None:
            self.watchdog.end()

    @property
    def wants_every_iteration(self) -> bool:
        """Whether statistics of every iteration are wanted, instead of one per period."""
        return self.rings is not None and self.rings.is_on

    def keep(self, stats: IterationStats, scheduler: Scheduler, batch: ScheduledBatch | None) -> None:
        """Add statistics to the rings."""
        if self.rings is not None:
            self.rings.add(stats, scheduler.request_stats(batch) if self.rings.wants_requests else ())

    def collect(self, scheduler: Scheduler) -> None:
        """Move the scheduler's KV cache events into the buffer."""
        if self.kv_events is not None and (events := scheduler.take_kv_events()):
            self.kv_events.add(events)

    def tell(self, stats: IterationStats, metrics: MetricsSnapshot) -> None:
        """Publish statistics and metrics."""
        if self.return_metrics is not None:
            self.return_metrics(stats, metrics)

    def reports(self, kind: ReportKind, timeout_s: float | None) -> Reports:
        """Return the reports kept since the last call; waits `timeout_s` seconds for KV cache events. Any thread.

        None waits until there are some.
        """
        if kind is ReportKind.KV_EVENTS:
            return Reports(kv_events=tuple(self.kv_events.take(timeout_s)) if self.kv_events else ())
        if self.rings is None:
            return Reports()
        if kind is ReportKind.REQUESTS:
            return Reports(requests=tuple(self.rings.latest_requests()))
        return Reports(iterations=tuple(self.rings.latest()), memory=self.measure_memory())

    def close(self) -> None:
        """End every instrument. Idempotent."""
        if self.watchdog is not None:
            self.watchdog.close()
        if self.recorder is not None:
            self.recorder.close()
        if self.kv_events is not None:
            self.kv_events.close()


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


_RECENT = 10
"""Number of iterations whose statistics are part of an answer."""

_Answer = tuple[SchedulerState, IterationStats]


class Inspections:
    """Questions about the scheduler's state, asked on any thread and answered by the loop between two iterations.

    If the loop does not answer in time, the asking thread reports what it can see without it: the stuck iteration,
    the stacks of all threads, and the scheduler's state as the iteration left it.
    """

    def __init__(self, scheduler: Scheduler, instruments: Instruments) -> None:
        self._scheduler = scheduler
        self._instruments = instruments
        self._questions: deque[Future[_Answer]] = deque()
        self._is_closed = False

    def ask(self, timeout_s: float, notify: Callable[[], None]) -> str:
        """Return the loop's state as JSON; raises Unavailable once the loop has ended. Not on the loop thread."""
        question: Future[_Answer] = Future()
        self._questions.append(question)
        if self._is_closed:
            raise Unavailable("the generation loop has ended")
        notify()
        try:
            state, stats = question.result(timeout_s)
        except NotInTime:
            question.cancel()
            return json.dumps(self._without_the_loop(timeout_s))
        memory = self._instruments.measure_memory()
        statistics = iteration_stats(KeptIteration(stats, time.time()), memory).to_plain()
        return json.dumps({"state": asdict(state), "statistics": statistics, **self._recent(memory)})

    def answer(self) -> None:
        """Answer all questions. Loop thread, between two iterations."""
        while self._questions:
            question = self._questions.popleft()
            if question.set_running_or_notify_cancel():
                try:
                    question.set_result((self._scheduler.state(), self._scheduler.stats(None)))
                except Exception as error:  # the asking thread gets the error; the loop goes on
                    question.set_exception(error)

    def close(self) -> None:
        """Refuse all questions, as the loop has ended. Idempotent."""
        self._is_closed = True
        while self._questions:
            question = self._questions.popleft()
            if question.set_running_or_notify_cancel():
                question.set_exception(Unavailable("the generation loop has ended"))

    def _without_the_loop(self, waited_s: float) -> dict[str, object]:
        watchdog = self._instruments.watchdog
        return {
            "unanswered": f"the generation loop did not come round in {waited_s:g} s",
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
        """Return the statistics of recent iterations, and of their requests if those are kept."""
        rings = self._instruments.rings
        if rings is None:
            return {"recent_iterations": [], "recent_requests": []}
        return {
            "recent_iterations": [iteration_stats(entry, memory).to_plain() for entry in rings.peek(_RECENT)],
            "recent_requests": [request_stats(entry).to_plain() for entry in rings.peek_requests(_RECENT)],
        }

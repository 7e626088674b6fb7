"""Observers of the loop: recorder, watchdog, recent statistics, metrics, answers to `state`.

All of it is optional but the answers, and none of it decides anything. The loop says what happens, on its own
thread; the watchdog has a thread of its own, and any thread may read statistics and ask for the state.
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
    """The statistics of the last iterations, and of every request in them, as the Executor keeps them.

    The loop thread adds; any thread reads, and makes JSON on its own time.

    Args:
        max_iterations: Iterations to keep; 0 keeps none.
        max_request_iterations: Iterations for which the statistics of every request are kept; 0 keeps none.
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
        """Whether anything is kept."""
        return self._iterations.size > 0 or self.wants_requests

    @property
    def wants_requests(self) -> bool:
        """Whether statistics of every request are kept: making them takes time with every request."""
        return self._requests.size > 0

    def add(self, stats: IterationStats, request_stats: tuple[RequestStats, ...] = ()) -> None:
        """Keep the statistics of one iteration. Loop thread."""
        kept = KeptIteration(stats, self._clock_s())
        with self._lock:
            self._iterations.add(kept)
            if self.wants_requests:
                self._requests.add(RequestStatsPerIteration(stats.iteration, request_stats))

    def latest(self) -> list[KeptIteration]:
        """Statistics since the last call, oldest first: the Executor's `getLatestIterationStats`."""
        with self._lock:
            return self._iterations.new_values()

    def latest_requests(self) -> list[RequestStatsPerIteration]:
        """Statistics of requests since the last call, oldest first: the Executor's `getLatestRequestStats`."""
        with self._lock:
            return self._requests.new_values()

    def peek(self, count: int) -> list[KeptIteration]:
        """The last `count` statistics, oldest first; `latest` returns them all the same."""
        with self._lock:
            return self._iterations.last(count)

    def peek_requests(self, count: int) -> list[RequestStatsPerIteration]:
        """The last `count` statistics of requests, oldest first; `latest_requests` returns them all the same."""
        with self._lock:
            return self._requests.last(count)


class _Ring(Generic[_T]):
    """The last `size` values that were added, and how many of them are new. Not for two threads at once."""

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
    """One iteration; `next_report_s` is its duration at which the log is written (again)."""

    iteration: int
    describe: Callable[[], str]
    begun_s: float
    next_report_s: float
    is_reported: bool = False


class Watchdog:
    """Notices an iteration that does not end, and says in the log what every thread is doing.

    Owns one daemon thread, which sleeps until an iteration begins and, while iterations run, wakes at most twice
    in a timeout. The loop thread pays a clock read and a few attributes for each iteration, and takes no lock
    but to wake a thread that sleeps. The watchdog knows neither requests nor a device: whoever begins an
    iteration can describe it. It needs the interpreter: a native call that hangs without releasing the GIL
    silences it.

    Args:
        timeout_s: An iteration that takes longer is stuck; > 0. The log is written at most half a timeout late,
            and again each time that the duration has doubled.
        hang_timeout_s: An iteration that takes longer has hung: it is not expected to end; None: none ever has.
        on_hang: Called with a line about such an iteration, once, on the watchdog's thread, at most half a timeout
            late.
        log: Takes each message, which has many lines.
        clock: Seconds, monotonic.
        wait: Waits for an event for some seconds (None: without end), and returns whether it is set.
        start: Whether to start the thread; without it, call `check`.
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
        self._is_needed = threading.Event()  # cleared by the thread before it sleeps without a timeout
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        if start:
            self._thread.start()

    def begin(self, iteration: int, describe: Callable[[], str]) -> None:
        """Note that an iteration begins. Loop thread.

        Args:
            iteration: Its number.
            describe: Returns what is in it; called by other threads, and only while it is stuck.
        """
        self._run = _Run(iteration, describe, self._clock(), self._timeout_s)
        # In this order: the thread clears the event before it looks for a run for the last time.
        if not self._is_needed.is_set():
            self._is_needed.set()

    def end(self) -> None:
        """Note that the iteration has ended, well or badly. Loop thread."""
        run, self._run = self._run, None
        if run is not None and run.is_reported:
            self._log(
                f"iteration {run.iteration} has ended after all, after {self._clock() - run.begun_s:.1f} s"
            )

    def stuck(self) -> str | None:
        """A line that says which iteration is stuck and since when; None if none is. Any thread."""
        run = self._run
        if run is None or (seconds := self._clock() - run.begun_s) < self._timeout_s:
            return None
        return _headline(run, seconds)

    def close(self) -> None:
        """End the thread. Idempotent; not called on the watchdog's own thread."""
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
        """Write the log if that is due; returns whether to check again soon, or else when `begin` says so."""
        if (run := self._run) is None:
            self._is_needed.clear()
            # One that begins before this line is seen here; a later one sets the event.
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
    except Exception as error:  # the loop may change what is described at any moment
        described = f"cannot be described: {type(error).__name__}: {error}"
    return f"iteration {run.iteration} has been running for {seconds:.1f} s: {described}"


def all_stacks(besides: int | None = None) -> str:
    """The Python stacks of all threads but `besides`, with the threads' names, innermost call last."""
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
    """The instruments that the loop has, each of which may be missing.

    Attributes:
        recorder: Writes a trace for `replay`.
        watchdog: Notices an iteration that does not end.
        rings: Keeps the statistics of the last iterations.
        kv_events: Keeps what happened to the content of KV blocks.
        return_metrics: Takes statistics and metrics, as often as statistics are reported.
        measure_memory: Returns what this process holds now. Any thread.
    """

    recorder: JsonRecorder | None = None
    watchdog: Watchdog | None = None
    rings: StatisticsRings | None = None
    kv_events: KvEventBuffer | None = None
    return_metrics: ReturnMetricsCallback | None = None
    measure_memory: Callable[[], MemoryUsage] = MemoryUsage

    def begin(self, iteration: int, scheduler: Scheduler) -> None:
        """Note that an iteration begins that has something to do."""
        if self.watchdog is not None:
            self.watchdog.begin(iteration, lambda: _describe(scheduler))

    def scheduled(self, inputs: IterationInput, batch: ScheduledBatch | None) -> None:
        """Note that the iteration's batch is made and about to run."""
        if self.recorder is not None:
            self.recorder.begin(inputs, batch)

    def answered(self, outcome: ModelOutput | InflightError, now_ns: int) -> None:
        """Note that the device has answered the oldest batch in flight, or failed to."""
        if self.recorder is not None:
            self.recorder.end(outcome, now_ns)

    def end(self) -> None:
        """Note that the iteration is over and its responses are handed over."""
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

    def collect(self, scheduler: Scheduler) -> None:
        """Put what has happened to KV blocks into the buffer."""
        if self.kv_events is not None and (events := scheduler.take_kv_events()):
            self.kv_events.add(events)

    def tell(self, stats: IterationStats, metrics: MetricsSnapshot) -> None:
        """Publish statistics and metrics."""
        if self.return_metrics is not None:
            self.return_metrics(stats, metrics)

    def reports(self, kind: ReportKind, timeout_s: float | None) -> Reports:
        """The reports kept since the last call, for any thread; waits `timeout_s` for events of the KV cache.

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
    """A summary of the current iteration, for the watchdog's thread, and only while the loop hangs."""
    running = scheduler.running_sequences
    in_flight = [r for r in running if r.num_scheduled_tokens]
    ids = ", ".join(str(request_id) for request_id in dict.fromkeys(r.request_id for r in in_flight))
    num_tokens = sum(r.num_scheduled_tokens for r in in_flight)
    return (
        f"{len(in_flight)} of {len(running)} running sequences are in it with {num_tokens} tokens, "
        f"of requests {ids or '(none)'}"
    )


_RECENT = 10
"""Iterations whose statistics are part of an answer."""

_Answer = tuple[SchedulerState, IterationStats]


class Inspections:
    """Questions for the scheduler's state, asked on any thread and answered by the loop between two iterations.

    If the loop does not answer in time, the asking thread says what it can see without it: that an iteration is
    stuck and since when, the stacks of all threads, and the scheduler as that iteration left it.
    """

    def __init__(self, scheduler: Scheduler, instruments: Instruments) -> None:
        self._scheduler = scheduler
        self._instruments = instruments
        self._questions: deque[Future[_Answer]] = deque()
        self._is_closed = False

    def ask(self, timeout_s: float, notify: Callable[[], None]) -> str:
        """JSON of the loop's state; raises Unavailable once the loop has ended. Not on the loop thread."""
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
        """Answer all questions. On the loop thread, between two iterations."""
        while self._questions:
            question = self._questions.popleft()
            if question.set_running_or_notify_cancel():
                try:
                    question.set_result((self._scheduler.state(), self._scheduler.stats(None)))
                except Exception as error:  # the asking thread gets the error; the loop goes on
                    question.set_exception(error)

    def close(self) -> None:
        """Refuse all questions, because the loop has ended. Idempotent."""
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
        """The scheduler's state, read from this thread; None if the loop changes it meanwhile and that fails."""
        try:
            return asdict(self._scheduler.state())
        except Exception:  # the loop may change what is read at any moment
            return None

    def _recent(self, memory: MemoryUsage) -> dict[str, object]:
        """The statistics of the last iterations, and of their requests if they are kept."""
        rings = self._instruments.rings
        if rings is None:
            return {"recent_iterations": [], "recent_requests": []}
        return {
            "recent_iterations": [iteration_stats(kept, memory).to_plain() for kept in rings.peek(_RECENT)],
            "recent_requests": [request_stats(kept).to_plain() for kept in rings.peek_requests(_RECENT)],
        }

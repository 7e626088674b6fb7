"""Answers of the loop to the question what it is doing: asked on any thread, answered between two iterations.

When the loop does not come round in time the answer is what a watcher can know without it: that an iteration is
stuck, since when, the stacks of all threads, and the scheduler as that iteration left it. JSON is made on the
thread that asks.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from dataclasses import asdict, dataclass

from inflight.batch_manager.instruments import Instruments
from inflight.batch_manager.watchdog import all_stacks
from inflight.core.report.state import SchedulerState
from inflight.core.report.stats import IterationStats
from inflight.core.scheduler import Scheduler
from inflight.errors import Unavailable

_RECENT = 10


@dataclass(frozen=True, slots=True)
class _Answer:
    state: SchedulerState
    stats: IterationStats


class Inspections:
    """The questions that wait for an answer."""

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
            answer = question.result(timeout_s)
        except NotInTime:
            question.cancel()
            return json.dumps(self._without_the_loop(timeout_s))
        return json.dumps(
            {
                "state": asdict(answer.state),
                "statistics": self._executor_fields(answer.stats),
                **self._recent(),
            }
        )

    def answer(self) -> None:
        """Between two iterations, on the loop thread."""
        while self._questions:
            question = self._questions.popleft()
            if question.set_running_or_notify_cancel():
                try:
                    question.set_result(_Answer(self._scheduler.state(), self._scheduler.stats(None)))
                except Exception as error:  # whoever asks is to hear of it; the loop has others to serve
                    question.set_exception(error)

    def close(self) -> None:
        """The loop has ended: nobody is to wait for it. Idempotent."""
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
            **self._recent(),
            "threads": all_stacks().splitlines(),
        }

    def _left_behind(self) -> dict[str, object] | None:
        """The scheduler's state, looked at from this thread; None if the loop goes on meanwhile, and it shows."""
        try:
            return asdict(self._scheduler.state())
        except Exception:  # whatever comes of reading what somebody else is changing
            return None

    def _executor_fields(self, stats: IterationStats) -> dict[str, object]:
        return stats.executor_fields(time.time(), self._instruments.measure_memory())

    def _recent(self) -> dict[str, object]:
        """Statistics of the last iterations, and of their requests where they are kept."""
        rings = self._instruments.rings
        if rings is None:
            return {"recent_iterations": [], "recent_requests": []}
        memory = self._instruments.measure_memory()
        return {
            "recent_iterations": [kept.executor_fields(memory) for kept in rings.peek(_RECENT)],
            "recent_requests": [kept.executor_fields() for kept in rings.peek_requests(_RECENT)],
        }

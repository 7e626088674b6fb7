"""A clock for the stages of the loop's iterations, which only wraps functions of the program.

Functions are wrapped during a `with` block. A function's time does not include wrapped functions that it
calls, whose time counts for their own stages; so the stages of an iteration add up to its time. The wrapped
functions run on the loop thread; `iterations` must be read while the loop is idle.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import TracebackType
from typing import Any

from inflight.core.schedule.batch import ScheduledBatch


class Stage(IntEnum):
    """Stages of an iteration. The forward pass consists of embeddings, layers and logits."""

    GET = 0
    SCHEDULE = 1
    PACK = 2
    FORWARD = 3
    CHOOSE = 4
    UPDATE = 5
    SEND = 6
    OTHER = 7


@dataclass(frozen=True, slots=True)
class Place:
    """A function to wrap.

    Attributes:
        owner: Class, module or library that has the function.
        name: Name of the function there.
        stage: Stage for which the function's time counts.
    """

    owner: Any
    name: str
    stage: Stage


@dataclass(frozen=True, slots=True)
class Iteration:
    """Times of an iteration that ran a batch.

    Attributes:
        num_chunks: Number of context chunks.
        num_generation: Number of generation rows.
        stages_ns: Wall-clock nanoseconds by stage.
    """

    num_chunks: int
    num_generation: int
    stages_ns: tuple[int, ...]


class Stopwatch:
    """A context manager that wraps functions to measure their time.

    Args:
        root: Function that runs an iteration; the time of its own code counts for `Stage.OTHER`.
        forward: Method whose first argument is the batch.
        places: All other functions.

    Attributes:
        iterations: Iterations that ran a batch, in order.
    """

    def __init__(
        self,
        root: Place,
        forward: Place,
        places: Sequence[Place],
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.iterations: list[Iteration] = []
        self._root, self._forward, self._places = root, forward, places
        self._clock_ns = clock_ns
        self._running = [Stage.OTHER]
        self._since_ns = 0
        self._stages_ns = [0] * len(Stage)
        self._batch: ScheduledBatch | None = None
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> Stopwatch:
        self._replace(self._root, self._iteration)
        self._replace(self._forward, self._with_batch)
        for place in self._places:
            self._replace(place, self._stage)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._undo.close()

    def _replace(self, place: Place, wrap: Callable[[Callable, Stage], Callable]) -> None:
        function = getattr(place.owner, place.name)
        setattr(place.owner, place.name, wrap(function, place.stage))
        self._undo.callback(setattr, place.owner, place.name, function)

    def _stage(self, function: Callable, stage: Stage) -> Callable:
        def timed(*arguments: Any) -> Any:
            self._switch()
            self._running.append(stage)
            try:
                return function(*arguments)
            finally:
                self._switch()
                self._running.pop()

        return timed

    def _with_batch(self, function: Callable, stage: Stage) -> Callable:
        timed = self._stage(function, stage)

        def noted(owner: Any, batch: ScheduledBatch, *arguments: Any) -> Any:
            self._batch = batch
            return timed(owner, batch, *arguments)

        return noted

    def _iteration(self, function: Callable, stage: Stage) -> Callable:
        def whole(*arguments: Any) -> Any:
            self._stages_ns, self._batch = [0] * len(Stage), None
            self._since_ns = self._clock_ns()
            result = function(*arguments)
            self._switch()
            if (batch := self._batch) is not None:
                counts = len(batch.context), len(batch.generation_slots)
                self.iterations.append(Iteration(*counts, tuple(self._stages_ns)))
            return result

        return whole

    def _switch(self) -> None:
        """Add the time since the last switch to the innermost stage."""
        now_ns = self._clock_ns()
        self._stages_ns[self._running[-1]] += now_ns - self._since_ns
        self._since_ns = now_ns

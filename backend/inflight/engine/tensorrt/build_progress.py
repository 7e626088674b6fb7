"""The progress of building plans: a bar per phase on a terminal, otherwise lines in the log."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Generator
from typing import Any

from inflight.progress import pause_s

_DEPTH = 1
_log = logging.getLogger(__name__)


@contextlib.contextmanager
def build_progress(module: Any) -> Generator[Any]:
    """Show the progress of a build; yield TensorRT's IProgressMonitor for all of its plans.

    Args:
        module: TensorRT.
    """
    phases = _Phases()

    class Monitor(module.IProgressMonitor):
        """Reports TensorRT's progress. TensorRT calls it on its own threads and cannot handle exceptions, so all
        exceptions are suppressed."""

        def __init__(self) -> None:
            module.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            with contextlib.suppress(Exception):
                phases.start(phase_name, parent_phase, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            with contextlib.suppress(Exception):
                phases.advance(phase_name, step + 1)
            return True  # continue

        def phase_finish(self, phase_name: str) -> None:
            with contextlib.suppress(Exception):
                phases.finish(phase_name)

    try:
        yield Monitor()
    finally:
        phases.close()


class _Phases:
    """TensorRT's current phases, which are nested; deeply nested phases are ignored. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._has_terminal = sys.stderr.isatty()
        self._progress: Any = None
        self._tasks: dict[str, Any] = {}  # ids of rich's tasks
        self._sizes: dict[str, int] = {}
        self._depths: dict[str, int] = {}
        self._begun_s = time.monotonic()
        self._next_s = self._begun_s + pause_s(0)

    def start(self, name: str, parent: str | None, num_steps: int) -> None:
        with self._lock:
            depth = 0 if parent is None else self._depths.get(parent, 0) + 1
            self._depths[name] = depth
            if depth > _DEPTH or name in self._sizes:
                return
            self._sizes[name] = num_steps
            if self._has_terminal and self._progress is None:
                self._progress = _make_progress()
            if self._progress is not None:
                self._tasks[name] = self._progress.add_task("  " * depth + name, total=num_steps)

    def advance(self, name: str, num_done: int) -> None:
        with self._lock:
            if name not in self._sizes:
                return
            if self._progress is not None:
                self._progress.update(self._tasks[name], completed=num_done)
                return
            now = time.monotonic()
            if now >= self._next_s:
                _log.info("TensorRT: %s, %d of %d", name, num_done, self._sizes[name])
                self._next_s = now + pause_s(now - self._begun_s)

    def finish(self, name: str) -> None:
        with self._lock:
            self._sizes.pop(name, None)
            if name in self._tasks:
                self._progress.remove_task(self._tasks.pop(name))

    def close(self) -> None:
        with self._lock:
            progress, self._progress = self._progress, None
            self._sizes.clear()
            if progress is not None:
                with contextlib.suppress(Exception):
                    progress.stop()


def _make_progress() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    progress = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(file=sys.stderr, force_terminal=True),
        transient=True,
    )
    progress.start()
    return progress

"""Display how many requests of a batch are answered: a bar on a terminal, otherwise a line from time to time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0


class BatchProgress:
    """The display of one batch. One thread.

    Args:
        stream: Stream for the display; a bar is shown if it is a terminal.
        total: Number of requests.
        done: Number of requests that an earlier run has answered.
    """

    def __init__(self, stream: TextIO, total: int, done: int) -> None:
        self._stream = stream
        self._total = total
        self._done = done
        self._failed = 0
        self._begun_s = time.monotonic()
        self._next_s = self._begun_s + _FIRST_PAUSE_S
        self._bar = _make_bar(stream, total, done) if stream.isatty() else None

    def __enter__(self) -> BatchProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def add(self, is_success: bool) -> None:
        """Count a request as answered, and update the display."""
        self._done += 1
        self._failed += not is_success
        if self._bar is not None:
            task = self._bar.task_ids[0]
            self._bar.update(task, completed=self._done, failed=self._said_failed())
            return
        now = time.monotonic()
        if now >= self._next_s:
            self._stream.write(f"batch: {self._done} of {self._total} requests{self._said_failed()}\n")
            self._stream.flush()
            self._next_s = now + min(max(_FIRST_PAUSE_S, (now - self._begun_s) / 10), _LONGEST_PAUSE_S)

    def write(self, line: str) -> None:
        """Write a line, above the bar if there is one."""
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            self._stream.write(f"{line}\n")
            self._stream.flush()

    def _said_failed(self) -> str:
        return f", {self._failed} failed" if self._failed else ""


def _make_bar(stream: TextIO, total: int, done: int) -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    bar = Progress(
        TextColumn("batch"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("requests{task.fields[failed]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(file=stream, force_terminal=True),
        refresh_per_second=4,
    )
    bar.add_task("batch", total=total, completed=done, failed="")
    return bar

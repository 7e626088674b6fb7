"""Display the progress of a long step at the start, such as reading weights or compiling layers.

The code that does the step reports numbers, which this module displays: as a bar on a terminal, otherwise as
log lines. A server's engine writes lines to its log, and `ProgressEcho` in
`scripts/serve` converts them to a bar. A display that fails is switched off, and the step continues. Each
step is reported by one thread; `ProgressEcho` accepts lines from any thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_PATIENCE_S = 1.0  # a shorter step is not displayed
BAR_VARIABLE = "INFLIGHT_PROGRESS_BAR"
"""The environment variable that is 1 if log lines are shown as a bar; `scripts/serve` sets it on a terminal."""

_MIN_PAUSE_S = 1.0
_MAX_BAR_PAUSE_S = 5.0
_MAX_LOG_PAUSE_S = 120.0  # a server without log lines for five minutes counts as stalled
_COMPILING_PAUSE_S = 5.0
_GB = 1e9
_WEIGHTS = re.compile(
    r"(?P<who>rank \d+: )?(?:INFO )?(?P<title>Loading .+?): (?P<done>[\d.]+) (?P<kind>of|GB in) (?P<total>[\d.]+)"
)
_COMPILING = re.compile(r"(?P<title>compiling the decoder's layers.*?), once on this machine")
_COMPILED = re.compile(r"the decoder's layers (?P<what>\(\w+\)): the compiler took")
_log = logging.getLogger(__name__)


def pause_s(elapsed_s: float) -> float:
    """Return the seconds until the next log line of a step that has taken `elapsed_s` seconds so far.

    A bar needs lines every few seconds. In a log the pauses double, so that a long step has few lines.
    """
    if os.environ.get(BAR_VARIABLE) == "1":
        return min(max(elapsed_s / 10, _MIN_PAUSE_S), _MAX_BAR_PAUSE_S)
    return min(max(elapsed_s, _MIN_PAUSE_S), _MAX_LOG_PAUSE_S)


@contextlib.contextmanager
def load_progress(title: str, total_bytes: int) -> Generator[Callable[[int], None], None, None]:
    """Display the progress of loading `total_bytes`; yield a function that adds a number of loaded bytes.

    Nothing is displayed in the first second. Then a bar is shown if stderr is a terminal; otherwise lines are
    logged with the pauses of `pause_s`, and when the load is done.
    """
    report = _LoadReport(title, total_bytes)
    try:
        yield report.advance
        report.finish()
    finally:
        report.close()


class _LoadReport:
    """The display of one load. `advance` is cheap: it only reads the clock, unless the display must be updated."""

    def __init__(self, title: str, total_bytes: int) -> None:
        self._title, self._total, self._done = title, total_bytes, 0
        self._begun_s = time.monotonic()
        self._next_s = self._begun_s + _PATIENCE_S
        self._bar: Bar | None = Bar(sys.stderr) if sys.stderr.isatty() else None

    def advance(self, num_bytes: int) -> None:
        self._done += num_bytes
        now = time.monotonic()
        if now < self._next_s:
            return
        if self._bar is not None:
            self._bar.show(self._title, self._done, self._total)
            return
        _log.info("%s: %.2f of %.2f GB", self._title, self._done / _GB, self._total / _GB)
        self._next_s = now + pause_s(now - self._begun_s)

    def finish(self) -> None:
        elapsed = time.monotonic() - self._begun_s
        if self._bar is None and elapsed > _PATIENCE_S:
            _log.info("%s: %.2f GB in %.1f s", self._title, self._done / _GB, elapsed)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


@contextlib.contextmanager
def compile_progress(what: str) -> Generator[Callable[[], None], None, None]:
    """Display the progress of compiling layers; yield a function that the caller must call about once a second.

    Args:
        what: The kind of layers that are compiled, such as "bfloat16".
    """
    begun_s = time.monotonic()
    next_s = begun_s + _COMPILING_PAUSE_S
    title = f"compiling the decoder's layers ({what})"
    bar = Bar(sys.stderr) if sys.stderr.isatty() else None
    _log.info("%s, once on this machine", title)

    def tick() -> None:
        nonlocal next_s
        now = time.monotonic()
        if bar is not None:
            bar.show(title, 0, None)
        elif now >= next_s:
            _log.info("%s, once on this machine: %.0f s so far", title, now - begun_s)
            next_s = now + max(pause_s(now - begun_s), _COMPILING_PAUSE_S)

    try:
        yield tick
    finally:
        _log.info("the decoder's layers (%s): the compiler took %.1f s", what, time.monotonic() - begun_s)
        if bar is not None:
            bar.close()


class Bar:
    """A progress bar for each title, at the bottom of a terminal. `close` removes the bars. One thread at a time.

    Args:
        stream: The terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._is_broken = False

    @property
    def is_shown(self) -> bool:
        """Return whether a bar is shown, so that lines must be written with `write`."""
        return self._progress is not None

    def show(self, title: str, done: int, total: int | None) -> None:
        """Show `done` of `total` bytes in the bar with this title; `total` is None if it is not known."""
        if self._is_broken:
            return
        try:
            if self._progress is None:
                self._progress = _make_bar(self._stream)
                self._progress.start()
            if title not in self._tasks:
                self._tasks[title] = self._progress.add_task(title, total=total)
            self._progress.update(self._tasks[title], completed=done)
        except Exception:  # an error of the terminal, or another bar is shown: the step must continue
            self._is_broken = True
            self.close()

    def hide(self, title: str) -> None:
        """Remove the bar with this title, and the whole display if no other bar is left."""
        task = self._tasks.pop(title, None)
        if not self._tasks:
            self.close()
        elif task is not None and self._progress is not None:
            self._progress.remove_task(task)

    def write(self, text: str) -> None:
        """Write lines above the bars."""
        if self._progress is not None:
            from rich.text import Text

            self._progress.console.print(Text(text), end="", soft_wrap=True)

    def close(self) -> None:
        """Remove all bars from the terminal."""
        progress, self._progress = self._progress, None
        self._tasks.clear()
        if progress is not None:
            with contextlib.suppress(Exception):
                progress.stop()


class ProgressEcho:
    """A wrapper of a terminal that shows the progress lines of a server's log as a bar below the other lines.

    Implements the methods of TextIO that `print` and `ServerLog` use. Any thread.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._bar = Bar(stream)
        self._part = ""  # the beginning of an unfinished line
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        """Write lines, or show them as a bar. An unfinished line is stored until its end is written."""
        with self._lock:
            *lines, self._part = (self._part + text).split("\n")
            for line in lines:
                if self._take(line):
                    continue
                if self._bar.is_shown:
                    self._bar.write(f"{line}\n")
                else:
                    self._stream.write(f"{line}\n")
        return len(text)

    def flush(self) -> None:
        """Show what has been written so far, except an unfinished line."""
        with self._lock:
            self._stream.flush()

    def fileno(self) -> int:
        """Return the terminal's file descriptor."""
        return self._stream.fileno()

    def close(self) -> None:
        """Remove the bar and write an unfinished line. The terminal stays open."""
        with self._lock:
            self._bar.close()
            self._stream.write(self._part)
            self._part = ""

    def _take(self, line: str) -> bool:
        """Show a line as a bar if it is a progress line; return whether it was, so that it need not be written."""
        if found := _WEIGHTS.search(line):
            title = f"{found['who'] or ''}{found['title']}"
            if found["kind"] != "of":
                self._bar.hide(title)
                return False
            self._bar.show(title, int(float(found["done"]) * _GB), int(float(found["total"]) * _GB))
            return self._bar.is_shown
        if found := _COMPILING.search(line):
            self._bar.show(found["title"], 0, None)
            return self._bar.is_shown
        if found := _COMPILED.search(line):
            self._bar.hide(f"compiling the decoder's layers {found['what']}")
        return False


def _make_bar(stream: TextIO) -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    class Sizes(DownloadColumn):
        """A column of sizes that is empty if the total is unknown."""

        def render(self, task: Any) -> Any:
            return super().render(task) if task.total is not None else ""

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        Sizes(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(file=stream, force_terminal=True),
        refresh_per_second=4,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )

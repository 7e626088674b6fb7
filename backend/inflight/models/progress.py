"""How far a long load is: a bar on stderr for people, one log line for everybody else."""

from __future__ import annotations

import logging
import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

_logger = logging.getLogger(__name__)
_PATIENCE_S = 1.0


class LoadProgress:
    """Context manager around a load of `total_bytes`.

    The bar appears once the load has taken a second, and only on a terminal. Without one, a load that took that
    long is logged when it is done.
    """

    def __init__(self, title: str, total_bytes: int) -> None:
        """Prepare; nothing is shown yet."""
        self._title = title
        self._total = total_bytes
        self._done = 0
        self._bar: Progress | None = None

    def __enter__(self) -> LoadProgress:
        self._start = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        elapsed = time.monotonic() - self._start
        if self._bar is not None:
            self._bar.stop()
        elif error is None and elapsed > _PATIENCE_S:
            _logger.info("%s: %.2f GB in %.1f s", self._title, self._done / 1e9, elapsed)

    def advance(self, num_bytes: int) -> None:
        """Count `num_bytes` more as loaded."""
        self._done += num_bytes
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._done)
        elif sys.stderr.isatty() and time.monotonic() - self._start > _PATIENCE_S:
            self._bar = self._show()

    def _show(self) -> Progress:
        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        bar.add_task(self._title, total=self._total, completed=self._done)
        bar.start()
        return bar

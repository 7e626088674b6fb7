"""Collects the access lines of a test."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from inflight.access_log import LOGGER

PATIENCE_S = 60.0


class AccessLines(logging.Handler):
    """The access lines so far, as fields, and the names of the threads that wrote them."""

    def __init__(self) -> None:
        super().__init__()
        self.fields: list[dict[str, Any]] = []
        self.threads: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        self.threads.add(threading.current_thread().name)
        self.fields.append(vars(record).get("fields", {"text": record.getMessage()}))

    def wait(self, count: int) -> list[dict[str, Any]]:
        """Wait until there are `count` lines, and return them."""
        deadline = time.monotonic() + PATIENCE_S
        while len(self.fields) < count and time.monotonic() < deadline:
            time.sleep(0.001)
        assert len(self.fields) == count, self.fields
        return self.fields

    def one(self) -> dict[str, Any]:
        """Wait until there is a line, and return its fields; fail if there are several."""
        return self.wait(1)[0]


@contextmanager
def access_lines(handler: AccessLines | None = None) -> Iterator[AccessLines]:
    """Collect the access lines of this process meanwhile."""
    lines = handler or AccessLines()
    level, propagate = LOGGER.level, LOGGER.propagate
    LOGGER.addHandler(lines)
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False
    try:
        yield lines
    finally:
        LOGGER.removeHandler(lines)
        LOGGER.setLevel(level)
        LOGGER.propagate = propagate

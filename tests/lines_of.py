"""The log lines of one module, as a server writes them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from inflight.log_lines import LineFormatter


@contextmanager
def lines_of(module: str) -> Iterator[list[str]]:
    """Yield the module's log lines within the with block, without their heads and tracebacks."""
    lines: list[str] = []
    formatter, handler = LineFormatter("test"), logging.Handler()
    handler.emit = lambda record: lines.append(formatter.format(record).splitlines()[0].partition("] ")[2])
    logger = logging.getLogger(module)
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)

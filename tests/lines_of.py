"""The log lines of one module, as a server writes them, and calls that work for a client's request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from typing import TypeVar

from inflight.log_lines import REQUEST_ID, LineFormatter

_T = TypeVar("_T")


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


def call_for(request_id: str, function: Callable[..., _T], *arguments: object) -> _T:
    """Call a function in a context whose log lines name the request."""
    context = copy_context()
    context.run(REQUEST_ID.set, request_id)
    return context.run(function, *arguments)

"""Restores the package's loggers after a test."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def logging_restored() -> Iterator[logging.Logger]:
    loggers = [logging.getLogger(name) for name in ("inflight", "inflight.access")]
    before = [(list(each.handlers), each.level, each.propagate) for each in loggers]
    try:
        yield loggers[0]
    finally:
        for logger, (handlers, level, propagate) in zip(loggers, before):
            logger.handlers[:] = handlers
            logger.setLevel(level)
            logger.propagate = propagate

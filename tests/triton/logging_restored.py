"""Restores the package's logger after a test."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def logging_restored() -> Iterator[logging.Logger]:
    logger = logging.getLogger("inflight")
    handlers, level, propagate = list(logger.handlers), logger.level, logger.propagate
    try:
        yield logger
    finally:
        logger.handlers[:] = handlers
        logger.setLevel(level)
        logger.propagate = propagate

"""Sends what this package logs to Triton's log, where the server's other lines are.

Owns one handler of the `inflight` logger. Any thread may log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from inflight.file_names import readable


class TritonLogHandler(logging.Handler):
    """Writes records with the `Logger` of a `triton_python_backend_utils` module."""

    def __init__(self, pb_utils: Any) -> None:
        super().__init__()
        self._logger = pb_utils.Logger

    def emit(self, record: logging.LogRecord) -> None:
        """Log one record at Triton's level of the same weight, line by line: Triton escapes the ends of lines."""
        write = self._write(record.levelno)
        for line in self.format(record).splitlines():
            write(readable(line))

    def _write(self, level: int) -> Callable[[str], None]:
        if level >= logging.ERROR:
            return self._logger.log_error
        if level >= logging.WARNING:
            return self._logger.log_warn
        return self._logger.log_info if level >= logging.INFO else self._logger.log_verbose


def log_to_triton(pb_utils: Any) -> None:
    """Route the package's logging to Triton, once a process."""
    logger = logging.getLogger("inflight")
    if not any(isinstance(handler, TritonLogHandler) for handler in logger.handlers):
        logger.addHandler(TritonLogHandler(pb_utils))
        logger.setLevel(logging.DEBUG)  # Triton drops what is not wanted
        logger.propagate = False

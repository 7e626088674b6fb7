"""Helpers for the trials of kernels in Triton's language when a model is loaded."""

from __future__ import annotations

import importlib.util
import logging

_log = logging.getLogger(__name__)


class IsOff(Exception):
    """The reason why a kernel cannot be used."""


def has_triton() -> bool:
    """Whether the package `triton` is installed."""
    return importlib.util.find_spec("triton") is not None


def log_not_used(what: str, reason: IsOff) -> None:
    """Log that the kernel for `what` is not used, with the reason."""
    _log.warning("the kernel for %s is not used, torch's operators replace it: %s", what, str(reason))

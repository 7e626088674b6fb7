"""Finds TensorRT: `tensorrt`, or `tensorrt_rtx` (TensorRT for RTX). Both define and build the same networks.

The modules have no type stubs, so a module and its objects have the type Any.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

from inflight.errors import ConfigError
from inflight.extras import how_to_install

MODULES = ("tensorrt", "tensorrt_rtx")
"""The modules' names, the preferred one first."""

_BINDINGS = {
    "tensorrt": ("tensorrt", "tensorrt_bindings"),
    "tensorrt_rtx": ("tensorrt_rtx", "tensorrt_rtx_bindings"),
}
_log = logging.getLogger(__name__)


def find_module(name: str | None = None) -> Any:
    """Import the module of this name; None: the first that is installed.

    Raises:
        ConfigError: No such module is installed, or its libraries cannot be loaded.
    """
    reasons: list[str] = []
    for wanted in MODULES if name is None else (name,):
        for package in _BINDINGS[wanted]:
            try:
                return importlib.import_module(package)
            except ModuleNotFoundError as error:
                if error.name != package:  # the module is installed, but one of its imports is not
                    reasons.append(f"{package}: {error}")
            except (ImportError, OSError, RuntimeError) as error:
                reasons.append(f"{package}: {error}")
    if reasons:
        raise ConfigError(f"TensorRT is installed but cannot be loaded: {'; '.join(reasons)}")
    missing = f"neither {' nor '.join(MODULES)} is" if name is None else f"{name} is not"
    raise ConfigError(
        f"{missing} installed: {how_to_install('tensorrt-rtx')} installs TensorRT for RTX; TensorRT itself is "
        "in NVIDIA's containers"
    )


def module_name(module: Any) -> str:
    """Return a module's name in `MODULES`."""
    return "tensorrt_rtx" if "rtx" in module.__name__ else "tensorrt"


def module_version(module: Any) -> str:
    """Return the version, such as 1.7.1.116. A plan runs only with the version that has built it."""
    return module.__version__


def make_logger(module: Any) -> Any:
    """Return a logger for TensorRT that writes to this package's log and keeps errors in the attribute `errors`.

    TensorRT uses a process's first logger as long as the process lives.
    """

    class Logger(module.ILogger):
        def __init__(self) -> None:
            module.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, msg: str) -> None:
            severities = module.ILogger.Severity
            if severity in (severities.INTERNAL_ERROR, severities.ERROR):
                self.errors.append(msg)
            _log.debug("%s", msg)  # an error is raised by the caller of the failing operation

    return Logger()

"""What a model can do with itself through Triton's model control. Any thread but the one that Triton calls on."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from inflight.processes import ProcessId

_EXPLICIT = "--model-control-mode=explicit"
_MODE, _EXPLICIT_VALUE = "--model-control-mode", "explicit"


class TritonModelControl:
    """Of the model `name`."""

    def __init__(self, pb_utils: Any, name: str) -> None:
        self._pb_utils = pb_utils
        self._name = name

    def unload(self) -> None:
        """Make it unready: returns at once, and the process lives on while it has requests or streams."""
        self._pb_utils.unload_model(self._name)

    def load(self) -> None:
        """Start its next process; returns when that has been initialized. Raises what Triton does if it is not."""
        self._pb_utils.load_model(self._name)


def has_explicit_control(server: ProcessId) -> bool:
    """Whether models of this tritonserver are unloaded and loaded by request.

    By its arguments: to ask pb_utils would be an error in any other mode, and those can crash the server.
    """
    try:
        arguments = Path(f"/proc/{server.pid}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return False
    return _EXPLICIT in arguments or (_MODE, _EXPLICIT_VALUE) in pairwise(arguments)

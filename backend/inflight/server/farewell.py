"""Tells the engines of a server that it ends, and notes when they have answered everything.

Triton gives a model no notice of its end while requests are in flight: past the exit timeout they would be dropped
without an answer. An engine that is told ends them with UNAVAILABLE in time. One thread per engine.
"""

import threading
import time
from collections.abc import Sequence
from pathlib import Path

from inflight.endpoint.client import drain_engine


class Farewell:
    """Under way from construction.

    Args:
        sockets: The engines' endpoints.
        timeout_s: How long their requests may go on.
    """

    def __init__(self, sockets: Sequence[Path], timeout_s: float) -> None:
        self._done_at: list[float] = []
        self._count = len(sockets)
        for socket in sockets:
            threading.Thread(target=self._drain, args=(str(socket), timeout_s), daemon=True).start()

    def seconds(self) -> float:
        """Time since the last engine had answered everything, 0 until then."""
        return time.monotonic() - max(self._done_at) if len(self._done_at) == self._count else 0.0

    def _drain(self, path: str, timeout_s: float) -> None:
        drain_engine(path, timeout_s)  # an engine that cannot be reached has nothing in flight
        self._done_at.append(time.monotonic())

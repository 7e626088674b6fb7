"""Update the metrics page before each scrape, so that it includes all requests answered before the scrape.

Otherwise the page would lag behind by the time that publishing takes and by the pauses between publications.
tritonserver does not notify models of a scrape, but `server/preload/request_checks.c`, which is loaded into
tritonserver, does: it connects to this module's socket, and delays the scrape until the connection is
closed. Owns the socket and one thread.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from inflight.server.runtime_directory import FOLDER_VARIABLE, read_pid

_TIMEOUT_S = 0.35
_PAUSE_S = 0.1
_log = logging.getLogger(__name__)


class MetricsOnDemand:
    """Listens for scrapes of the page from construction to `close`, if `scripts/serve` started the server.

    Args:
        flush: Function that updates the page in at most the given number of seconds.
        model: Name of the model.
    """

    def __init__(self, flush: Callable[[float], None], model: str) -> None:
        self._flush = flush
        self._listener: socket.socket | None = None
        folder = Path(os.environ.get(FOLDER_VARIABLE, "."))
        if read_pid(folder) is None:  # not a server of `scripts/serve`: no process would connect
            return
        path = folder / f"metrics-{model}"
        with contextlib.suppress(OSError):  # without a socket, the page lags behind
            path.unlink(missing_ok=True)  # a leftover of this model's previous process
            self._listener = listener = socket.socket(socket.AF_UNIX)
            listener.bind(str(path))
            listener.listen()
            threading.Thread(target=self._serve, args=(listener,), name="metrics-demand", daemon=True).start()

    def close(self) -> None:
        """Stop listening. Idempotent."""
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ECONNABORTED):
                    time.sleep(_PAUSE_S)  # other threads may close descriptors
                    continue
                return  # the listener has been closed
            with connection:
                try:
                    self._flush(_TIMEOUT_S)
                except Exception:  # any error: the page may lag, but the thread must go on
                    _log.exception("the metrics page could not be brought up to date")

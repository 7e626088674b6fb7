"""Brings the metrics page up to date when somebody asks for it: what was answered before is on it.

Otherwise a page lags behind answers by what publishing takes and by the pauses between publications. tritonserver
does not tell models that its page is read; `server/preload/request_checks.c`, which is loaded into it, does: it
connects to this socket, and reads the page when the socket's other end is closed. Owns that socket and one thread.
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
    """Listens from construction to `close`, in the folder of a server that `scripts/serve` has started.

    Args:
        flush: Brings the page up to date, in so many seconds at most.
        model: The model's name.
    """

    def __init__(self, flush: Callable[[float], None], model: str) -> None:
        self._flush = flush
        self._listener: socket.socket | None = None
        folder = Path(os.environ.get(FOLDER_VARIABLE, "."))
        if read_pid(folder) is None:  # nobody has made the folder for a server, and nobody would ask
            return
        path = folder / f"metrics-{model}"
        with contextlib.suppress(OSError):  # pages lag, then
            path.unlink(missing_ok=True)  # of this model's last process
            self._listener = listener = socket.socket(socket.AF_UNIX)
            listener.bind(str(path))
            listener.listen()
            threading.Thread(target=self._serve, args=(listener,), name="metrics-demand", daemon=True).start()

    def close(self) -> None:
        """Listen no longer. Idempotent."""
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
                    time.sleep(_PAUSE_S)  # others may give descriptors back
                    continue
                return  # it has been closed
            with connection:
                try:
                    self._flush(_TIMEOUT_S)
                except Exception:  # a page that lags is better than none from now on
                    _log.exception("the metrics page could not be brought up to date")

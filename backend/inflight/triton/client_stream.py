"""One client's end of one request: Triton's response sender, with the final flag sent exactly once.

Owns the moment after which the sender must not be touched: Triton frees what `is_cancelled` looks at when it
gets the final flag, so asking and finishing exclude each other. Does not know what a response holds. Any thread.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Protocol


class ResponseSender(Protocol):
    """What is used of Triton's response sender."""

    def send(self, response: Any = None, flags: int = 0) -> None:
        """Hand one response, final flag or both to Triton."""

    def is_cancelled(self) -> bool:
        """Ask Triton, by a round trip, whether the client cancelled or went away."""


class ClientStream:
    """Sends a request's responses. `send` and `finish` belong to one thread at a time."""

    def __init__(self, sender: ResponseSender, final_flag: int) -> None:
        self._sender = sender
        self._final_flag = final_flag
        self._lock = threading.Lock()
        self._finished = False

    def send(self, response: Any) -> None:
        """Send one response of several."""
        self._sender.send(response)

    def finish(self, response: Any = None) -> None:
        """Send the last response, or none, with the final flag. Only the first call does anything."""
        with self._lock:
            if self._finished:
                return
            self._finished = True
            try:
                self._send_final(response)
            except Exception:
                # A response that Triton does not take must not keep the client waiting for the end.
                with contextlib.suppress(Exception):
                    self._send_final(None)
                raise

    def is_cancelled(self) -> bool:
        """Whether the client cancelled or went away; false once the request is finished."""
        with self._lock:
            return not self._finished and self._sender.is_cancelled()

    def _send_final(self, response: Any) -> None:
        if response is None:
            self._sender.send(flags=self._final_flag)
        else:
            self._sender.send(response, flags=self._final_flag)

"""How many bytes of weights requests have brought that are not stored yet; past a limit, requests are refused.

A request's weights count from its arrival until the adapter cache has stored them, does not want them, or the
request has ended. Any thread.
"""

from __future__ import annotations

import threading

from inflight.errors import Unavailable


class WaitingWeights:
    """The weights that wait, by request.

    Args:
        max_bytes: What they may take together; the weights of one request alone may always wait.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._sizes: dict[int, int] = {}  # by request id
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """The bytes of all waiting weights together."""
        return self._num_bytes

    def add(self, request_id: int, num_bytes: int) -> None:
        """Count the weights of a request that has come; raises Unavailable if others leave no room for them."""
        with self._lock:
            if self._num_bytes and self._num_bytes + num_bytes > self._max_bytes:
                raise Unavailable(
                    f"lora_weights has {num_bytes} bytes, and {self._num_bytes} bytes of other requests' "
                    "lora_weights wait to be stored, expected at most lora_cache_host_memory_bytes of them "
                    f"together, which is {self._max_bytes}: send this request again later"
                )
            self._sizes[request_id] = num_bytes
            self._num_bytes += num_bytes

    def remove(self, request_id: int) -> None:
        """A request's weights wait no longer; nothing happens if it has brought none."""
        with self._lock:
            self._num_bytes -= self._sizes.pop(request_id, 0)

"""The size of adapter weights in requests that are not stored yet; requests beyond a limit are refused.

A request's weights count from its arrival until the adapter cache has stored or rejected them, or the request
has ended. Any thread.
"""

from __future__ import annotations

import threading

from inflight.errors import Unavailable


class WaitingWeights:
    """Sizes of waiting weights by request.

    Args:
        max_bytes: Maximum total size in bytes; a single request's weights may wait even if they are larger.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._sizes: dict[int, int] = {}  # by request id
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Return the size of all waiting weights together, in bytes."""
        return self._num_bytes

    def add(self, request_id: int, num_bytes: int) -> None:
        """Count the weights of an arrived request; raise Unavailable if the total would exceed the limit."""
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
        """Stop counting a request's weights, if it has any."""
        with self._lock:
            self._num_bytes -= self._sizes.pop(request_id, 0)

"""Responses on their way to a consumer that may be slower than the engine.

Owns the waiting responses of one consumer (a sender thread, a connection's writer). The consumer gets one joined
response per request however many have come meanwhile, so that what it has to do is bounded by the number of
requests and not by the tokens they produce.

Does not know who the consumer is or what it does with a response. Any thread may call `put` and `close`; one or
more consumer threads sit in `get`. Nobody polls: an idle consumer sleeps in a condition variable.
"""

from __future__ import annotations

import threading
from itertools import islice

from inflight.core.response import Response, merge_responses


class Mailbox:
    """Queue of responses that joins those of one request, served in the order in which requests began to wait.

    An id must not be used again while its final response still waits here.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._waiting: dict[int, list[Response]] = {}  # in order of first insertion, hence fair
        self._num_consumers_asleep = 0
        self._closed = False

    def __len__(self) -> int:
        """Requests with a response waiting."""
        return len(self._waiting)

    def put(self, response: Response) -> None:
        """Hand over one response in O(1), without waiting for a consumer.

        A request that already waits keeps its place in the queue. After `close` the response is dropped.
        """
        with self._changed:
            if self._closed:
                return
            backlog = self._waiting.get(response.request_id)
            if backlog is not None:
                backlog.append(response)  # joined by the consumer: the producer is the loop's thread
                return
            self._waiting[response.request_id] = [response]
            if self._num_consumers_asleep:
                self._changed.notify()

    def get(self, limit: int = 0, timeout: float | None = None) -> list[Response]:
        """Wait for responses and take them, longest waiting first, one per request.

        Args:
            limit: Most responses to take; 0 takes all. A slow consumer takes few at a time, so that what it
                leaves goes on being joined.
            timeout: Seconds to wait for the first response; None waits until there is one.

        Returns:
            The responses; empty when the mailbox is closed and drained, or when the time is up.
        """
        with self._changed:
            if not self._waiting and not self._closed:
                self._sleep(timeout)
            backlogs = self._take(limit)
        return [merge_responses(backlog) for backlog in backlogs]

    def close(self) -> None:
        """Accept nothing more. What waits is still delivered; after that `get` returns an empty list."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _sleep(self, timeout: float | None) -> None:
        self._num_consumers_asleep += 1
        try:
            self._changed.wait_for(lambda: bool(self._waiting) or self._closed, timeout)
        finally:
            self._num_consumers_asleep -= 1

    def _take(self, limit: int) -> list[list[Response]]:
        keys = list(islice(self._waiting, limit or None))
        return [self._waiting.pop(key) for key in keys]

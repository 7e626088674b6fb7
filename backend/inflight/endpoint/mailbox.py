"""Responses on their way to a consumer that may be slower than the engine.

The mailbox owns the waiting responses of one consumer (a sender thread, a connection's writer). The consumer
gets one joined response per sequence however many have come meanwhile, so that what it has to do is bounded by
the number of sequences and not by the tokens they produce. A request's final response comes out after everything
else of the request: its sequences are joined apart, and end in any order.

It does not know who the consumer is or what it does with a response. Any thread may call `put` and `close`; one or
more consumer threads sit in `get`. Nobody polls: an idle consumer sleeps in a condition variable.
"""

from __future__ import annotations

import threading
from itertools import islice

from inflight.core.request.response import Response, merge_responses

MAX_JOINED_LOGITS_BYTES = 8 << 20
"""Responses with more generation_logits and additional outputs than this together are not joined: else a stream
that falls behind would need as much room on its way as the whole answer."""

_Key = tuple[int, int]  # request id, sequence index


class Mailbox:
    """A queue of responses that joins those of one sequence, served in the order in which sequences began to wait.

    An id must not be used again while its final response still waits here.
    """

    def __init__(self) -> None:
        lock = threading.Lock()
        self._changed = threading.Condition(lock)
        self._asleep = threading.Condition(lock)
        self._waiting: dict[_Key, list[Response]] = {}  # in order of first insertion, hence fair
        # By request, which sequences wait beside the first; requests with one sequence are not here.
        self._further: dict[int, set[int]] = {}
        self._num_consumers_asleep = 0
        self._closed = False

    def __len__(self) -> int:
        """Number of sequences with a response waiting."""
        return len(self._waiting)

    def put(self, response: Response) -> None:
        """Hand over one response in O(1), without waiting for a consumer; an error in O(sequences).

        A sequence that already waits keeps its place in the queue. After `close` the response is dropped.
        """
        key = (response.request_id, response.sequence_index)
        with self._changed:
            if self._closed:
                return
            if response.result is None:
                self._drop_all(response.request_id)
            backlog = self._waiting.get(key)
            if backlog is not None:
                backlog.append(response)  # joined by the consumer: the producer is the loop's thread
                return
            self._append(key, [response])
            if self._num_consumers_asleep:
                self._changed.notify()

    def get(self, limit: int = 0, timeout: float | None = None) -> list[Response]:
        """Wait for responses and take them, longest waiting first, one per sequence.

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

    def wait_until_taken(self, timeout: float) -> bool:
        """Wait until nothing waits here and a consumer is back for more, for `timeout` seconds at most.

        Returns whether that is so. A consumer that is back has dealt with all that it took.
        """
        with self._changed:
            return self._asleep.wait_for(
                lambda: self._closed or (not self._waiting and self._num_consumers_asleep > 0), timeout
            )

    def close(self) -> None:
        """Accept nothing more. What waits is still delivered; after that `get` returns an empty list."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._asleep.notify_all()

    def _append(self, key: _Key, backlog: list[Response]) -> None:
        self._waiting[key] = backlog
        if key[1]:
            self._further.setdefault(key[0], set()).add(key[1])

    def _remove(self, key: _Key) -> list[Response]:
        further = self._further.get(key[0])
        if further is not None:
            further.discard(key[1])
            if not further:
                del self._further[key[0]]
        return self._waiting.pop(key, [])

    def _drop_all(self, request_id: int) -> None:
        """Drop a request's responses, because an error follows, which takes the first sequence's place."""
        for index in tuple(self._further.get(request_id, ())):
            self._remove((request_id, index))
        if (request_id, 0) in self._waiting:
            self._waiting[request_id, 0].clear()

    def _sleep(self, timeout: float | None) -> None:
        self._num_consumers_asleep += 1
        self._asleep.notify_all()
        try:
            self._changed.wait_for(lambda: bool(self._waiting) or self._closed, timeout)
        finally:
            self._num_consumers_asleep -= 1

    def _take(self, limit: int) -> list[list[Response]]:
        taken: list[list[Response]] = []
        while self._waiting and not taken:
            for key in list(islice(self._waiting, limit or None)):
                backlog = self._remove(key)
                if backlog[-1].is_final and self._waits(key[0]):
                    self._append(key, backlog)  # behind its request's other sequences
                    continue
                count = _num_joined(backlog)
                taken.append(backlog[:count])
                if count < len(backlog):
                    self._append(key, backlog[count:])
        return taken

    def _waits(self, request_id: int) -> bool:
        return request_id in self._further or (request_id, 0) in self._waiting


def _num_joined(backlog: list[Response]) -> int:
    """How many responses, from the first on, to join: all, unless their logits are too large."""
    last = backlog[-1].result
    if last is None or last.is_cumulative or (last.generation_logits is None and not last.additional_outputs):
        return len(backlog)
    num_bytes = 0
    for count, response in enumerate(backlog):
        num_bytes += 0 if response.result is None else response.result.num_tensor_bytes
        if num_bytes > MAX_JOINED_LOGITS_BYTES:
            return max(count, 1)
    return len(backlog)

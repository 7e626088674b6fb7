"""Requests that a program has enqueued: their unfetched answers, and which requests have ended.

Answers wait in a `Delivery` without joining, since programs count them. Any thread may call any method; locks
are held only while references are moved.
"""

from __future__ import annotations

import threading

from inflight.endpoint.delivery import Delivery
from inflight.executor.results import Answers, EngineAnswer


class EnqueuedRequests:
    """The requests of one Executor with their unfetched answers."""

    def __init__(self) -> None:
        self._answers: Delivery[EngineAnswer] = Delivery(joins=False)
        self._lock = threading.Lock()
        self._open: set[int] = set()  # enqueued requests without a final answer
        self._newest_id = 0
        self._num_unfinished = 0

    def announce(self, num_sequences: int, most: int | None) -> bool:
        """Count sequences to be enqueued; count none and return False if that would exceed `most`."""
        with self._lock:
            if most is not None and self._num_unfinished + num_sequences > most:
                return False
            self._num_unfinished += num_sequences
            return True

    def retract(self, num_sequences: int) -> None:
        """Remove sequences from the count that have ended or were not enqueued."""
        with self._lock:
            self._num_unfinished -= num_sequences

    def open(self, request_id: int, answers: Answers) -> None:
        """Register a request that the engine has taken, even if its answers have arrived or been fetched."""
        with self._lock:
            self._newest_id = max(self._newest_id, request_id)
            if not answers.have_ended:
                self._open.add(request_id)

    def put(self, answer: EngineAnswer) -> None:
        """Add an answer and wake waiting threads. On the engine's thread."""
        with self._lock:
            self._answers.put(answer)
            if answer.is_final:
                answer.answers.have_ended = True
                self._open.discard(answer.request_id)

    def is_ended(self, request_id: int) -> bool:
        """Return whether the final answer of this request has been fetched."""
        with self._lock:
            has_come = 0 < request_id <= self._newest_id and request_id not in self._open
            return has_come and not self._answers.count(request_id)

    def take(self, timeout_s: float | None, request_id: int | None = None) -> list[EngineAnswer]:
        """Wait for an answer, of one request or of any, and return all there are, like `Delivery.take`."""
        return self._answers.take(timeout_s, request_id)

    def count(self, request_id: int | None = None) -> int:
        """Return the number of unfetched answers, of one request or of all."""
        return self._answers.count(request_id)

    def close(self) -> None:
        """Wake all waiting threads, and let no thread wait from now on."""
        self._answers.close()

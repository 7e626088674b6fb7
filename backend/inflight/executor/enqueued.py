"""The requests that a program has enqueued: their unfetched answers, and which requests have ended.

Answers wait in a `Delivery` that does not merge them, because programs count responses. Any thread may call
any method; locks are held only while references are moved.
"""

from __future__ import annotations

import threading

from inflight.endpoint.delivery import Delivery
from inflight.executor.results import Answers, EngineAnswer


class EnqueuedRequests:
    """The requests of one Executor, with their unfetched answers."""

    def __init__(self) -> None:
        self._answers: Delivery[EngineAnswer] = Delivery(merges=False)
        self._lock = threading.Lock()
        self._open: set[int] = set()  # enqueued requests without a final answer
        self._newest_id = 0
        self._num_unfinished = 0

    def reserve(self, num_sequences: int, most: int | None) -> bool:
        """Add sequences to the number of enqueued ones; add none and return False if it would exceed `most`."""
        with self._lock:
            if most is not None and self._num_unfinished + num_sequences > most:
                return False
            self._num_unfinished += num_sequences
            return True

    def release(self, num_sequences: int) -> None:
        """Subtract sequences that have ended, or were not enqueued after all, from the number of enqueued ones."""
        with self._lock:
            self._num_unfinished -= num_sequences

    def open(self, request_id: int, answers: Answers) -> None:
        """Register a request that the engine has accepted.

        Its answers may already have arrived or been fetched.
        """
        with self._lock:
            self._newest_id = max(self._newest_id, request_id)
            if not answers.have_ended:
                self._open.add(request_id)

    def put(self, answer: EngineAnswer) -> None:
        """Add an answer and wake waiting threads. Runs on the engine's thread."""
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
        """Wait for an answer to one request, or to any, and return all that wait, like `Delivery.take`."""
        return self._answers.take(timeout_s, request_id)

    def count(self, request_id: int | None = None) -> int:
        """Return the number of unfetched answers to one request, or to all."""
        return self._answers.count(request_id)

    def close(self) -> None:
        """Wake all waiting threads, and let no thread wait from now on."""
        self._answers.close()

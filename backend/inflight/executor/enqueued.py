"""Requests that a program has enqueued: answers that it has not fetched yet, and which requests have ended.

The answers wait in a `Delivery`, each as it came: a program counts them. Any thread may call any method; the locks
are held for no longer than it takes to move references.
"""

from __future__ import annotations

import threading

from inflight.endpoint.delivery import Delivery
from inflight.executor.results import Answers, EngineAnswer


class EnqueuedRequests:
    """The requests of one Executor, and what waits to be fetched of them."""

    def __init__(self) -> None:
        self._answers: Delivery[EngineAnswer] = Delivery(joins=False)
        self._lock = threading.Lock()
        self._open: set[int] = set()  # enqueued, and the final answer has not come
        self._newest_id = 0
        self._num_unfinished = 0

    def announce(self, num_sequences: int, most: int | None) -> bool:
        """Count sequences that are about to be enqueued; False if there would be more than `most`."""
        with self._lock:
            if most is not None and self._num_unfinished + num_sequences > most:
                return False
            self._num_unfinished += num_sequences
            return True

    def retract(self, num_sequences: int) -> None:
        """Count sequences no longer: they have ended, or were not enqueued after all."""
        with self._lock:
            self._num_unfinished -= num_sequences

    def open(self, request_id: int, answers: Answers) -> None:
        """Note that the engine has taken a request, whose answers may be here already, or even be fetched."""
        with self._lock:
            self._newest_id = max(self._newest_id, request_id)
            if not answers.have_ended:
                self._open.add(request_id)

    def put(self, answer: EngineAnswer) -> None:
        """Add an answer and wake whoever waits. The engine's thread."""
        with self._lock:
            self._answers.put(answer)
            if answer.is_final:
                answer.answers.have_ended = True
                self._open.discard(answer.request_id)

    def is_ended(self, request_id: int) -> bool:
        """Whether the final answer of this request has been fetched."""
        with self._lock:
            has_come = 0 < request_id <= self._newest_id and request_id not in self._open
            return has_come and not self._answers.count(request_id)

    def take(self, timeout_s: float | None, request_id: int | None = None) -> list[EngineAnswer]:
        """Wait for an answer, of one request or of any, and take all there are; as `Delivery.take`."""
        return self._answers.take(timeout_s, request_id)

    def count(self, request_id: int | None = None) -> int:
        """How many answers wait, of one request or of all."""
        return self._answers.count(request_id)

    def close(self) -> None:
        """Let nobody wait any more."""
        self._answers.close()

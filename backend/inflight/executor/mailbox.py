"""Answers between the engine's thread and the threads of clients, which wait for some or for all of them.

The mailbox owns the answers that nobody has fetched yet, and knows which requests are open, that is, enqueued and
not answered to the end. Any thread may call any method; the lock is held for no longer than it takes to move
references.
"""

from __future__ import annotations

import threading

from inflight.executor.results import Answer, Answers


class Mailbox:
    """Waiting answers, by request, in order of arrival."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ready: dict[int, list[Answer]] = {}
        self._open: set[int] = set()
        self._newest_id = 0
        self._num_unfinished = 0
        self._is_closed = False

    def announce(self, num_sequences: int, most: int | None) -> bool:
        """Count sequences that are about to be enqueued; False if there would be more than `most`."""
        with self._changed:
            if most is not None and self._num_unfinished + num_sequences > most:
                return False
            self._num_unfinished += num_sequences
            return True

    def retract(self, num_sequences: int) -> None:
        """These have ended, or were not enqueued after all."""
        with self._changed:
            self._num_unfinished -= num_sequences

    def open(self, request_id: int, answers: Answers) -> None:
        """Note that the engine has taken a request, whose answers may be here already, or even be fetched."""
        with self._changed:
            self._newest_id = max(self._newest_id, request_id)
            if not answers.is_taken:
                self._open.add(request_id)

    def put(self, answer: Answer) -> None:
        """Add an answer and wake whoever waits. The engine's thread."""
        with self._changed:
            self._ready.setdefault(answer.request_id, []).append(answer)
            self._changed.notify_all()

    def is_ended(self, request_id: int) -> bool:
        """Whether the final answer of this request has been fetched."""
        with self._changed:
            return 0 < request_id <= self._newest_id and request_id not in self._open

    def take_all(self, timeout_s: float | None) -> list[Answer]:
        """Wait for any answer and take all there are; none if the time is up or the mailbox is closed."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._ready) or self._is_closed, timeout_s)
            return [answer for request_id in list(self._ready) for answer in self._take(request_id)]

    def take(self, request_id: int, timeout_s: float | None) -> list[Answer]:
        """The same for one request."""
        with self._changed:
            self._changed.wait_for(lambda: request_id in self._ready or self._is_closed, timeout_s)
            return self._take(request_id)

    def count(self, request_id: int | None = None) -> int:
        """How many answers wait, of one request or of all."""
        with self._changed:
            if request_id is not None:
                return len(self._ready.get(request_id, ()))
            return sum(map(len, self._ready.values()))

    def close(self) -> None:
        """Let nobody wait any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _take(self, request_id: int) -> list[Answer]:
        taken = self._ready.pop(request_id, [])
        if taken and taken[-1].is_final:
            taken[-1].answers.is_taken = True
            self._open.discard(request_id)
        return taken

"""Which request makes iterations fail: halves of those that were in a failed batch are tried apart.

Owns the sets of requests still to be tried; the first one has the device to itself. A set whose iteration fails is
split; a request that fails alone is faulty. A set all of whose sequences got past the point where they failed is
innocent. n requests with one faulty among them take about 2 log2(n) iterations more.

Knows nothing of states, slots or blocks. Called by the scheduler, on the loop thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence


class Isolation:
    """Suspects, by request id, in the order in which they will be tried."""

    def __init__(self) -> None:
        self._sets: deque[tuple[int, ...]] = deque()

    @property
    def is_active(self) -> bool:
        """Whether anybody is under suspicion."""
        return bool(self._sets)

    @property
    def retrying(self) -> tuple[int, ...]:
        """The requests that have the device to themselves now; () for everybody."""
        return self._sets[0] if self._sets else ()

    @property
    def suspects(self) -> tuple[int, ...]:
        """All of them."""
        return tuple(request_id for each in self._sets for request_id in each)

    def failed(self, request_ids: Sequence[int], was_alone: bool) -> int | None:
        """An iteration with these requests failed; the one that is faulty, if that is certain.

        Args:
            request_ids: Who was in it; every one is to be tried again.
            was_alone: Whether nobody else was.
        """
        self._clear(request_ids)
        if len(request_ids) == 1 and was_alone:
            return request_ids[0]
        half = (len(request_ids) + 1) // 2
        for part in (request_ids[half:], request_ids[:half]):
            if part:
                self._sets.appendleft(tuple(part))
        return None

    def clear(self, but: Collection[int] = ()) -> None:
        """Nothing more is held against those being retried, `but` for some, who are to be tried again."""
        self._sets.popleft()
        if but:
            self._sets.appendleft(tuple(but))

    def _clear(self, request_ids: Collection[int]) -> None:
        rest = (tuple(i for i in each if i not in request_ids) for each in self._sets)
        self._sets = deque(each for each in rest if each)

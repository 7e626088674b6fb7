"""Which requests have run out of time. Called by the scheduler, on the loop thread."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from inflight.core.request.llm_request import RequestGroup


class Deadlines:
    """Requests by deadline. Ended ones need not be taken out: they are passed over, and dropped now and then."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, RequestGroup]] = []
        self._drop_at = 64

    def add(self, group: RequestGroup) -> None:
        """Watch a request, if it has a deadline."""
        if not group.deadline_ns:
            return
        heappush(self._heap, (group.deadline_ns, group.sequences[0].key, group))
        if len(self._heap) > self._drop_at:
            self._heap = [entry for entry in self._heap if entry[2].num_unfinished]
            heapify(self._heap)
            self._drop_at = 2 * len(self._heap) + 64

    def pop_expired(self, now_ns: int) -> list[RequestGroup]:
        """Those whose deadline has come and which have not ended, each once."""
        expired = []
        while self._heap and self._heap[0][0] <= now_ns:
            group = heappop(self._heap)[2]
            if group.num_unfinished:
                expired.append(group)
        return expired

"""The device's slots: which are free, and whose the others are. The lowest are taken first.

Called by the scheduler, on the loop thread.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from inflight.core.request.llm_request import LlmRequest


class Slots:
    """A fixed number of slots.

    Attributes:
        count: How many there are.
        owners: Who has the slots that are taken; a beam search has several.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.owners: dict[int, LlmRequest] = {}
        self._free = list(range(count))
        self._released: list[int] = []

    @property
    def num_free(self) -> int:
        """Slots that can be taken."""
        return len(self._free)

    def take(self, owner: LlmRequest, count: int) -> tuple[int, ...]:
        """The lowest `count` free slots; there must be as many."""
        slots = tuple(heapq.heappop(self._free) for _ in range(count))
        self.owners.update(dict.fromkeys(slots, owner))
        return slots

    def release(self, slots: Iterable[int]) -> None:
        """Give slots back; the device has to be told before they are taken again."""
        for slot in slots:
            del self.owners[slot]
            heapq.heappush(self._free, slot)
            self._released.append(slot)

    def clear(self) -> None:
        """Take all slots back; the device is to forget every one of them."""
        self.owners.clear()
        self._free = list(range(self.count))
        self._released = list(range(self.count))

    def tell_again(self, slots: Iterable[int]) -> None:
        """Slots given back earlier, of which the device may not have heard; not those that are taken again."""
        known = {*self._released, *self.owners}
        self._released += [slot for slot in slots if slot not in known]

    def collect_released(self) -> tuple[int, ...]:
        """Slots given back since the last call."""
        released, self._released = tuple(self._released), []
        return released

    def check_integrity(self) -> None:
        """Raise AssertionError unless every slot is free or taken, and not both."""
        assert len(self.owners) + len(self._free) == self.count
        assert not set(self._free) & set(self.owners)

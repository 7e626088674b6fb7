"""The running sequences, in order of admission, and the device's slots.

Owns the list of running sequences and the slots. Releasing a sequence also releases its block tables and adapter
pages. Makes no scheduling decisions. Used by the scheduler, on the loop thread.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from inflight.core.kv.kv_cache_manager import BlockCounts, KvCacheManager
from inflight.core.request.llm_request import LlmRequest
from inflight.core.schedule.adapter_pages import AdapterPages
from inflight.core.schedule.batch import EngineLimits


class Slots:
    """The device's slots: the free slots, and the owners of taken slots. The lowest free slots are taken first.

    Attributes:
        count: Number of slots.
        owners: The sequence in each slot that is taken; a beam search has several slots.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.owners: dict[int, LlmRequest] = {}
        self._free = list(range(count))
        self._released: list[int] = []

    @property
    def num_free(self) -> int:
        """Number of free slots."""
        return len(self._free)

    def take(self, owner: LlmRequest, count: int) -> tuple[int, ...]:
        """Give the lowest `count` free slots to a sequence; at least `count` must be free."""
        slots = tuple(heapq.heappop(self._free) for _ in range(count))
        self.owners.update(dict.fromkeys(slots, owner))
        return slots

    def release(self, slots: Iterable[int]) -> None:
        """Free these slots; the next batch reports them to the device."""
        for slot in slots:
            del self.owners[slot]
            heapq.heappush(self._free, slot)
            self._released.append(slot)

    def clear(self) -> None:
        """Free all slots; the next batch reports them to the device."""
        self.owners.clear()
        self._free = list(range(self.count))
        self._released = list(range(self.count))

    def release_again(self, slots: Iterable[int]) -> None:
        """Report slots that were freed earlier to the device again, except slots that have been taken since."""
        known = {*self._released, *self.owners}
        self._released += [slot for slot in slots if slot not in known]

    def collect_released(self) -> tuple[int, ...]:
        """Return the slots freed since the last call."""
        released, self._released = tuple(self._released), []
        return released


class Running:
    """The running sequences, and the slots of the device that they occupy.

    Attributes:
        sequences: The sequences, in order of admission.
        slots: The device's slots.
        adapter_pages: The device's pages for adapters and their users.
    """

    def __init__(self, limits: EngineLimits, kv_cache: KvCacheManager) -> None:
        self.sequences: list[LlmRequest] = []
        self.slots = Slots(limits.max_num_sequences)
        self.adapter_pages = AdapterPages(limits)
        self._kv_cache = kv_cache

    def start(self, llm_request: LlmRequest, num_reused_tokens: int) -> None:
        """Give slots to a sequence whose blocks are reserved, and load its adapter if necessary."""
        if llm_request.group.adapter is not None:
            self.adapter_pages.acquire(llm_request.key, llm_request.group.adapter)
        slots = self.slots.take(llm_request, llm_request.num_slots)
        llm_request.start(slots, num_reused_tokens)
        size = self._kv_cache.tokens_per_block
        llm_request.next_block_end = (num_reused_tokens // size + 1) * size
        self.sequences.append(llm_request)

    def leave(self, llm_request: LlmRequest) -> None:
        """Release a sequence's blocks, slots and adapter, if it has any."""
        if llm_request.slots:
            self.sequences.remove(llm_request)
            counts = self.block_counts(llm_request)
            llm_request.num_new_blocks = counts.new
            llm_request.num_reused_blocks = counts.reused
            llm_request.num_missed_blocks = counts.missed
        self._kv_cache.release(llm_request.key)
        self.adapter_pages.release(llm_request.key)
        self.slots.release(llm_request.slots)

    def clear(self) -> None:
        """Release all slots, blocks and adapter pages, even if their records are inconsistent."""
        self.sequences.clear()
        self.slots.clear()
        self.adapter_pages.clear()
        self._kv_cache.clear()

    def block_counts(self, llm_request: LlmRequest) -> BlockCounts:
        """Return how many blocks of a sequence's known tokens were new, reused and missed, over all its starts."""
        new, reused = llm_request.num_new_blocks, llm_request.num_reused_blocks
        missed = llm_request.num_missed_blocks
        if not llm_request.slots:
            return BlockCounts(new, reused, missed)
        now = self._kv_cache.block_counts(llm_request.key)
        return BlockCounts(new + now.new, reused + now.reused, missed + now.missed)

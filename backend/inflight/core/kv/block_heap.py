"""Blocks in the order of a key that may change: a heap whose outdated entries are dropped when they come up.

Knows nothing of what the keys mean. Called by the loop thread only.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

Key = tuple[int, ...]


class BlockHeap:
    """At most `num_blocks` blocks, each with one key; all keys of a heap have the same length.

    Every operation is O(log n), averaged over many: entries that no longer count stay until they come up, or until
    there are more entries than twice the blocks, when all that are outdated go at once.
    """

    __slots__ = ("_entries", "_key_of", "_most_entries")

    def __init__(self, num_blocks: int) -> None:
        self._entries: list[tuple[Key, int]] = []
        self._key_of: dict[int, Key] = {}
        self._most_entries = 2 * num_blocks

    def __len__(self) -> int:
        """Blocks, not entries."""
        return len(self._key_of)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._key_of

    @property
    def num_entries(self) -> int:
        """Entries, outdated ones included: never more than twice the blocks there can be."""
        return len(self._entries)

    def key(self, block_id: int) -> Key | None:
        """The block's key; None if it is not here."""
        return self._key_of.get(block_id)

    def put(self, block_id: int, key: Key) -> None:
        """Add a block, or change its key."""
        if self._key_of.get(block_id) == key:
            return
        self._key_of[block_id] = key
        if len(self._entries) < self._most_entries:
            heappush(self._entries, (key, block_id))
            return
        self._entries = [(key, block_id) for block_id, key in self._key_of.items()]
        heapify(self._entries)

    def discard(self, block_id: int) -> None:
        """Take a block out, if it is here."""
        self._key_of.pop(block_id, None)

    def first_key(self) -> Key | None:
        """The smallest key; None without blocks."""
        entries = self._entries
        while entries:
            key, block_id = entries[0]
            if self._key_of.get(block_id) == key:
                return key
            heappop(entries)
        return None

    def pop(self) -> int:
        """Take the block with the smallest key out; there must be one."""
        assert self.first_key() is not None, "the heap is empty"
        _, block_id = heappop(self._entries)
        del self._key_of[block_id]
        return block_id

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block can come up, in order."""
        entries = self._entries
        assert len(entries) <= self._most_entries, f"{len(entries)} entries, at most {self._most_entries}"
        missing = {(key, block_id) for block_id, key in self._key_of.items()}.difference(entries)
        assert not missing, f"blocks that can never come up: {sorted(missing)}"
        in_order = all(entries[(place - 1) // 2] <= entries[place] for place in range(1, len(entries)))
        assert in_order, "the heap is out of order"

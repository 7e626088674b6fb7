"""The KV blocks of the device, as integers: owns their reference counts, the free list and the reuse index.

    held    reference count > 0, in some block tables
    cached  reference count 0, in the free list, still found by its digest: content kept until it is taken
    free    reference count 0, in the free list, content worthless

Free blocks are taken first, then cached ones in the order in which they were released (least recently used).
Knows nothing of requests or tokens. Called by the loop thread only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class BlockPool:
    """A fixed number of blocks, 0 .. num_blocks - 1."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._digest_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be taken, cached ones included."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Blocks with at least one reference."""
        return self.num_blocks - len(self._free)

    def is_held(self, block_id: int) -> bool:
        """Whether some block table names the block."""
        return self._references[block_id] > 0

    def is_held_once(self, block_id: int) -> bool:
        """Whether exactly one block table names the block."""
        return self._references[block_id] == 1

    def find(self, digest: bytes) -> int | None:
        """The block whose content has this digest."""
        return self._block_of.get(digest)

    def take(self, count: int) -> tuple[int, ...]:
        """Take `count` blocks, with one reference each; there must be as many free ones."""
        assert count <= len(self._free), f"{count} blocks wanted, {len(self._free)} free"
        taken = tuple(self._free.popitem(last=False)[0] for _ in range(count))
        for block_id in taken:
            self._forget(block_id)
            self._references[block_id] = 1
        return taken

    def share(self, block_ids: Iterable[int]) -> None:
        """Add a reference to blocks that are held or cached."""
        for block_id in block_ids:
            if self._references[block_id] == 0:
                del self._free[block_id]
            self._references[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Drop one reference from each block, in the order in which they should be evicted."""
        for block_id in block_ids:
            self._references[block_id] -= 1
            assert self._references[block_id] >= 0, f"block {block_id} released more often than taken"
            if self._references[block_id] == 0:
                self._free[block_id] = None
                if block_id not in self._digest_of:
                    self._free.move_to_end(block_id, last=False)

    def publish(self, block_id: int, digest: bytes) -> None:
        """Let others find a held block by its content. The first block of a digest stays the one found."""
        if digest not in self._block_of:
            self._block_of[digest] = block_id
            self._digest_of[block_id] = digest

    def _forget(self, block_id: int) -> None:
        digest = self._digest_of.pop(block_id, None)
        if digest is not None:
            del self._block_of[digest]

    def check_references(self, block_ids: Iterable[int]) -> None:
        """Raise AssertionError unless `block_ids`, the entries of all block tables, are the references counted."""
        counts = [0] * self.num_blocks
        for block_id in block_ids:
            counts[block_id] += 1
        assert counts == self._references, "the block tables and the reference counts disagree"

    def check_integrity(self) -> None:
        """Raise AssertionError unless free + held == total and the reuse index points both ways."""
        held = sum(1 for count in self._references if count > 0)
        free = len(self._free)
        assert held + free == self.num_blocks, f"{held} held + {free} free != {self.num_blocks} blocks"
        assert all(self._references[block_id] == 0 for block_id in self._free), (
            "a held block is in the free list"
        )
        assert self._block_of == {digest: block_id for block_id, digest in self._digest_of.items()}

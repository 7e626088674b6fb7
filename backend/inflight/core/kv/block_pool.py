"""The device's KV blocks as integers: reference counts, the reuse index and the order of eviction.

    held    reference count > 0, in some block tables
    cached  reference count 0, published: content kept, and found by its digest, until the block is taken
    empty   reference count 0, not published: content worthless

Published blocks refer to their parents' digests, so they form trees. The next block to take is, in this order,

    1. an empty block, the last released first;
    2. a cached leaf, a block that is not the parent of a published block: the lowest priority first, and within a
       priority the least recently released. A parent whose last child is evicted becomes a leaf with its own
       priority and time, so a child protects its ancestors, without which it is useless;
    3. any other cached block, the least recently released first. Without cached leaves there are cached blocks
       only if a sequence holds a child whose parent it computed itself, in another block.

Children are counted by their parent's digest, not by its block id, because the parent's content may be published
again in another block while its children stay. The pool does not know requests. Used on the loop thread.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import islice

from inflight.core.kv.kv_events import KvEventLog
from inflight.core.kv.retention import Retention
from inflight.core.kv.state_snapshots import StateSnapshots

_NS_PER_MS = 1_000_000
_DEFAULT_RETENTION = Retention()
_MAX_COMPARED = 64
"""Maximum number of blocks whose tokens are compared to find the longest common beginning."""

Key = tuple[int, ...]
"""A block's rank in a BlockHeap: the block with the smallest key comes first."""


class BlockHeap:
    """Blocks ordered by a key that may change: a heap whose outdated entries are dropped when they surface.

    It has at most `num_blocks` blocks, each with one key; all keys have the same length. Every operation is
    amortized O(log n). An outdated entry stays until it surfaces, or until there are more than twice as many
    entries as blocks; then all outdated entries are dropped at once.
    """

    __slots__ = ("_entries", "_key_of", "_most_entries")

    def __init__(self, num_blocks: int) -> None:
        self._entries: list[tuple[Key, int]] = []
        self._key_of: dict[int, Key] = {}
        self._most_entries = 2 * num_blocks

    def __len__(self) -> int:
        """The number of blocks, without outdated entries."""
        return len(self._key_of)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._key_of

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
        """Remove a block, if it is in the heap."""
        self._key_of.pop(block_id, None)

    def first_key(self) -> Key | None:
        """The smallest key; None if the heap is empty."""
        entries = self._entries
        while entries:
            key, block_id = entries[0]
            if self._key_of.get(block_id) == key:
                return key
            heappop(entries)
        return None

    def pop(self) -> int:
        """Remove and return the block with the smallest key. The heap must not be empty."""
        assert self.first_key() is not None, "the heap is empty"
        _, block_id = heappop(self._entries)
        del self._key_of[block_id]
        return block_id


@dataclass(slots=True)
class _Content:
    """The content and history of a published block.

    Attributes:
        digest: Key of the block's content and all that comes before it.
        parent: Key of the block before it; for the first block, the scope.
        tokens: The content, one element per token.
        retention: How long the block is worth keeping.
        age: The pool's number of releases when the block was last released; lower means less recent.
    """

    digest: bytes
    parent: bytes
    tokens: tuple[Hashable, ...]
    retention: Retention
    age: int = 0


@dataclass(frozen=True, slots=True)
class BlockPeaks:
    """The highest numbers of free, held and cached blocks in a time."""

    free: int = 0
    held: int = 0
    cached: int = 0


class BlockPool:
    """The device's blocks, 0 .. num_blocks - 1, each of them held, cached or empty.

    Logs in `events`, if there is such a log, which content can no longer be found and which priorities
    changed. When a block's content is dropped, its snapshot of recurrent state in `states` is dropped too.
    """

    def __init__(
        self, num_blocks: int, events: KvEventLog | None = None, states: StateSnapshots | None = None
    ) -> None:
        self.num_blocks = num_blocks
        self._events = events
        self._states = states
        self._block_of: dict[bytes, int] = {}
        self._now_ns = 0
        self._peaks = 0, 0, 0
        self.clear()

    def clear(self, held: Collection[int] = ()) -> None:
        """Forget the content and the references of all blocks; those in `held` then have one reference.

        The log records the content as removed. Snapshots of recurrent state are not changed.
        """
        if self._events is not None:
            for digest in self._block_of:
                self._events.removed(digest)
        self._references = [int(block_id in held) for block_id in range(self.num_blocks)]
        # The last is taken first.
        self._empty = [block_id for block_id in reversed(range(self.num_blocks)) if block_id not in held]
        self._contents: dict[int, _Content] = {}
        self._block_of.clear()
        # The children of each parent, by digest, in order of publication; without empty entries.
        self._children: dict[bytes, dict[bytes, None]] = {}
        self._cached = BlockHeap(self.num_blocks)  # in the order of eviction
        self._expiries = BlockHeap(self.num_blocks)  # cached blocks with a retention duration, by its end
        self._num_releases = 0
        self._note_peaks()

    @property
    def peaks(self) -> BlockPeaks:
        """The highest numbers since `begin_peaks` was last called."""
        return BlockPeaks(*self._peaks)

    def begin_peaks(self) -> None:
        """Forget the highest numbers before now."""
        self._peaks = self.num_free, self.num_held, self.num_cached

    def _note_peaks(self) -> None:
        """Called when blocks have been taken, shared or released."""
        free, held, cached = self._peaks
        self._peaks = max(free, self.num_free), max(held, self.num_held), max(cached, self.num_cached)

    @property
    def num_free(self) -> int:
        """Number of blocks that can be taken, cached ones included."""
        return len(self._empty) + len(self._cached)

    @property
    def num_held(self) -> int:
        """Number of blocks with at least one reference."""
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        """Number of blocks without a reference whose content can be found."""
        return len(self._cached)

    @property
    def num_empty(self) -> int:
        """Number of blocks without a reference or usable content."""
        return len(self._empty)

    @property
    def num_shared(self) -> int:
        """Number of blocks with more than one reference; O(number of blocks)."""
        return sum(count > 1 for count in self._references)

    def is_held(self, block_id: int) -> bool:
        """Whether any block table has the block."""
        return self._references[block_id] > 0

    def is_held_once(self, block_id: int) -> bool:
        """Whether exactly one block table has the block."""
        return self._references[block_id] == 1

    def num_references(self, block_id: int) -> int:
        """Number of references that block tables hold to the block."""
        return self._references[block_id]

    def find(self, digest: bytes) -> int | None:
        """Return the published block whose content has this digest; None if there is none."""
        return self._block_of.get(digest)

    def find_beginning(self, parent: bytes, tokens: Sequence[Hashable]) -> tuple[int, int]:
        """Return the child of `parent` with the longest common beginning with `tokens`, and the beginning's
        length in tokens.

        (0, 0) if no child has a common beginning. Only the most recently published children are compared.
        """
        best = (0, 0)
        for digest in islice(reversed(self._children.get(parent, {})), _MAX_COMPARED):
            if best[1] == len(tokens):
                break
            block_id = self._block_of[digest]
            count = _num_alike(self._contents[block_id].tokens, tokens)
            if count > best[1]:
                best = (block_id, count)
        return best

    # ---------------------------------------------------------------- references

    def take(self, count: int) -> tuple[int, ...]:
        """Take `count` free blocks, with one reference each; at least `count` must be free."""
        assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} free"
        taken = tuple(self._empty.pop() if self._empty else self._evict() for _ in range(count))
        for block_id in taken:
            self._references[block_id] = 1
        self._note_peaks()
        return taken

    def share(self, block_ids: Iterable[int]) -> None:
        """Add a reference to blocks that are held or cached."""
        for block_id in block_ids:
            if self._references[block_id] == 0:
                assert block_id in self._cached, f"block {block_id} is shared, but is neither held nor cached"
                self._cached.discard(block_id)
                self._expiries.discard(block_id)
            self._references[block_id] += 1
        self._note_peaks()

    def release(self, block_ids: Iterable[int]) -> None:
        """Drop one reference from each block, the least useful first."""
        for block_id in block_ids:
            self._references[block_id] -= 1
            assert self._references[block_id] >= 0, f"block {block_id} released more often than taken"
            if self._references[block_id] > 0:
                continue
            content = self._contents.get(block_id)
            if content is None:
                self._empty.append(block_id)
                continue
            self._num_releases += 1
            content.age = self._num_releases
            self._cache(block_id, content)
        self._note_peaks()

    # ---------------------------------------------------------------- content

    def publish(
        self,
        block_id: int,
        digest: bytes,
        parent: bytes,
        retention: Retention | None = None,
        tokens: tuple[Hashable, ...] = (),
    ) -> bool:
        """Let other sequences find a held block by its content.

        If another block was published with this digest before, `find` still returns the other block, and
        `retention` applies to the other block.

        Args:
            block_id: A held block that is not published yet.
            digest: Key of the block's content and everything before it.
            parent: Key of everything before the block.
            retention: How long the block is worth keeping; None if the request sets none.
            tokens: The content, for sequences that share only its beginning.

        Returns:
            Whether `find` now returns this block.
        """
        assert self.is_held(block_id), f"block {block_id} is published, but no sequence holds it"
        first = self._block_of.get(digest)
        if first is not None:
            self.retain(first, retention)
            return False
        assert block_id not in self._contents, f"block {block_id} has other content already"
        self._contents[block_id] = _Content(digest, parent, tokens, retention or _DEFAULT_RETENTION)
        self._block_of[digest] = block_id
        self._children.setdefault(parent, {})[digest] = None
        self._requeue(parent)
        return True

    def retain(self, block_id: int, retention: Retention | None) -> None:
        """Change how long a published block is worth keeping; None changes nothing."""
        if retention is None:
            return
        content = self._contents[block_id]
        if self._events is not None:
            self._events.updated(content.digest, content.retention, retention)
        content.retention = retention
        if not self.is_held(block_id):
            self._cache(block_id, content)

    def expire(self, now_ns: int) -> None:
        """Set the time, from which durations of blocks released later are counted; expired retentions become the
        default.

        O(1) if no retention has expired.

        Args:
            now_ns: Monotonic time in nanoseconds.
        """
        self._now_ns = now_ns
        while (end := self._expiries.first_key()) is not None and end[0] <= now_ns:
            block_id = self._expiries.pop()
            content = self._contents[block_id]
            if self._events is not None:
                self._events.updated(content.digest, content.retention, _DEFAULT_RETENTION)
            content.retention = _DEFAULT_RETENTION
            self._cache(block_id, content)

    def _cache(self, block_id: int, content: _Content) -> None:
        """Add an unreferenced block to the order of eviction and, if its retention has a duration, to the order of
        expiry."""
        self._cached.put(block_id, self._eviction_key(content))
        duration_ms = content.retention.duration_ms
        if duration_ms is None:
            self._expiries.discard(block_id)
        else:
            self._expiries.put(block_id, (self._now_ns + duration_ms * _NS_PER_MS,))

    def _eviction_key(self, content: _Content) -> Key:
        if content.digest in self._children:
            return (1, 0, content.age)
        return (0, content.retention.priority, content.age)

    def _requeue(self, digest: bytes) -> None:
        """Update a block's place in the order of eviction after it became a leaf or ceased to be one."""
        block_id = self._block_of.get(digest)
        if block_id is not None and block_id in self._cached:
            self._cached.put(block_id, self._eviction_key(self._contents[block_id]))

    def unpublish(self, block_ids: Iterable[int]) -> list[bytes]:
        """Remove held blocks from the reuse index, and return their digests; blocks that are not published are not
        changed."""
        digests: list[bytes] = []
        for block_id in block_ids:
            assert self.is_held(block_id), f"block {block_id} is unpublished, but no sequence holds it"
            if block_id in self._contents:
                digests.append(self._contents[block_id].digest)
                self._forget(block_id)
        return digests

    def _evict(self) -> int:
        block_id = self._cached.pop()
        self._expiries.discard(block_id)
        self._forget(block_id)
        return block_id

    def _forget(self, block_id: int) -> None:
        content = self._contents.pop(block_id)
        if self._events is not None:
            self._events.removed(content.digest)
        if self._states is not None:
            self._states.drop(content.digest)
        del self._block_of[content.digest]
        del self._children[content.parent][content.digest]
        if not self._children[content.parent]:
            del self._children[content.parent]
            self._requeue(content.parent)


def _num_alike(one: Sequence[Hashable], other: Sequence[Hashable]) -> int:
    """Return the length of the common beginning of two sequences."""
    for count, (mine, yours) in enumerate(zip(one, other)):
        if mine != yours:
            return count
    return min(len(one), len(other))

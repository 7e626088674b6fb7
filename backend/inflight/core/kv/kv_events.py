"""KV cache events: changes to the content of KV blocks, for routers that send requests to a cached prefix.

The log keeps a bounded number of events until they are fetched. A pool or a manager without a log records none. A
block that leaves the cache but is saved goes from level 0 to level 1, TensorRT-LLM's secondary memory; if it is
loaded, it comes back to level 0. Used on the loop thread. Pure. Specification: the Executor's
`KVCacheEventManager`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass

from inflight.core.kv.block_keys import CacheRules
from inflight.core.kv.retention import Retention

_HASH_BYTES = 8


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A full block that other sequences can now find.

    Attributes:
        block_hash: The block's id outside of the engine.
        token_ids: The block's tokens.
        extra_ids: One for each token, 0 for text.
        lora_task_id: The adapter with which the block was computed; None: the base model.
        priority: The block's retention priority, 0 .. 100.
        lora_label: The adapter's name, folder or id; empty: the base model.
        namespace: The prompt's salt and tables in hexadecimal digits; empty without any.
    """

    block_hash: int
    token_ids: tuple[int, ...]
    extra_ids: tuple[int, ...]
    lora_task_id: int | None
    priority: int
    lora_label: str = ""
    namespace: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class KvEvent:
    """One event. Exactly one of num_blocks, stored, removed and updated is given; for a block that came back from
    level 1, stored and updated.

    Attributes:
        event_id: Number of the event, from 0.
        num_blocks: The cache was created, with this many blocks.
        stored: Blocks that were stored, each following the one before it.
        parent_hash: The block before the first of `stored`; None: the first of `stored` begins a prompt.
        removed: The content of the blocks with these hashes is gone.
        updated: The priority or the level of the block with this hash has changed.
        priorities: The old and the new priority; equal if the level has changed.
        levels: The old and the new level; equal if the priority has changed.
    """

    event_id: int
    num_blocks: int | None = None
    stored: tuple[StoredBlock, ...] = ()
    parent_hash: int | None = None
    removed: tuple[int, ...] = ()
    updated: int | None = None
    priorities: tuple[int, int] = (0, 0)
    levels: tuple[int, int] = (0, 0)


class KvEventLog:
    """The events that have not been fetched yet.

    Consecutive removals are joined into one event, and so are stored blocks that follow one another.

    Args:
        max_events: Maximum number of events kept; the oldest are dropped.
        saved: The digests of the blocks that can be loaded from a block store.
    """

    def __init__(self, max_events: int, saved: Container[bytes] = ()) -> None:
        self._saved = saved
        self._on_level_1: set[int] = set()  # hashes of blocks that left the cache, but are saved
        self._waiting: deque[KvEvent] = deque(maxlen=max_events)
        self._removed: list[int] = []
        self._stored: list[StoredBlock] = []
        self._parent_hash: int | None = None  # hash of the block before the first of `_stored`
        self._next_id = 0

    def take(self) -> list[KvEvent]:
        """Return the events since the last call, oldest first."""
        self._end_open()
        events = list(self._waiting)
        self._waiting.clear()
        return events

    def created(self, num_blocks: int) -> None:
        """Record the creation of the cache, the first event."""
        self._add(num_blocks=num_blocks)

    def stored(self, parent: bytes | None, block: StoredBlock) -> None:
        """Record a block that can now be found.

        `parent` is the digest of the block before it; None: `block` begins a prompt.
        """
        parent_hash = None if parent is None else block_hash(parent)
        if block.block_hash in self._on_level_1:
            self._on_level_1.discard(block.block_hash)
            self._end_open()
            self._add(stored=(block,), parent_hash=parent_hash, updated=block.block_hash, levels=(1, 0))
            return
        if not (self._stored and self._stored[-1].block_hash == parent_hash):
            self._end_open()
            self._parent_hash = parent_hash
        self._stored.append(block)

    def removed(self, digest: bytes) -> None:
        """Record that the content with this digest can no longer be found in the cache."""
        found = block_hash(digest)
        if digest in self._saved:
            self._on_level_1.add(found)
            self._end_open()
            self._add(updated=found, levels=(0, 1))
            return
        if not self._removed:
            self._end_open()
        self._removed.append(found)

    def dropped(self, digest: bytes) -> None:
        """Record that the block with this digest is no longer saved."""
        found = block_hash(digest)
        if found in self._on_level_1:
            self._on_level_1.discard(found)
            if not self._removed:
                self._end_open()
            self._removed.append(found)

    def updated(self, digest: bytes, old: Retention, new: Retention) -> None:
        """Record a change of a block's retention, unless the priority stays the same."""
        if old.priority != new.priority:
            self._end_open()
            self._add(updated=block_hash(digest), priorities=(old.priority, new.priority))

    def _add(
        self,
        num_blocks: int | None = None,
        stored: tuple[StoredBlock, ...] = (),
        parent_hash: int | None = None,
        removed: tuple[int, ...] = (),
        updated: int | None = None,
        priorities: tuple[int, int] = (0, 0),
        levels: tuple[int, int] = (0, 0),
    ) -> None:
        event = KvEvent(self._next_id, num_blocks, stored, parent_hash, removed, updated, priorities, levels)
        self._next_id += 1
        self._waiting.append(event)

    def _end_open(self) -> None:
        """Turn the pending stored blocks, or the pending removals, into an event."""
        stored, self._stored = tuple(self._stored), []
        removed, self._removed = tuple(self._removed), []
        if stored:
            self._add(stored=stored, parent_hash=self._parent_hash)
        if removed:
            self._add(removed=removed)


def block_hash(digest: bytes) -> int:
    """Return the 64-bit number by which a block with this digest is known outside of the engine."""
    return int.from_bytes(digest[:_HASH_BYTES], "big")


def stored_block(
    digest: bytes,
    token_ids: Sequence[int],
    start: int,
    end: int,
    rules: CacheRules,
    retention: Retention | None,
) -> StoredBlock:
    """Return the block of a sequence's tokens `start` .. `end - 1`, as the log records it."""
    return StoredBlock(
        block_hash(digest),
        tuple(token_ids[start:end]),
        rules.extra_ids_of(start, end),
        rules.lora_task_id,
        (retention or Retention()).priority,
        rules.lora_label,
        rules.namespace,
    )

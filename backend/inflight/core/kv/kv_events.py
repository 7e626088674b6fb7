"""KV cache events: changes to the content of KV blocks, for routers that send requests to a cached prefix.

The log owns the events that nobody has taken yet, at most so many. A pool or a manager without a log makes none.
Only the loop thread calls it. Pure. Specification: the Executor's `KVCacheEventManager`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from inflight.core.kv.retention import Retention

_HASH_BYTES = 8


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A full block whose content others can find now.

    Attributes:
        block_hash: What the block is known by.
        token_ids: Its tokens.
        extra_ids: One for each token, 0 for text.
        lora_task_id: The adapter that computed it; None: the bare model.
        priority: How much it is worth keeping, 0 .. 100.
    """

    block_hash: int
    token_ids: tuple[int, ...]
    extra_ids: tuple[int, ...]
    lora_task_id: int | None
    priority: int


@dataclass(frozen=True, slots=True)
class KvEvent:
    """One event; of the parts that say what happened exactly one is given.

    Attributes:
        event_id: Count of events, from 0.
        num_blocks: The cache was made, with so many blocks.
        stored: These blocks were stored, each behind the one before it.
        parent_hash: The block before the first of `stored`; None: a prompt begins with that.
        removed: The content of the blocks with these hashes is gone.
        updated: The block with this hash has another priority than before: `priorities`.
        priorities: The old and the new one.
    """

    event_id: int
    num_blocks: int | None = None
    stored: tuple[StoredBlock, ...] = ()
    parent_hash: int | None = None
    removed: tuple[int, ...] = ()
    updated: int | None = None
    priorities: tuple[int, int] = (0, 0)


class KvEventLog:
    """The events that have not been taken yet.

    Removals in a row become one event, and so do blocks that are stored one behind the other.

    Args:
        max_events: Most events that wait to be taken; the oldest are dropped.
    """

    def __init__(self, max_events: int) -> None:
        self._waiting: deque[KvEvent] = deque(maxlen=max_events)
        self._removed: list[int] = []
        self._stored: list[StoredBlock] = []
        self._parent_hash: int | None = None  # of the first of these
        self._next_id = 0

    def take(self) -> list[KvEvent]:
        """The events since the last call, oldest first."""
        self._end_open()
        events = list(self._waiting)
        self._waiting.clear()
        return events

    def created(self, num_blocks: int) -> None:
        """The cache was made: the first event."""
        self._add(num_blocks=num_blocks)

    def stored(self, parent: bytes | None, block: StoredBlock) -> None:
        """This block can be found; it follows the one with the digest `parent`, or a prompt begins with it."""
        parent_hash = None if parent is None else block_hash(parent)
        if not (self._stored and self._stored[-1].block_hash == parent_hash):
            self._end_open()
            self._parent_hash = parent_hash
        self._stored.append(block)

    def removed(self, digest: bytes) -> None:
        """The content with this digest can be found no more."""
        if not self._removed:
            self._end_open()
        self._removed.append(block_hash(digest))

    def updated(self, digest: bytes, old: Retention, new: Retention) -> None:
        """A block's retention has changed; one that has the same priority is no event."""
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
    ) -> None:
        event = KvEvent(self._next_id, num_blocks, stored, parent_hash, removed, updated, priorities)
        self._next_id += 1
        self._waiting.append(event)

    def _end_open(self) -> None:
        """Make an event of the blocks stored last, or of those removed last."""
        stored, self._stored = tuple(self._stored), []
        removed, self._removed = tuple(self._removed), []
        if stored:
            self._add(stored=stored, parent_hash=self._parent_hash)
        if removed:
            self._add(removed=removed)


def block_hash(digest: bytes) -> int:
    """The number, 0 .. 2**64 - 1, that a block with this digest is known by outside."""
    return int.from_bytes(digest[:_HASH_BYTES], "big")

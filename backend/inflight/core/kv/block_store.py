"""KV blocks outside of the device's cache, in host memory or files: which exist, and which are being loaded.

Every full block is saved when it is published, because it may be evicted at any time. A **load** copies saved
blocks, which continue a prefix in the cache, to free blocks of the cache. Until it ends, its blocks are promised
like those that a running sequence computes: sequences that need them wait, without a slot, and then find them in
the cache. A block that cannot be read is computed like any other.

The core only decides what is saved and loaded. `StoreCommands` are carried out by a `BlockStore`
(`core/ports.py`), whose results come back as a `StoreUpdate` in `IterationInput`, so that a replay makes the same
decisions. Pure.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from inflight.core.kv.kv_events import StoredBlock
from inflight.core.kv.retention import Retention


@dataclass(frozen=True, slots=True)
class BlockLoad:
    """Saved blocks to copy to the device.

    Attributes:
        load_id: A number unique to this load since the start.
        blocks: The digest of each saved block, in the order of its tokens, and the block id to copy it to.
    """

    load_id: int
    blocks: tuple[tuple[bytes, int], ...]


@dataclass(frozen=True, slots=True)
class StoreCommands:
    """Commands to a block store, to be carried out before the device's next forward pass.

    Attributes:
        saves: Digests and block ids of blocks to copy from the device. Their content does not change before.
        loads: Loads to begin. Nothing else reads or writes their blocks until they end.
        drops: Digests of saved blocks that must not be loaded again.
    """

    saves: tuple[tuple[bytes, int], ...] = ()
    loads: tuple[BlockLoad, ...] = ()
    drops: tuple[bytes, ...] = ()

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.saves or self.loads or self.drops)


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The end of a load.

    Attributes:
        load_id: The load.
        num_blocks: Number of blocks, from the first one on, that are on the device now. The content of the
            others is undefined.
    """

    load_id: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class StoreUpdate:
    """Changes of a block store since the last iteration.

    Attributes:
        saved: Digests of blocks that can be loaded from now on.
        dropped: Digests of blocks that cannot be loaded any more, or that could not be saved.
        loads: Loads that have ended.
    """

    saved: tuple[bytes, ...] = ()
    dropped: tuple[bytes, ...] = ()
    loads: tuple[LoadResult, ...] = ()

    def __bool__(self) -> bool:
        """Whether anything has changed."""
        return bool(self.saved or self.dropped or self.loads)


@dataclass(frozen=True, slots=True)
class LoadingBlock:
    """A block of a load, and what is needed to publish it.

    Attributes:
        block_id: The block of the device.
        parent: Key of everything before the block.
        tokens: The content, as `BlockPool.publish` takes it.
        retention: The retention that the waiting request asks for.
        event: The block as the KV cache event log records it.
        is_first: Whether the block begins a prompt.
    """

    block_id: int
    digest: bytes
    parent: bytes
    tokens: tuple[Hashable, ...]
    retention: Retention | None
    event: StoredBlock
    is_first: bool


@dataclass(slots=True)
class SavedBlocks:
    """The index of a block store, and the commands that it has not received yet.

    Attributes:
        is_loadable: Whether blocks may be loaded (`kv_cache_onboard_blocks`).
        min_priority: Blocks of lower retention priority are not saved.
        loads: The blocks of each load that has not ended, by load id.
        num_saved, num_loaded, num_unread: Numbers of blocks since the start that were saved, that were loaded, and
            that a load could not read.
    """

    is_loadable: bool = True
    min_priority: int = 0
    loads: dict[int, list[LoadingBlock]] = field(default_factory=dict[int, list[LoadingBlock]])
    num_saved: int = 0
    num_loaded: int = 0
    num_unread: int = 0
    _found: set[bytes] = field(default_factory=set[bytes])
    _asked: set[bytes] = field(default_factory=set[bytes])  # saved, or being saved
    _loading: set[bytes] = field(default_factory=set[bytes])
    _saves: dict[bytes, int] = field(default_factory=dict[bytes, int])
    _new_loads: list[BlockLoad] = field(default_factory=list[BlockLoad])
    _drops: list[bytes] = field(default_factory=list[bytes])
    _next_load_id: int = 0

    def __len__(self) -> int:
        """The number of blocks that can be loaded."""
        return len(self._found)

    def __contains__(self, digest: bytes) -> bool:
        """Whether the block with this digest can be loaded."""
        return self.is_loadable and digest in self._found

    def is_loading(self, digest: bytes) -> bool:
        """Return whether the block with this digest is being loaded."""
        return digest in self._loading

    def save(self, digest: bytes, block_id: int, retention: Retention) -> None:
        """Save a block that was just published, unless it is saved already or not worth it."""
        if digest not in self._asked and retention.priority >= self.min_priority:
            self._asked.add(digest)
            self._saves[digest] = block_id

    def load(self, blocks: list[LoadingBlock]) -> None:
        """Begin to load blocks."""
        load_id = self._next_load_id
        self._next_load_id += 1
        self.loads[load_id] = blocks
        self._loading.update(block.digest for block in blocks)
        self._new_loads.append(BlockLoad(load_id, tuple((block.digest, block.block_id) for block in blocks)))

    def end_load(self, result: LoadResult) -> list[LoadingBlock]:
        """Forget a load that has ended, and return its blocks."""
        blocks = self.loads.pop(result.load_id)
        self._loading.difference_update(block.digest for block in blocks)
        self.num_loaded += result.num_blocks
        self.num_unread += len(blocks) - result.num_blocks
        return blocks

    def drop(self, digest: bytes) -> None:
        """Never load the block with this digest again: its content may make the device fail."""
        if digest in self._asked:
            self._asked.discard(digest)
            self._found.discard(digest)
            self._saves.pop(digest, None)
            self._drops.append(digest)

    def update(self, update: StoreUpdate) -> None:
        """Apply the store's changes, except for loads that have ended."""
        self.num_saved += len(self._asked.intersection(update.saved))
        self._found.update(update.saved)
        self._asked.update(update.saved)
        self._found.difference_update(update.dropped)
        self._asked.difference_update(update.dropped)

    def take_commands(self) -> StoreCommands:
        """Return the commands since the last call."""
        if not (self._saves or self._new_loads or self._drops):
            return StoreCommands()
        commands = StoreCommands(tuple(self._saves.items()), tuple(self._new_loads), tuple(self._drops))
        self._saves.clear()
        self._new_loads.clear()
        self._drops.clear()
        return commands

"""KV blocks outside of the device's cache, in host memory or files: the index, and the loads in progress.

Every full block is saved when it is published, because it may be evicted at any time. If a model has
recurrent state, the snapshots at the end of a prompt and of an answer are saved too. A **load** copies saved
blocks, which continue a prefix in the cache, to free blocks of the cache, and a snapshot if one is needed.
Until it ends, its blocks are promised like those that a running sequence computes: sequences that need them
wait, without a slot, and then find them in the cache. A block that cannot be read is computed like any other.

The core only decides what is saved and loaded. `StoreCommands` are carried out by a `BlockStore`
(`core/ports.py`), whose results come back as a `StoreUpdate` in `IterationInput`, so that a replay makes the same
decisions. Pure.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

from inflight.core.kv.kv_events import StoredBlock
from inflight.core.kv.retention import Retention
from inflight.core.kv.store_stats import StoreStats


def state_key(digest: bytes) -> bytes:
    """Return the key of a snapshot of recurrent state at the end of the block with this digest, 16 bytes."""
    return blake2b(digest, digest_size=16, person=b"recurrent state").digest()


@dataclass(frozen=True, slots=True)
class SavedPiece:
    """A block, or a snapshot of recurrent state, in the store and on the device.

    Attributes:
        key: The name in the store: the block's digest, or `state_key` of it.
        index: Block id, or index of the snapshot.
        is_state: Whether it is a snapshot.
    """

    key: bytes
    index: int
    is_state: bool = False


@dataclass(frozen=True, slots=True)
class BlockLoad:
    """Saved pieces to copy to the device.

    Attributes:
        load_id: A number unique to this load since the start.
        pieces: Blocks in the order of their tokens, then a snapshot at their end if the device lacks it.
    """

    load_id: int
    pieces: tuple[SavedPiece, ...]


@dataclass(frozen=True, slots=True)
class StoreCommands:
    """Commands to a block store, to be carried out before the device's next forward pass.

    Attributes:
        saves: Pieces to copy from the device. Their content does not change before.
        loads: Loads to begin. Nothing else reads or writes their pieces until they end.
        drops: Keys of pieces that must not be loaded again.
        uses: Keys of saved pieces that sequences have found in the cache, the most useful last.
    """

    saves: tuple[SavedPiece, ...] = ()
    loads: tuple[BlockLoad, ...] = ()
    drops: tuple[bytes, ...] = ()
    uses: tuple[bytes, ...] = ()

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.saves or self.loads or self.drops or self.uses)


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The end of a load.

    Attributes:
        load_id: The load.
        num_pieces: Number of pieces, from the first one on, that are on the device now. The content of the
            others is undefined.
    """

    load_id: int
    num_pieces: int


@dataclass(frozen=True, slots=True)
class StoreUpdate:
    """Changes of a block store since the last iteration.

    Attributes:
        saved: Keys of pieces that can be loaded from now on.
        dropped: Keys of pieces that cannot be loaded any more, or that could not be saved.
        loads: Loads that have ended.
        stats: The statistics after these changes; None: they are as before.
    """

    saved: tuple[bytes, ...] = ()
    dropped: tuple[bytes, ...] = ()
    loads: tuple[LoadResult, ...] = ()
    stats: StoreStats | None = None

    def __bool__(self) -> bool:
        """Whether the store has saved, dropped or loaded anything since the last iteration."""
        return bool(self.saved or self.dropped or self.loads)


@dataclass(frozen=True, slots=True)
class LoadingBlock:
    """A block of a load, and the arguments to publish it.

    Attributes:
        block_id: The block of the device.
        digest: Key of the block's content and everything before it.
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


@dataclass(frozen=True, slots=True)
class Loading:
    """A load that has not ended.

    Attributes:
        blocks: Its blocks, in the order of their tokens.
        boundary: Digest of the block at whose end the snapshot is; b"": no snapshot is loaded.
        snapshot: Index of the snapshot.
    """

    blocks: tuple[LoadingBlock, ...]
    boundary: bytes = b""
    snapshot: int = -1

    @property
    def pieces(self) -> tuple[SavedPiece, ...]:
        """The pieces in the order in which they are loaded."""
        state = (SavedPiece(state_key(self.boundary), self.snapshot, is_state=True),) if self.boundary else ()
        return (*(SavedPiece(block.digest, block.block_id) for block in self.blocks), *state)


@dataclass(slots=True)
class SavedBlocks:
    """The index of a block store, and the commands that it has not received yet.

    Attributes:
        is_loadable: Whether pieces may be loaded (`kv_cache_onboard_blocks`).
        min_priority: Blocks of lower retention priority are not saved.
        loads: The loads that have not ended, by load id.
        num_saved, num_loaded, num_unread: Numbers of pieces since the start that were saved, that were loaded, and
            that a load could not read.
        stats: The store's statistics.
    """

    is_loadable: bool = True
    min_priority: int = 0
    loads: dict[int, Loading] = field(default_factory=dict[int, Loading])
    num_saved: int = 0
    num_loaded: int = 0
    num_unread: int = 0
    stats: StoreStats = field(default_factory=StoreStats)
    _found: set[bytes] = field(default_factory=set[bytes])
    _asked: set[bytes] = field(default_factory=set[bytes])  # saved, or being saved
    _loading: set[bytes] = field(default_factory=set[bytes])
    _saves: dict[bytes, SavedPiece] = field(default_factory=dict[bytes, SavedPiece])
    _new_loads: list[BlockLoad] = field(default_factory=list[BlockLoad])
    _drops: list[bytes] = field(default_factory=list[bytes])
    _uses: dict[bytes, None] = field(default_factory=dict[bytes, None])
    _next_load_id: int = 0

    def __len__(self) -> int:
        """The number of pieces that can be loaded."""
        return len(self._found)

    def __contains__(self, key: bytes) -> bool:
        """Whether the piece with this key can be loaded."""
        return self.is_loadable and key in self._found

    def is_loading(self, key: bytes) -> bool:
        """Return whether the piece with this key is being loaded."""
        return key in self._loading

    def save(self, piece: SavedPiece, retention: Retention) -> None:
        """Save a block that was just published, or a snapshot that can be found, unless it is saved already or not
        worth it."""
        if piece.key not in self._asked and retention.priority >= self.min_priority:
            self._asked.add(piece.key)
            self._saves[piece.key] = piece
        else:
            self.use((piece.key,))

    def use(self, keys: Iterable[bytes]) -> None:
        """Tell the store which of these pieces, in the order of a sequence, are used without being loaded."""
        for key in reversed(tuple(keys)):  # later blocks are useless without earlier ones
            if key in self._found:
                self._uses.pop(key, None)
                self._uses[key] = None

    def load(self, loading: Loading) -> None:
        """Record a load, and add it to the commands for the store."""
        load_id = self._next_load_id
        self._next_load_id += 1
        self.loads[load_id] = loading
        self._loading.update(piece.key for piece in loading.pieces)
        self._new_loads.append(BlockLoad(load_id, loading.pieces))

    def end_load(self, result: LoadResult) -> Loading:
        """Forget a load that has ended, and return it."""
        loading = self.loads.pop(result.load_id)
        self._loading.difference_update(piece.key for piece in loading.pieces)
        self.num_loaded += result.num_pieces
        self.num_unread += len(loading.pieces) - result.num_pieces
        return loading

    def drop(self, digest: bytes) -> None:
        """Never load the block with this digest, or a snapshot at its end, again: its content may make the device
        fail."""
        for key in (digest, state_key(digest)):
            if key in self._asked:
                self._asked.discard(key)
                self._found.discard(key)
                self._saves.pop(key, None)
                self._uses.pop(key, None)
                self._drops.append(key)

    def update(self, update: StoreUpdate) -> None:
        """Apply the store's changes, except for loads that have ended."""
        self.num_saved += len(self._asked.intersection(update.saved))
        self._found.update(update.saved)
        self._asked.update(update.saved)
        self._found.difference_update(update.dropped)
        self._asked.difference_update(update.dropped)
        self.stats = update.stats or self.stats.at_rest()

    def take_commands(self) -> StoreCommands:
        """Return the commands since the last call."""
        if not (self._saves or self._new_loads or self._drops or self._uses):
            return StoreCommands()
        commands = StoreCommands(
            tuple(self._saves.values()), tuple(self._new_loads), tuple(self._drops), tuple(self._uses)
        )
        self._saves.clear()
        self._new_loads.clear()
        self._drops.clear()
        self._uses.clear()
        return commands

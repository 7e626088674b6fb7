"""Loads of saved blocks and snapshots into the cache: the memory that they take, and what they leave in it.

A load takes free blocks. Until it ends, they are promised: sequences that need them wait. Then the blocks that
were loaded are published and cached, and the others are empty. Admission decides which sequences load blocks.
Pure. Used on the loop thread.
"""

from __future__ import annotations

from collections.abc import Sequence

from inflight.core.kv.block_keys import CacheRules
from inflight.core.kv.block_pool import BlockPool
from inflight.core.kv.block_store import Loading, LoadingBlock, LoadResult, SavedBlocks, StoreUpdate
from inflight.core.kv.kv_events import KvEventLog, stored_block
from inflight.core.kv.promises import Promises
from inflight.core.kv.state_snapshots import StateSnapshots


class BlockLoader:
    """Begins and ends the loads of one cache.

    Args:
        saved: The index of the block store.
        pool: The cache's blocks.
        promises: The promised blocks.
        tokens_per_block: Tokens per block.
        events: The log of KV events; None: no log.
        states: Snapshots of recurrent state; None for a model without.
    """

    def __init__(
        self,
        saved: SavedBlocks,
        pool: BlockPool,
        promises: Promises,
        tokens_per_block: int,
        events: KvEventLog | None,
        states: StateSnapshots | None,
    ) -> None:
        self._saved = saved
        self._pool = pool
        self._promises = promises
        self._tokens_per_block = tokens_per_block
        self._events = events
        self._states = states
        # Blocks and snapshots that the next batch copies from, and that no load may overwrite before.
        self._source_blocks: set[int] = set()
        self._source_snapshots: set[int] = set()

    def begin_batch(self) -> None:
        """Note that the sequences admitted from now on start in another batch."""
        self._source_blocks.clear()
        self._source_snapshots.clear()

    def spare_block(self, block_id: int) -> None:
        """Overwrite no block that the next batch copies."""
        self._source_blocks.add(block_id)

    def spare_snapshot(self, snapshot: int) -> None:
        """Overwrite no snapshot from which a sequence of the next batch starts."""
        self._source_snapshots.add(snapshot)

    def start(
        self,
        first: int,
        count: int,
        state_at: int,
        digests: Sequence[bytes],
        token_ids: Sequence[int],
        rules: CacheRules,
    ) -> bool:
        """Begin to load blocks `first` .. `first + count - 1` of a sequence, and a snapshot.

        Nothing is loaded if too few blocks, or no snapshot, may be overwritten before the next batch.

        Args:
            first: Number of blocks before them, which are in the cache.
            count: Number of blocks to load; at least this many must be free.
            state_at: Number of blocks before the boundary whose snapshot is loaded; 0: none is.
            digests: Digests of the sequence's blocks.
            token_ids, rules: The sequence's tokens, and how it shares its blocks.

        Returns:
            Whether to try again with the next batch, because blocks were lacking.
        """
        taken = self._take(count, digests[:first])
        if taken is None:
            return True
        boundary, snapshot = b"", -1
        if self._states is not None and state_at:
            boundary = digests[state_at - 1]
            found = self._states.begin_load(boundary, self._source_snapshots)
            if found is None:
                self._pool.release(taken)
                return False
            snapshot = found
        blocks = tuple(
            self._block(block_id, index, digests, token_ids, rules)
            for index, block_id in enumerate(taken, first)
        )
        self._promises.update(block.digest for block in blocks)
        self._saved.load(Loading(blocks, boundary, snapshot))
        return False

    def _take(self, count: int, prefix: Sequence[bytes]) -> tuple[int, ...] | None:
        """Take free blocks that the next batch does not copy from; None: there are too few.

        `prefix` are the digests of the cached blocks that the load continues: these become the most recently used.
        """
        kept = [block_id for each in prefix if (block_id := self._pool.find(each)) is not None]
        kept += self._source_blocks
        self._pool.share(kept)
        taken = self._pool.take(count) if count <= self._pool.num_free else None
        self._pool.release(reversed(kept))
        return taken

    def _block(
        self,
        block_id: int,
        index: int,
        digests: Sequence[bytes],
        token_ids: Sequence[int],
        rules: CacheRules,
    ) -> LoadingBlock:
        assert rules.scope is not None, "a sequence that shares nothing loads nothing"
        start, end = index * self._tokens_per_block, (index + 1) * self._tokens_per_block
        retention = rules.retention_of(start)
        return LoadingBlock(
            block_id,
            digests[index],
            parent=digests[index - 1] if index else rules.scope,
            tokens=rules.content(token_ids, start, end),
            retention=retention,
            event=stored_block(digests[index], token_ids, start, end, rules, retention),
            is_first=not index,
        )

    def update(self, update: StoreUpdate) -> None:
        """Apply changes of the block store: publish the blocks of loads that have ended, and free the others."""
        self._saved.update(update)
        if self._events is not None:
            for key in update.dropped:
                self._events.dropped(key)
        for result in update.loads:
            self._end(result)

    def _end(self, result: LoadResult) -> None:
        loading = self._saved.end_load(result)
        for block in loading.blocks:
            self._promises.end(block.digest)
        for block in loading.blocks[: result.num_pieces]:
            is_new = self._pool.publish(
                block.block_id, block.digest, block.parent, block.retention, block.tokens
            )
            if self._events is not None and is_new:
                self._events.stored(None if block.is_first else block.parent, block.event)
        if self._states is not None and loading.boundary:
            # A snapshot without its block could not be found, and would not be evicted with it.
            is_loaded = result.num_pieces > len(loading.blocks)
            is_wanted = self._pool.find(loading.boundary) is not None
            self._states.end_load(loading.boundary, is_loaded and is_wanted)
        self._pool.release(block.block_id for block in reversed(loading.blocks))

    def drop(self, digests: Sequence[bytes]) -> None:
        """Never load these blocks again: their content may make the device fail."""
        for digest in digests:
            self._saved.drop(digest)
            if self._events is not None:
                self._events.dropped(digest)

    def clear_cache(self) -> None:
        """Forget the content of all blocks and all promises of sequences. Loads go on."""
        blocks = [block for loading in self._saved.loads.values() for block in loading.blocks]
        self._pool.clear({block.block_id for block in blocks})
        self._promises.clear()
        self._promises.update(block.digest for block in blocks)

"""Saved KV blocks with several ranks: each rank saves and loads its own part of a block.

Every scheduler gives the same commands, and the store of each rank carries them out in its own time. Rank 0 alone
tells the schedulers, in the inputs of an iteration, what has changed: its own store says which blocks there are,
and a load has ended when it has ended on all ranks, with as many blocks as every one of them could read. So a
block that one rank lacks, because of a torn file or a full disk, is a miss on all of them. The other ranks send
the results of their loads over the connections of the heartbeats.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from inflight.core.kv.block_store import BlockLoad, LoadResult, StoreCommands, StoreUpdate
from inflight.core.ports import BlockStore

_COUNT_BITS = 24
"""Bits of the number of pieces in a message about a load; the other 40 are the load's number."""


class LeadersBlockStore:
    """Rank 0's store of KV blocks; implements `inflight.core.ports.BlockStore` for all ranks.

    Args:
        store: The store of rank 0's own part, which this object closes.
        num_ranks: Number of ranks.
        notify: Function that wakes the loop; called on any thread, when another rank's load has ended.
    """

    def __init__(self, store: BlockStore, num_ranks: int, notify: Callable[[], None]) -> None:
        self._store = store
        self._num_ranks = num_ranks
        self._notify = notify
        self._loads: dict[int, BlockLoad] = {}
        self._counts: dict[int, list[int]] = {}  # of the ranks whose load has ended, by load id
        self._lock = threading.Lock()
        self._heard: list[LoadResult] = []

    def hear(self, message: int) -> None:
        """Take a message of `FollowersBlockStore`. Any thread."""
        load_id, count = divmod(message, 1 << _COUNT_BITS)
        with self._lock:
            self._heard.append(LoadResult(load_id, count))
        self._notify()

    def carry_out(self, commands: StoreCommands) -> None:
        self._loads.update((load.load_id, load) for load in commands.loads)
        self._store.carry_out(commands)

    def update(self) -> StoreUpdate:
        own = self._store.update()
        with self._lock:
            heard, self._heard = self._heard, []
        if not (own.loads or heard):
            return own
        dropped, ended = list(own.dropped), list[LoadResult]()
        for result in (*own.loads, *heard):
            counts = self._counts.setdefault(result.load_id, [])
            counts.append(result.num_pieces)
            if len(counts) == self._num_ranks:
                ended.append(LoadResult(result.load_id, min(counts)))
                del self._counts[result.load_id]
                # Perhaps a rank lacks the others too. They are saved again when they have been computed.
                unread = self._loads.pop(result.load_id).pieces[min(counts) :]
                dropped += [piece.key for piece in unread]
        return replace(own, dropped=tuple(dropped), loads=tuple(ended))

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Do nothing: blocks are always loaded, as the ranks would measure different times."""

    def close(self) -> None:
        """Close the store of rank 0's part of the blocks."""
        self._store.close()


class FollowersBlockStore:
    """The store of any rank except rank 0; it sends the results of loads to rank 0.

    Args:
        make_store: Returns the store of this rank's part, which this object closes. Its argument is a function
            that the store calls, on any thread, when a load has ended.
        send: Sends a message to rank 0, for `LeadersBlockStore.hear`; called on any thread.
    """

    def __init__(
        self, make_store: Callable[[Callable[[], None]], BlockStore], send: Callable[[int], None]
    ) -> None:
        self._send = send
        self._store = make_store(self._tell)

    def carry_out(self, commands: StoreCommands) -> None:
        self._store.carry_out(commands)
        self._tell()  # what was saved would be kept for ever otherwise

    def update(self) -> StoreUpdate:
        """Return nothing, as rank 0 tells this rank about changes."""
        return StoreUpdate()

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Do nothing: blocks are always loaded."""

    def close(self) -> None:
        """Close the store of this rank's part of the blocks."""
        self._store.close()

    def _tell(self) -> None:
        """Send the results of loads that have ended. Any thread."""
        for result in self._store.update().loads:
            self._send(result.load_id << _COUNT_BITS | result.num_pieces)

"""The snapshots of recurrent states: the index by prefix, the snapshots to save, and the order of eviction.

A model with recurrent layers has, besides KV blocks, one state of fixed size for each sequence, which depends on
all tokens of the sequence so far and cannot be restored from blocks. A **snapshot** is a copy of the state
after the last token of a block (a **boundary**), and is found by the block's digest. A prefix is reused up to
the last boundary that has both cached blocks before it and a snapshot.

A sequence saves snapshots

1. at the last boundary before its last known token, for other sequences with the same prompt;
2. at the end of the cached blocks that it found, if there is no snapshot: other sequences share this prefix;
3. at every boundary in generation, replacing the sequence's previous one, for the next turn of a conversation.

A snapshot is **pending** from the batch that saves it until the update with that batch's output. Then it can be
found until it is evicted: with its block, or as the least recently used snapshot. A sequence's first snapshot in
generation makes two others the next to be evicted, unless other sequences have used them: the one at the end of
its prompt, and the one at the end of the turn that it continues. So a conversation keeps one. The batch that
starts a sequence from a snapshot reads the snapshot; a later batch may overwrite it. Pure. Used on the loop
thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from inflight.core.kv.promises import Promises


@dataclass(slots=True)
class _Saves:
    """The snapshots that one running sequence saves.

    Attributes:
        planned: By number of tokens, the digests of the boundaries in the context where a snapshot will be saved.
        pending: By number of tokens, the snapshots that batches in flight save.
        generated: Digest of the last snapshot saved in generation; None: there is none.
        prompt_end: Number of tokens up to the last planned boundary; 0: none is planned.
    """

    planned: dict[int, bytes] = field(default_factory=dict[int, bytes])
    pending: dict[int, int] = field(default_factory=dict[int, int])
    generated: bytes | None = None
    prompt_end: int = 0


class StateSnapshots:
    """The snapshots of an engine, 0 .. num_snapshots - 1, found by the digests of boundaries.

    Attributes:
        num_snapshots: Number of snapshots that there is memory for.
        num_saved: Number of snapshots that became findable since the start.
    """

    def __init__(self, num_snapshots: int) -> None:
        self.num_snapshots = num_snapshots
        self.num_saved = 0
        self._free = list(reversed(range(num_snapshots)))
        self._snapshot_of: OrderedDict[bytes, int] = OrderedDict()  # the next to be evicted first
        # By digest, the sequence of each snapshot that was saved in generation and that no other sequence has
        # used.
        self._rolling: dict[bytes, int] = {}
        # By a snapshot's digest, the sequence after whose first snapshot in generation this one is evicted
        # next.
        self._superseded_by: dict[bytes, int] = {}
        self._saves: dict[int, _Saves] = {}  # by sequence key
        self._loading: dict[bytes, int] = {}  # snapshots that loads write to, by boundary
        # Boundaries that running sequences have planned, and those of loads.
        self._promised = Promises()

    @property
    def num_found(self) -> int:
        """Number of snapshots that can be found."""
        return len(self._snapshot_of)

    @property
    def num_pending(self) -> int:
        """Number of snapshots saved by batches in flight."""
        return sum(len(saves.pending) for saves in self._saves.values())

    def find(self, digests: Sequence[bytes]) -> int:
        """Return how many of the blocks with these digests come before the last boundary with a snapshot.

        Returns 0 if no boundary has a snapshot.
        """
        for count in range(len(digests), 0, -1):
            if digests[count - 1] in self._snapshot_of:
                return count
        return 0

    def use(self, digest: bytes, key: int) -> int:
        """Return the snapshot at a boundary, which must exist, for sequence `key`, and make it the most recently
        used."""
        self._snapshot_of.move_to_end(digest)
        self._superseded_by.pop(digest, None)
        if self._rolling.pop(digest, None) is not None:
            self._superseded_by[digest] = key
        return self._snapshot_of[digest]

    def is_promised(self, digests: Iterable[bytes]) -> bool:
        """Return whether a running sequence will save a snapshot at one of these boundaries."""
        return any(digest in self._promised for digest in digests)

    # ---------------------------------------------------------------- saving

    def start(self, key: int, planned: dict[int, bytes]) -> None:
        """Register a sequence that starts.

        Args:
            key: The sequence, which must not run yet.
            planned: By number of tokens, the digests of the boundaries where the sequence will save snapshots.
        """
        assert key not in self._saves, f"sequence {key} runs already"
        planned = planned if self.num_snapshots else {}
        self._saves[key] = _Saves(planned, prompt_end=max(planned, default=0))
        self._promised.update(self._saves[key].planned.values())

    def save(self, key: int, start: int, end: int) -> list[tuple[int, int]]:
        """Return the snapshots to save in the chunk of tokens `start` .. `end` - 1, as pairs of the number of
        tokens and the snapshot."""
        saves = self._saves[key]
        saved: list[tuple[int, int]] = []
        for num_tokens in sorted(saves.planned):
            if not start < num_tokens <= end:
                continue
            snapshot = self._take()
            if snapshot is None:
                self._promised.end(saves.planned.pop(num_tokens))
                continue
            saves.pending[num_tokens] = snapshot
            saved.append((num_tokens, snapshot))
        return saved

    def save_generated(self, key: int, num_tokens: int) -> int | None:
        """Return the snapshot to save in generation at the boundary after `num_tokens` tokens.

        None: all snapshots are pending, so the state is not saved.
        """
        saves = self._saves[key]
        if saves.generated is not None and self._rolling.get(saves.generated) == key:
            self.drop(saves.generated)
        snapshot = self._take()
        if snapshot is not None:
            saves.pending[num_tokens] = snapshot
        return snapshot

    def _take(self, kept: Collection[int] = ()) -> int | None:
        """Take a free snapshot, or the least recently used one that is not in `kept`; None: there is none."""
        if not self._free:
            oldest = next((digest for digest, each in self._snapshot_of.items() if each not in kept), None)
            if oldest is not None:
                self.drop(oldest)
        return self._free.pop() if self._free else None

    def computed(self, key: int, num_tokens: int, digest: bytes) -> int | None:
        """Make the pending snapshot after `num_tokens` tokens, if there is one, findable, as its batch is back.

        Returns the snapshot if it is a new one in the context, so that it should be saved in a block store.
        """
        saves = self._saves[key]
        is_planned = saves.planned.pop(num_tokens, None) is not None
        if is_planned:
            self._promised.end(digest)
        snapshot = saves.pending.pop(num_tokens, None)
        if snapshot is None:
            return None
        if digest in self._snapshot_of:
            self._free.append(snapshot)
            if is_planned:
                self.use(digest, key)
            return None
        self._snapshot_of[digest] = snapshot
        self.num_saved += 1
        if is_planned:
            if num_tokens == saves.prompt_end:
                self._superseded_by[digest] = key
            return snapshot
        if saves.generated is None:
            for superseded in self._take_superseded(key):
                self._snapshot_of.move_to_end(superseded, last=False)
        self._rolling[digest] = key
        saves.generated = digest
        return None

    def last_generated(self, key: int) -> tuple[bytes, int] | None:
        """Return digest and index of the last snapshot that a running sequence saved in generation, if it can be
        found."""
        saves = self._saves.get(key)
        digest = None if saves is None else saves.generated
        return (
            None if digest is None or digest not in self._snapshot_of else (digest, self._snapshot_of[digest])
        )

    def __contains__(self, digest: bytes) -> bool:
        """Whether there is a snapshot at this boundary."""
        return digest in self._snapshot_of

    # ---------------------------------------------------------------- loads from a block store

    def begin_load(self, digest: bytes, kept: Collection[int] = ()) -> int | None:
        """Take a snapshot other than `kept` for the state at a boundary, and promise it; None: there is none."""
        snapshot = self._take(kept)
        if snapshot is not None:
            self._loading[digest] = snapshot
            self._promised[digest] += 1
        return snapshot

    def end_load(self, digest: bytes, is_loaded: bool) -> None:
        """Make a loaded snapshot findable; free it if it was not loaded, or if there is another one meanwhile."""
        snapshot = self._loading.pop(digest)
        self._promised.end(digest)
        if is_loaded and digest not in self._snapshot_of:
            self._snapshot_of[digest] = snapshot
        else:
            self._free.append(snapshot)

    def _take_superseded(self, key: int) -> list[bytes]:
        """Forget the snapshots that a sequence's first one in generation supersedes; return their digests."""
        digests = [digest for digest, by in self._superseded_by.items() if by == key]
        for digest in digests:
            del self._superseded_by[digest]
        return digests

    # ---------------------------------------------------------------- ends

    def drop(self, digest: bytes) -> None:
        """Free the snapshot at a boundary, if there is one."""
        snapshot = self._snapshot_of.pop(digest, None)
        if snapshot is not None:
            self._free.append(snapshot)
            self._rolling.pop(digest, None)
            self._superseded_by.pop(digest, None)

    def release(self, key: int) -> None:
        """Remove a sequence with no batch in flight: free its pending snapshots and withdraw its promises."""
        saves = self._saves.pop(key, None)
        if saves is None:
            return
        self._free += saves.pending.values()
        for digest in saves.planned.values():
            self._promised.end(digest)
        self._take_superseded(key)

    def clear(self) -> None:
        """Remove all snapshots and sequences, but not the loads."""
        held = set(self._loading.values())
        self._free = [each for each in reversed(range(self.num_snapshots)) if each not in held]
        self._snapshot_of.clear()
        self._rolling.clear()
        self._superseded_by.clear()
        self._saves.clear()
        self._promised = Promises(self._loading.keys())

"""The snapshots of recurrent state: of which prefix each is, and which one gives way to a new one.

A model with recurrent layers remembers, beside its blocks, one state of fixed size for each sequence: the effect
of all its tokens so far. Blocks alone do not bring it back. A **snapshot** is a copy of that state after the last
token of a block, found by the block's digest: a prefix is reused up to the last boundary that has its blocks and
a snapshot.

A sequence saves snapshots

1. at the last boundary before its last known token, for its siblings or a request with the same prompt;
2. where the blocks that it found in the cache end, if no snapshot was there: others share the prefix that far;
3. at each boundary that it generates past, in place of the one before, for the next turn of a conversation.

A snapshot is **pending** from the batch that saves it until that batch has come back. Then it can be found, until
it is evicted: the least recently used first, and with its block. A sequence that begins with a snapshot takes its
content in the batch that it starts in; a later batch may overwrite it. Pure; only the loop thread calls it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Saves:
    """One running sequence's snapshots.

    Attributes:
        planned: By number of tokens, the digests at boundaries where a snapshot is to be saved.
        pending: By number of tokens, snapshots in batches that have not come back.
        generated: The digest of the snapshot that was saved last in generation.
    """

    planned: dict[int, bytes] = field(default_factory=dict[int, bytes])
    pending: dict[int, int] = field(default_factory=dict[int, int])
    generated: bytes | None = None


class StateSnapshots:
    """The snapshots of an engine, 0 .. num_snapshots - 1.

    Attributes:
        num_snapshots: How many there is memory for.
        num_saved: Snapshots that could be found some time, since the start.
    """

    def __init__(self, num_snapshots: int) -> None:
        self.num_snapshots = num_snapshots
        self.num_saved = 0
        self._free = list(reversed(range(num_snapshots)))
        self._snapshot_of: dict[bytes, int] = {}  # in the order of their last use
        self._rolling: dict[
            bytes, int
        ] = {}  # those of generation that nobody else has used: by which sequence
        self._saves: dict[int, _Saves] = {}  # by sequence key
        self._promised: Counter[bytes] = Counter()

    @property
    def num_found(self) -> int:
        """Snapshots that can be found now."""
        return len(self._snapshot_of)

    @property
    def num_pending(self) -> int:
        """Snapshots in batches that have not come back."""
        return sum(len(saves.pending) for saves in self._saves.values())

    def find(self, digests: Sequence[bytes]) -> int:
        """The number of blocks, whose chained `digests` these are, up to the last snapshot among them."""
        for count in range(len(digests), 0, -1):
            if digests[count - 1] in self._snapshot_of:
                return count
        return 0

    def use(self, digest: bytes) -> int:
        """The snapshot at a boundary that has one, which becomes the most recently used."""
        snapshot = self._snapshot_of.pop(digest)
        self._snapshot_of[digest] = snapshot
        self._rolling.pop(digest, None)
        return snapshot

    def is_promised(self, digests: Iterable[bytes]) -> bool:
        """Whether some running sequence is going to save a snapshot at one of these boundaries."""
        return any(digest in self._promised for digest in digests)

    # ---------------------------------------------------------------- saving

    def start(self, key: int, planned: dict[int, bytes]) -> None:
        """A sequence starts, and is to save snapshots after these numbers of tokens, whose digests are known."""
        assert key not in self._saves, f"sequence {key} runs already"
        self._saves[key] = _Saves(planned if self.num_snapshots else {})
        self._promised.update(self._saves[key].planned.values())

    def save(self, key: int, start: int, end: int) -> list[tuple[int, int]]:
        """The snapshots to save in a chunk of the tokens `start` .. `end` - 1, as (number of tokens, snapshot)."""
        saves = self._saves[key]
        saved: list[tuple[int, int]] = []
        for num_tokens in sorted(saves.planned):
            if not start < num_tokens <= end:
                continue
            snapshot = self._take()
            if snapshot is None:
                self._end_promise(saves.planned.pop(num_tokens))
                continue
            saves.pending[num_tokens] = snapshot
            saved.append((num_tokens, snapshot))
        return saved

    def save_generated(self, key: int, num_tokens: int) -> int | None:
        """The snapshot to save after `num_tokens` tokens, a boundary, in generation; None: there is no room."""
        saves = self._saves[key]
        if saves.generated is not None and self._rolling.get(saves.generated) == key:
            self.drop(saves.generated)
        snapshot = self._take()
        if snapshot is not None:
            saves.pending[num_tokens] = snapshot
        return snapshot

    def _take(self) -> int | None:
        if not self._free and self._snapshot_of:
            self.drop(next(iter(self._snapshot_of)))
        return self._free.pop() if self._free else None

    def computed(self, key: int, num_tokens: int, digest: bytes) -> None:
        """The batch is back in which a sequence passed the boundary after `num_tokens` tokens."""
        saves = self._saves[key]
        is_planned = saves.planned.pop(num_tokens, None) is not None
        if is_planned:
            self._end_promise(digest)
        snapshot = saves.pending.pop(num_tokens, None)
        if snapshot is None:
            return
        if digest in self._snapshot_of:
            self._free.append(snapshot)
            if is_planned:
                self.use(digest)
            return
        self._snapshot_of[digest] = snapshot
        self.num_saved += 1
        if not is_planned:
            self._rolling[digest] = key
            saves.generated = digest

    # ---------------------------------------------------------------- ends

    def drop(self, digest: bytes) -> None:
        """Let nobody find the snapshot at this boundary, if there is one."""
        snapshot = self._snapshot_of.pop(digest, None)
        if snapshot is not None:
            self._free.append(snapshot)
            self._rolling.pop(digest, None)

    def release(self, key: int) -> None:
        """A sequence has left, and nothing of it is in flight: what it has not saved is not to be found."""
        saves = self._saves.pop(key, None)
        if saves is None:
            return
        self._free += saves.pending.values()
        for digest in saves.planned.values():
            self._end_promise(digest)

    def clear(self) -> None:
        """Forget all snapshots and sequences."""
        self._free = list(reversed(range(self.num_snapshots)))
        self._snapshot_of.clear()
        self._rolling.clear()
        self._saves.clear()
        self._promised.clear()

    def _end_promise(self, digest: bytes) -> None:
        self._promised[digest] -= 1
        if not self._promised[digest]:
            del self._promised[digest]

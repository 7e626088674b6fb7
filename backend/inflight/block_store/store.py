"""A block store with two tiers: host memory, and files.

The loop thread copies blocks to save from the device, into a queue of bounded size. A thread writes them to the
tiers, and another one loads blocks, so that neither a slow disk nor a full one delays an iteration. A load ends at
the first block that cannot be read.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from inflight.block_store.files import CHECK_BYTES, BlockFiles
from inflight.block_store.tier_counts import TierCounts, Traffic
from inflight.core.kv.block_store import BlockLoad, LoadResult, SavedPiece, StoreCommands, StoreUpdate
from inflight.core.kv.store_stats import HOST, StoreStats

_MAX_QUEUED_BYTES = 256 << 20
"""Maximum size of the blocks that wait to be written; further ones are not saved."""
_MIN_CONTEXT_TOKENS = 32
_MIN_BLOCKS = 16
_KEPT = 0.8  # weight of earlier measurements in an average after a new one
_RETRY = 0.95  # factor by which a load that was not made shortens the estimate of reading
_CLOSE_S = 5.0
_MIN_WAIT_S = 1.0  # between two removals of files that are too old
_MAX_WAIT_S = 24 * 3600.0  # threads cannot wait for any number of seconds
_log = logging.getLogger(__name__)


class BlockMemory(Protocol):
    """The blocks of a device's KV cache, and the snapshots of recurrent state, as bytes."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block over all layers."""
        ...

    @property
    def state_bytes(self) -> int:
        """Bytes of a snapshot over all layers; 0 for a model without recurrent state."""
        ...

    @property
    def is_on_host(self) -> bool:
        """Whether the device's cache is in host memory."""
        ...

    def read(self, index: int, is_state: bool) -> NDArray[np.uint8]:
        """Return a copy of a block [block_bytes], or of a snapshot [state_bytes]. Loop thread."""
        ...

    def write(self, index: int, is_state: bool, content: NDArray[np.uint8]) -> None:
        """Overwrite a block or a snapshot with `content`, while the loop thread uses others."""
        ...


class LoadingPays:
    """Whether loading a block is faster than computing it, by moving averages of both.

    Until enough is measured, blocks are loaded: the first loads take longer, because they touch the cache's memory
    for the first time. A load that is not made shortens the estimate a little, so that loading is tried again now
    and then.

    After a restart, the only iterations may be those that compute the few tokens after a loaded prefix. They take
    more time per token than iterations with many tokens. So until one with many is measured, they are an upper
    bound for the time of computing: if loading takes longer than this, it is slower.
    """

    def __init__(self, tokens_per_block: int) -> None:
        self._tokens_per_block = tokens_per_block
        self._computing = _Average()  # of a token, in iterations with many tokens of context
        self._computing_few = _Average()  # of a token, in iterations with few
        self._loading = _Average()  # of a block

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Take account of an iteration that computed `num_tokens` tokens of context in this time."""
        if num_tokens:
            average = self._computing if num_tokens >= _MIN_CONTEXT_TOKENS else self._computing_few
            average.add(num_tokens, seconds)

    def loaded(self, num_blocks: int, seconds: float) -> None:
        """Take account of a load that took this time, from the command to its end."""
        self._loading.add(num_blocks, seconds)

    def ask(self) -> bool:
        """Return whether to make a load."""
        computing = self._computing if self._computing.count else self._computing_few
        if not computing.count or self._loading.count < _MIN_BLOCKS:
            return True
        if self._loading.seconds <= computing.seconds * self._tokens_per_block:
            return True
        self._loading.shorten()
        return False


class _Average:
    """The seconds that one item takes, as an average in which earlier measurements count less and less."""

    def __init__(self) -> None:
        self.count = 0.0
        self._total = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of an item; some item must have been measured."""
        return self._total / self.count

    def add(self, count: int, seconds: float) -> None:
        self.count = self.count * _KEPT + count
        self._total = self._total * _KEPT + seconds

    def shorten(self) -> None:
        """Reduce the estimate a little."""
        self._total *= _RETRY


@dataclass(frozen=True, slots=True)
class _Save:
    key: bytes
    content: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class _Renewal:
    """Asks the thread that saves to renew the times of the files in `_used`."""


class HostBlockStore:
    """Saves KV blocks in host memory and files, and loads them, on threads of its own.

    Implements `inflight.core.ports.BlockStore`.

    Args:
        memory: The device's blocks.
        tokens_per_block: Tokens per block.
        notify: Function that wakes the loop; called on any thread, when a load has ended.
        max_host_bytes: Size of the tier in host memory; 0: there is none.
        files: The tier in files, which this object closes; None: there is none.
        always_loads: Whether blocks are loaded even if computing them is faster.
    """

    def __init__(
        self,
        memory: BlockMemory,
        tokens_per_block: int,
        notify: Callable[[], None],
        max_host_bytes: int = 0,
        files: BlockFiles | None = None,
        always_loads: bool = False,
    ) -> None:
        self._memory: BlockMemory | None = memory
        self._notify = notify
        self._files = files
        self._pays = LoadingPays(tokens_per_block)
        self._always_loads = always_loads
        self._lock = threading.Lock()
        self._in_host: OrderedDict[bytes, NDArray[np.uint8]] = OrderedDict()  # least recently used first
        self._host = TierCounts(HOST, max_host_bytes)
        self._copied_out, self._copied_in = Traffic(), Traffic()  # from the device, and to it
        self._waiting: dict[bytes, _Save] = {}  # saves that are not written yet; dropped ones are removed
        self._waiting_bytes = 0
        self._saved: list[bytes] = [] if files is None else list(files.keys())
        self._dropped: list[bytes] = []
        self._ended: list[LoadResult] = []
        self._has_news = True
        self._failing: set[int] = set()  # sizes of pieces whose last write failed
        self._is_over = False  # whether the threads leave what still waits
        self._used: dict[bytes, None] = {}  # keys of files whose times are to be renewed, in this order
        self._saves: queue.SimpleQueue[_Save | _Renewal | None] = queue.SimpleQueue()
        self._loads: queue.SimpleQueue[tuple[BlockLoad, float] | None] = queue.SimpleQueue()
        self._buffers = {
            is_state: np.empty(size, dtype=np.uint8)
            for is_state, size in ((False, memory.block_bytes), (True, memory.state_bytes))
        }
        self._threads = [
            threading.Thread(target=self._write_all, name="kv-save", daemon=True),
            threading.Thread(target=self._load_all, name="kv-load", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    # ---------------------------------------------------------------- the loop thread

    def carry_out(self, commands: StoreCommands) -> None:
        for key in commands.drops:
            self._drop(key)
        for piece in commands.saves:
            self._save(piece)
        if commands.uses:
            self._use(commands.uses)
        for load in commands.loads:
            if self._always_loads or self._pays.ask():
                self._loads.put((load, time.monotonic()))
            else:
                self._end(load, ())

    def update(self) -> StoreUpdate:
        if not self._has_news:
            return StoreUpdate()
        with self._lock:
            self._has_news = False
            update = StoreUpdate(tuple(self._saved), tuple(self._dropped), tuple(self._ended), self._stats())
            self._saved, self._dropped, self._ended = [], [], []
        return update

    def _stats(self) -> StoreStats:
        host = (self._host.stats(),) if self._host.max_bytes else ()
        self._host.begin_peaks()
        files = () if self._files is None else (self._files.stats(),)
        return StoreStats(
            self._buffers[False].size,
            self._copied_out.count,
            self._copied_out.num_bytes,
            self._copied_in.count,
            self._copied_in.num_bytes,
            (*host, *files),
        )

    def computed(self, num_tokens: int, seconds: float) -> None:
        self._pays.computed(num_tokens, seconds)

    def _save(self, piece: SavedPiece) -> None:
        assert self._memory is not None, "the device has no cache"
        content = None
        if self._waiting_bytes < _MAX_QUEUED_BYTES:
            try:
                content = self._memory.read(piece.index, piece.is_state)
            except Exception:  # no memory, or whatever a device raises: the requests must go on
                _log.exception("a KV block could not be copied from the device, and is not saved")
        if content is None:
            with self._lock:
                self._dropped.append(piece.key)
                self._has_news = True
            return
        save = _Save(piece.key, content)
        with self._lock:
            self._waiting[save.key] = save
            self._waiting_bytes += save.content.size
        self._saves.put(save)

    def _use(self, keys: Sequence[bytes]) -> None:
        """Count pieces as used now, although they are not loaded."""
        with self._lock:
            for key in keys:
                if key in self._in_host:
                    self._in_host.move_to_end(key)
            if self._files is None:
                return
            is_asked = bool(self._used)
            for key in keys:
                self._used.pop(key, None)
                self._used[key] = None
        if not is_asked:
            self._saves.put(_Renewal())

    def _drop(self, key: bytes) -> None:
        with self._lock:
            self._waiting.pop(key, None)
            self._saved = [each for each in self._saved if each != key]
        self._remove(key)

    def _remove(self, key: bytes) -> None:
        """Remove a piece from both tiers."""
        with self._lock:
            self._forget_host(key)
            self._host.note_peaks()
        if self._files is not None:
            self._files.remove(key)
        self._has_news = True

    def _forget_host(self, key: bytes) -> None:
        """Remove a piece from host memory, if it is there; `_lock` must be held."""
        content = self._in_host.pop(key, None)
        if content is not None:
            self._host.dropped.add(content.size)

    def _end(self, load: BlockLoad, tiers: Sequence[TierCounts]) -> None:
        """Report the end of a load, and count its pieces; `tiers` has the tier of each that was loaded."""
        with self._lock:
            for piece, tier in zip(load.pieces, tiers, strict=False):
                size = self._buffers[piece.is_state].size
                tier.loaded.add(size if tier is self._host else size + CHECK_BYTES)
                self._copied_in.add(size)
            self._ended.append(LoadResult(load.load_id, len(tiers)))
            self._has_news = True
        self._notify()

    # ---------------------------------------------------------------- the thread that saves

    def _write_all(self) -> None:
        while (save := self._next_save()) is not None and not self._is_over:
            is_written, removed = self._write(save)
            with self._lock:
                is_wanted = self._waiting.get(save.key) is save
                if is_wanted:
                    del self._waiting[save.key]
                    if is_written:
                        self._copied_out.add(save.content.size)
                    (self._dropped if save.key in removed else self._saved).append(save.key)
                self._dropped += [key for key in removed if key != save.key]
                self._has_news = True
            if not is_wanted:
                self._remove(save.key)
            with self._lock:
                self._waiting_bytes -= save.content.size

    def _next_save(self) -> _Save | None:
        """Wait for a piece to write, and meanwhile renew the times of files that are used, and remove files that
        become too old; None at the end."""
        while True:
            wait_s = None if self._files is None else self._files.seconds_to_expiry()
            if wait_s is not None:
                wait_s = min(max(wait_s, _MIN_WAIT_S), _MAX_WAIT_S)
            try:
                save = self._saves.get(timeout=wait_s)
            except queue.Empty:
                self._expire()
                continue
            if not isinstance(save, _Renewal):
                return save
            self._renew()

    def _expire(self) -> None:
        assert self._files is not None, "only files expire"
        removed = self._files.expire()
        if removed:
            with self._lock:
                self._dropped += [key for key in removed if key not in self._in_host]
                self._has_news = True

    def _renew(self) -> None:
        assert self._files is not None, "only files have times"
        with self._lock:
            keys, self._used = tuple(self._used), {}
        for key in keys:
            self._files.use(key)

    def _write(self, save: _Save) -> tuple[bool, list[bytes]]:
        """Write a piece to both tiers.

        Returns:
            Whether some tier has taken it, and the keys of pieces that are in neither of them afterwards.
        """
        is_written, removed = self._host.max_bytes > 0, list[bytes]()
        if self._files is not None:
            try:
                removed += self._files.write(save.key, save.content)
                is_written = True
                self._failing.discard(save.content.size)  # a full disk may still take the smaller pieces
            except (OSError, MemoryError) as error:
                if not self._failing:
                    _log.warning(
                        "KV blocks are not saved any more, until writing succeeds again: %s",
                        str(error) or "no memory",
                    )
                self._failing.add(save.content.size)
                removed.append(save.key)
        if self._host.max_bytes:
            removed += self._write_to_host(save)
        in_files = self._files or ()
        return is_written, [each for each in removed if each not in self._in_host and each not in in_files]

    def _write_to_host(self, save: _Save) -> list[bytes]:
        """Keep a piece in host memory; return the keys of those that were removed to make room."""
        removed: list[bytes] = []
        with self._lock:
            self._forget_host(save.key)
            self._in_host[save.key] = save.content
            self._host.saved.add(save.content.size)
            while self._host.num_bytes > self._host.max_bytes:
                removed.append(next(iter(self._in_host)))
                self._forget_host(removed[-1])
            self._host.note_peaks()
        return removed

    # ---------------------------------------------------------------- the thread that loads

    def _load_all(self) -> None:
        while (job := self._loads.get()) is not None and not self._is_over:
            load, begun = job
            tiers = self._load(load)
            self._pays.loaded(len(tiers), time.monotonic() - begun)
            if len(tiers) < len(load.pieces):
                with self._lock:
                    self._dropped.append(load.pieces[len(tiers)].key)
            self._end(load, tiers)

    def _load(self, load: BlockLoad) -> list[TierCounts]:
        """Load pieces up to the first that cannot be read; return the tier that each was read from."""
        tiers: list[TierCounts] = []
        for piece in load.pieces:
            try:
                tier = self._load_piece(piece, self._buffers[piece.is_state])
            except Exception:  # whatever a device raises: the block is computed instead
                _log.exception("a saved KV block could not be copied to the device")
                break
            if tier is None:
                break
            tiers.append(tier)
        return tiers

    def _load_piece(self, piece: SavedPiece, buffer: NDArray[np.uint8]) -> TierCounts | None:
        """Copy a piece to the device; return the tier that it was read from, None if it was not found.

        A piece that is being written counts as read from the tier in files, or from host memory if there are none.
        """
        tier = self._host
        with self._lock:
            content, waiting = self._in_host.get(piece.key), self._waiting.get(piece.key)
            if content is not None:
                self._in_host.move_to_end(piece.key)
            elif waiting is not None:  # another rank may already have written its part
                content = waiting.content
                tier = self._host if self._files is None else self._files.counts
        if content is None and self._files is not None and self._files.read(piece.key, buffer):
            tier, content = self._files.counts, buffer
        if content is None:
            return None
        assert self._memory is not None, "the device has no cache"
        self._memory.write(piece.index, piece.is_state, content)
        return tier

    # ---------------------------------------------------------------- the end

    def make_room(self) -> None:
        """Remove files of other identities if their folder is too large; see `BlockFiles`."""
        if self._files is not None:
            self._files.make_room()

    def use_memory(self, memory: BlockMemory | None) -> None:
        """Use the blocks of another cache of the same layout; None until there is one. Any thread.

        While there is no cache, no command may be given and no load may be in progress.
        """
        self._memory = memory

    def close(self) -> None:
        """Write the pieces that wait, for a few seconds at most, end the threads, and free the device's memory.
        Idempotent."""
        self._saves.put(None)
        self._loads.put(None)
        for thread in self._threads:
            thread.join(_CLOSE_S)
        self._is_over = True
        self._memory = None
        if self._files is not None:
            self._files.close()

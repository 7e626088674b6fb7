"""Tracks which KV blocks each slot's row of a linear cache contains, and which copies a row needs before it is
read.

TensorRT's caches are linear: a slot has a row for the longest sequence, with position p of the slot's sequence
at p. The scheduler uses blocks, which several sequences share and which stay after a sequence has ended. So the
blocks have the valid data: each batch's new keys and values are written to rows and, after the batch, copied to
the blocks. A row consists of columns; column i is a copy of block i in the slot's block table.

A column is valid if it was copied from, or to, the block at this place of the table, in the block's current
**version**. A block gets a new version when copies in rows may no longer be valid: when it is the target of a
copy, when another row than before writes to it, and when it is written after a row has read it. In ordinary
generation none of these happens, and no copy is made.

Only numbers on the host; independent of device and model. Used on the loop thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inflight.core.schedule.batch import ScheduledBatch

_NOBODY = -1


@dataclass(frozen=True, slots=True)
class ColumnLoad:
    """A copy of the first `num_tokens` tokens of a block to a column of a row."""

    column: int
    block_id: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class RowChange:
    """The changes to a slot's row before a batch runs: the end of the row is cleared, then blocks are copied to
    it.

    Attributes:
        slot: The slot of the row.
        cleared_from: The position from which the row is to be zeroed; None: nothing is cleared. The values of a
            slot's previous sequence must not affect the next one: masked positions are multiplied by zero,
            which is not enough if a value is infinite.
        loads: The copies from blocks.
    """

    slot: int
    cleared_from: int | None
    loads: tuple[ColumnLoad, ...]


class RowResidency:
    """The content of the rows, by block.

    Args:
        num_slots: Number of rows.
        num_columns: Number of blocks of the longest sequence.
        tokens_per_block: Number of tokens of a column.
        num_blocks: Number of block ids.
    """

    def __init__(self, num_slots: int, num_columns: int, tokens_per_block: int, num_blocks: int) -> None:
        self._size = tokens_per_block
        shape = (num_slots, num_columns)
        # The block tables, according to the batches.
        self._tables = np.zeros(shape, dtype=np.int64)
        self._lengths = np.zeros(num_slots, dtype=np.int64)
        # The content of each column: a version of a block, up to the end of the sequence.
        self._blocks = np.full(shape, _NOBODY, dtype=np.int64)
        self._versions = np.zeros(shape, dtype=np.int64)
        # Per block: its version, the row that writes it, and whether a row has read it.
        self._current = np.zeros(num_blocks, dtype=np.int64)
        self._writers = np.full(num_blocks, _NOBODY, dtype=np.int64)
        self._was_read = np.zeros(num_blocks, dtype=np.bool_)
        self._taken: set[int] = set()  # slots with a sequence
        self._untouched: set[int] = set()  # taken slots whose sequence had no row in a batch yet

    def apply(self, batch: ScheduledBatch, num_tokens: NDArray[np.int64]) -> list[RowChange]:
        """Apply a batch; return the changes of rows to make after the batch's block copies and before its run.

        Args:
            batch: The batch. It must not continue in a slot of a failed batch.
            num_tokens: [slots] number of computed tokens of each slot's sequence, for beams after their moves.
        """
        moved = self._change_tables(batch)
        changes: list[RowChange] = []
        for chunk in batch.context:
            changes += self._prepare(chunk.slot, chunk.start)
        for slot in moved.intersection(batch.generation_slots):
            changes += self._prepare(slot, int(num_tokens[slot]))
        for chunk in batch.context:
            self._write(chunk.slot, chunk.start, chunk.start + len(chunk.token_ids))
        grown = {slot for slot, _ in batch.new_blocks}
        for slot in (grown | moved).intersection(batch.generation_slots):
            self._write(slot, int(num_tokens[slot]), int(num_tokens[slot]) + 1)
        return changes

    def forget(self, batch: ScheduledBatch) -> None:
        """Forget the slots of a failed batch, as the content of their rows is unknown."""
        slots = {start.slot for start in batch.starts}
        slots.update(chunk.slot for chunk in batch.context)
        slots.update(batch.generation_slots)
        slots.update(slot for slot, _ in batch.new_blocks)
        self._blocks[list(slots)] = _NOBODY
        self._untouched |= slots

    def _change_tables(self, batch: ScheduledBatch) -> set[int]:
        """Apply all deltas; return the slots whose table has changed in other ways than by appending."""
        self._taken.difference_update(batch.released_slots)
        for start in batch.starts:
            self._lengths[start.slot] = 0
            self._taken.add(start.slot)
            self._untouched.add(start.slot)
        for _, target in batch.block_copies:
            self._renew(target)
        moved = {slot for slot, _, _ in batch.replaced_blocks}
        if batch.moves:
            slots = [move.slot for move in batch.moves]
            parents = [move.parent_slot for move in batch.moves]
            self._tables[slots] = self._tables[parents]
            self._lengths[slots] = self._lengths[parents]
            self._untouched.update(set(slots) - self._taken)
            self._taken.update(slots)
            moved.update(slots)
        for slot, column, block_id in batch.replaced_blocks:
            self._tables[slot, column] = block_id
        for slot, block_ids in batch.new_blocks:
            end = self._lengths[slot] + len(block_ids)
            self._tables[slot, self._lengths[slot] : end] = block_ids
            self._lengths[slot] = end
        return moved

    def _prepare(self, slot: int, num_tokens: int) -> Iterable[RowChange]:
        """Return the changes after which a row has the first `num_tokens` tokens of its slot's sequence."""
        count = min(-(-num_tokens // self._size), int(self._lengths[slot]))
        block_ids = self._tables[slot, :count]
        is_held = self._blocks[slot, :count] == block_ids
        is_held &= self._versions[slot, :count] == self._current[block_ids]
        cleared_from = None
        if slot in self._untouched:
            self._untouched.remove(slot)
            kept = count if is_held.all() else int(is_held.argmin())
            is_held[kept:] = False
            self._blocks[slot, kept:] = _NOBODY
            cleared_from = min(num_tokens, kept * self._size)
        missing = np.flatnonzero(~is_held)
        if cleared_from is None and not len(missing):
            return ()
        block_ids = block_ids[missing]
        self._hold(slot, missing, block_ids)
        self._was_read[block_ids] = True
        counts = np.minimum(num_tokens - missing * self._size, self._size)
        loads = map(ColumnLoad, missing.tolist(), block_ids.tolist(), counts.tolist())
        return (RowChange(slot, cleared_from, tuple(loads)),)

    def _write(self, slot: int, begin: int, end: int) -> None:
        """Record that positions `begin` to `end` are written to the row, and then to the slot's blocks."""
        last = min(-(-end // self._size), int(self._lengths[slot]))
        columns = np.arange(begin // self._size, last)
        block_ids = self._tables[slot, columns]
        self._renew(block_ids[(self._writers[block_ids] != slot) | self._was_read[block_ids]])
        self._writers[block_ids] = slot
        # This row alone writes this version, so it has all of the version's tokens.
        self._hold(slot, columns, block_ids)

    def _hold(self, slot: int, columns: NDArray[np.int64], block_ids: NDArray[np.int64]) -> None:
        self._blocks[slot, columns] = block_ids
        self._versions[slot, columns] = self._current[block_ids]

    def _renew(self, block_ids: int | NDArray[np.int64]) -> None:
        """Give blocks a new version, which invalidates columns with their old content."""
        self._current[block_ids] += 1
        self._writers[block_ids] = _NOBODY
        self._was_read[block_ids] = False

"""Packs a ScheduledBatch into the rows of one forward pass, without padding. Independent of the model.

    rows   0 ............ C   C ................... T
           chunk | chunk | …   generation, longest sequence first

Rows of a chunk are consecutive tokens of one sequence; each generation row is the last token of its sequence. All
data that the host knows are sent to the device in one copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inflight.core.kv.picture_spans import find_spans
from inflight.core.schedule.batch import ScheduledBatch
from inflight.engine.prompt_tables import VirtualRows
from inflight.engine.rotary_tables import RotaryTables, RowRotations
from inflight.engine.slots import SlotTable
from inflight.sampling.transfer import upload

TILE_ROWS = 64
"""Number of rows of a chunk that attention with fixed shapes computes together."""


@dataclass(frozen=True, slots=True)
class PackedChunk:
    """A context chunk: rows begin .. end - 1 hold positions start .. start + end - begin - 1 of `slot`."""

    slot: int
    begin: int
    end: int
    start: int


@dataclass(frozen=True, slots=True)
class FixedRows:
    """The chunks' rows and the generation rows of a batch, in tensors of fixed shape.

    A recorded forward pass reads these tensors from the same memory at every replay. Rows that are neither in a
    chunk nor generation rows are padding.

    Attributes:
        tiles: [tiles, 4] int64 on the device, one row for at most `tile_rows` rows of a chunk: first row,
            row after the last, slot, the first row's position; all zero if unused.
        generation_rows: [sequences] int64 on the device: generation rows; -1 if unused.
        tile_rows: Maximum number of rows of a tile.
    """

    tiles: Tensor
    generation_rows: Tensor
    tile_rows: int = TILE_ROWS


@dataclass(frozen=True, slots=True)
class TileLimits:
    """The limits of a recorded batch for context chunks.

    Attributes:
        count: Maximum number of tiles.
        rows: Maximum number of rows of a tile.
    """

    count: int
    rows: int


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """The rows of a forward pass. Tensors are int64 on the device.

    Attributes:
        token_ids: [rows]; for rows in `virtual`, ids outside of the vocabulary.
        positions: [rows], each token's position in its sequence.
        slots: [rows], each row's slot.
        sampled_rows: Indices of the sampled rows, in the order of `ScheduledBatch.sampled_slots`; for a chunk with
            drafts, all rows from its last known token on.
        bounds: [sequences + 1], first row of each sequence, in the order of rows, followed by the number of rows.
        chunks: Context chunks.
        generation_begin: First generation row.
        generation_lengths: [generation rows] on the host: number of tokens of each row's sequence up to this row,
            descending.
        block_tables: The slots' block tables, as in `SlotTable`.
        adapters: [rows] on the host: first page of each row's adapter, -1 without one; None if no row has
            an adapter.
        virtual: Rows of prompt tables; None if there are none.
        rotations: Rotations of the rows; None: each row's rotary position is its position.
        ends: [rows] on the host: the last position that each row sees in layers with bidirectional attention,
            which is the last one of its picture span; None: every row's own position.
        fixed: For recordings, the chunks and generation rows in tensors of fixed shape; None: see the
            fields above. If set, `chunks` is empty, `generation_begin` is 0, and every row counts as a
            sequence.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    sampled_rows: Tensor
    bounds: Tensor
    chunks: tuple[PackedChunk, ...]
    generation_begin: int
    generation_lengths: NDArray[np.int64]
    block_tables: Tensor
    adapters: NDArray[np.int64] | None = None
    virtual: VirtualRows | None = None
    rotations: RowRotations | None = None
    ends: NDArray[np.int64] | None = None
    fixed: FixedRows | None = None


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The rows of a batch, on the host.

    Attributes:
        chunks: Context chunks; their rows come first.
        slots: The slot of each row.
        positions: The position of each row.
        known_ids: Token ids of the first rows: of all rows, or of the chunks' rows if only the device knows
            the others.
        sampled: See `PackedBatch.sampled_rows`.
    """

    chunks: tuple[PackedChunk, ...]
    slots: list[int]
    positions: list[int]
    known_ids: list[int]
    sampled: list[int]

    @property
    def generation_begin(self) -> int:
        """Index of the first generation row."""
        return self.chunks[-1].end if self.chunks else 0


def lay_out(batch: ScheduledBatch, table: SlotTable) -> RowLayout:
    """Lay out the rows of a batch that `table` has applied; generation rows of longer sequences come first.

    Raises:
        ValueError: A row's block table does not reach its position.
    """
    # Lists, converted to one array at the end: for few rows, one array operation takes longer than all list
    # operations.
    chunks, slots, positions, context_ids, sampled = _context_rows(batch)
    generation_begin = len(slots)
    generation_positions = _positions(batch.generation_slots, table)
    order = sorted(range(len(generation_positions)), key=lambda index: -generation_positions[index])
    slots += [batch.generation_slots[index] for index in order]
    positions += [generation_positions[index] for index in order]
    _check_blocks(slots, positions, table)
    row_of_generation = [0] * len(order)
    for row, index in enumerate(order, generation_begin):
        row_of_generation[index] = row
    sampled += row_of_generation

    known_ids = context_ids + table.last_on_host(slots[generation_begin:])
    return RowLayout(chunks, slots, positions, known_ids, sampled)


def pack(
    batch: ScheduledBatch,
    table: SlotTable,
    virtual: VirtualRows | None = None,
    rotary: RotaryTables | None = None,
    first_virtual_id: int | None = None,
) -> PackedBatch:
    """Lay out a batch and send it to the device.

    Args:
        batch: The batch.
        table: The slots, to which the batch was applied.
        virtual: The batch's virtual tokens.
        rotary: The slots' rotary tables.
        first_virtual_id: The first id of virtual tokens, for a model in which those of a picture attend to each
            other in both directions.

    Raises:
        ValueError: As in `lay_out`.
    """
    rows = lay_out(batch, table)
    num_rows, generation_begin = len(rows.slots), rows.generation_begin
    begins = [chunk.begin for chunk in rows.chunks]
    begins += range(generation_begin, num_rows + 1)  # each generation row ends where the next one begins
    numbers = rows.slots + rows.positions + rows.sampled + begins + rows.known_ids
    on_host = np.array(numbers, dtype=np.int64)
    parts = upload(on_host, table.last_tokens.device).split_with_sizes(
        [num_rows, num_rows, len(rows.sampled), len(begins), len(rows.known_ids)]
    )
    slot_rows, position_rows, sampled_rows, bounds, token_ids = parts
    if len(rows.known_ids) < num_rows:
        fed_back = table.last_tokens.index_select(0, slot_rows[generation_begin:])
        token_ids = torch.cat([token_ids, fed_back]) if generation_begin else fed_back
    return PackedBatch(
        token_ids=token_ids,
        positions=position_rows,
        slots=slot_rows,
        sampled_rows=sampled_rows,
        bounds=bounds,
        chunks=rows.chunks,
        generation_begin=generation_begin,
        generation_lengths=on_host[num_rows + generation_begin : 2 * num_rows] + 1,
        block_tables=table.block_tables,
        adapters=adapters_of(rows.slots, table),
        virtual=virtual,
        rotations=None if rotary is None else rotary.rotations(rows.slots, rows.positions),
        ends=None if first_virtual_id is None else _ends(batch, rows.positions, first_virtual_id),
    )


def generation_rows(batch: ScheduledBatch, table: SlotTable) -> NDArray[np.int64]:
    """Return [2, generation slots] int64: the slots, and the position of each slot's last token. Raises
    ValueError like `pack`."""
    positions = _positions(batch.generation_slots, table)
    _check_blocks(batch.generation_slots, positions, table)
    return np.array([batch.generation_slots, positions], dtype=np.int64)


def tile_limits(num_rows: int, num_chunks: int) -> TileLimits:
    """Return limits with enough tiles of TILE_ROWS rows for any `num_chunks` chunks of `num_rows` rows in
    total."""
    return TileLimits(num_rows // TILE_ROWS + num_chunks, TILE_ROWS)


def cut_into_tiles(chunks: Iterable[PackedChunk], tile_rows: int | None = None) -> list[list[int]]:
    """Divide the chunks' rows into `FixedRows.tiles`; `tile_rows` defaults to TILE_ROWS."""
    size = tile_rows or TILE_ROWS
    return [
        [first, min(first + size, chunk.end), chunk.slot, chunk.start + first - chunk.begin]
        for chunk in chunks
        for first in range(chunk.begin, chunk.end, size)
    ]


def adapters_of(slots: Sequence[int] | NDArray[np.int64], table: SlotTable) -> NDArray[np.int64] | None:
    """Return `PackedBatch.adapters` for one row of each of these slots."""
    adapters = table.adapters[np.asarray(slots, dtype=np.int64)]
    return adapters if (adapters >= 0).any() else None


def _context_rows(
    batch: ScheduledBatch,
) -> tuple[tuple[PackedChunk, ...], list[int], list[int], list[int], list[int]]:
    """Return the chunks; slots, positions and token ids of their rows; and the sampled rows."""
    chunks: list[PackedChunk] = []
    slots: list[int] = []
    positions: list[int] = []
    token_ids: list[int] = []
    sampled: list[int] = []
    for chunk in batch.context:
        begin, count = len(slots), len(chunk.token_ids)
        slots += [chunk.slot] * count
        positions += range(chunk.start, chunk.start + count)
        token_ids += chunk.token_ids
        if chunk.is_last:
            sampled += range(begin + count - 1 - chunk.num_draft_tokens, begin + count)
        chunks.append(PackedChunk(chunk.slot, begin, begin + count, chunk.start))
    return tuple(chunks), slots, positions, token_ids, sampled


def _ends(batch: ScheduledBatch, positions: Sequence[int], first_virtual_id: int) -> NDArray[np.int64] | None:
    """Return `PackedBatch.ends` of a batch whose rows have these positions."""
    if all(max(chunk.token_ids) < first_virtual_id for chunk in batch.context):
        return None
    ends, row = np.array(positions, dtype=np.int64), 0
    for chunk in batch.context:
        for begin, end in find_spans(chunk.token_ids, first_virtual_id):
            ends[row + begin : row + end] = chunk.start + end - 1
        row += len(chunk.token_ids)
    return ends


def _positions(slots: Sequence[int], table: SlotTable) -> list[int]:
    """Return the position of each slot's next token in its sequence."""
    return table.num_tokens[list(slots)].tolist() if slots else []


def _check_blocks(slots: Sequence[int], positions: Sequence[int], table: SlotTable) -> None:
    """Raise ValueError for a row without a block, which would overwrite the null block that all sequences read."""
    num_blocks, size = table.num_blocks.tolist(), table.tokens_per_block
    for slot, position in zip(slots, positions, strict=True):
        if position >= num_blocks[slot] * size:
            raise ValueError(
                f"slot {slot} has {num_blocks[slot]} blocks of {size} tokens, too few for position {position}"
            )

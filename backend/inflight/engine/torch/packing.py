"""A ScheduledBatch → the rows of one forward pass, without padding.

    rows   0 ............ C   C ................... T
           chunk | chunk | …   generation, longest sequence first

Rows of a chunk are consecutive tokens of one sequence; each generation row is the last token of its sequence. What
is known on the host travels to the device in one copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inflight.core.batch import ScheduledBatch
from inflight.decoding.transfer import upload
from inflight.engine.torch.slot_table import SlotTable


@dataclass(frozen=True, slots=True)
class PackedChunk:
    """A context chunk: rows begin .. end - 1 hold positions start .. start + end - begin - 1 of `slot`."""

    slot: int
    begin: int
    end: int
    start: int


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """The rows of a forward pass. Tensors are int64 on the device.

    Attributes:
        token_ids: [rows].
        positions: [rows], each token's place in its sequence.
        slots: [rows].
        sampled_rows: Rows whose logits choose tokens, in the order of `ScheduledBatch.sampled_slots`; of a chunk
            with drafts all rows from its last certain token on.
        bounds: [sequences + 1], each one's first row in the order of the rows, and the number of rows.
        chunks: Context chunks.
        generation_begin: First generation row.
        generation_lengths: Tokens of each generation row's sequence, itself included, longest first, on the host.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    sampled_rows: Tensor
    bounds: Tensor
    chunks: tuple[PackedChunk, ...]
    generation_begin: int
    generation_lengths: NDArray[np.int64]


def pack(batch: ScheduledBatch, table: SlotTable, tokens_per_block: int) -> PackedBatch:
    """Lay out a batch whose slots and blocks `table` has taken over.

    Raises:
        ValueError: A row's block table does not reach its position.
    """
    chunks, context = _context_rows(batch)
    generation_slots = np.array(batch.generation_slots, dtype=np.int64)
    order = np.argsort(-table.num_tokens[generation_slots], kind="stable")
    generation_slots = generation_slots[order]
    generation_positions = table.num_tokens[generation_slots]
    num_context, num_rows = context.shape[1], context.shape[1] + len(order)

    slots = np.concatenate([context[0], generation_slots])
    positions = np.concatenate([context[1], generation_positions])
    _check_blocks(slots, positions, table, tokens_per_block)
    last_rows = [
        row
        for chunk, given in zip(chunks, batch.context, strict=True)
        if given.is_last
        for row in range(chunk.end - 1 - given.num_draft_tokens, chunk.end)
    ]
    row_of_generation = np.empty_like(order)
    row_of_generation[order] = np.arange(num_context, num_rows)
    sampled = np.concatenate([np.array(last_rows, dtype=np.int64), row_of_generation])

    begins = np.array([chunk.begin for chunk in chunks], dtype=np.int64)
    ends = np.arange(num_context, num_rows + 1)  # each generation row ends where the next one begins
    on_host = np.concatenate([slots, positions, sampled, begins, ends, context[2]])
    parts = upload(on_host, table.last_tokens.device).split(
        [num_rows, num_rows, len(sampled), len(begins) + len(ends), num_context]
    )
    slot_rows, position_rows, sampled_rows, bounds, context_ids = parts
    fed_back = table.last_tokens.index_select(0, slot_rows[num_context:])
    return PackedBatch(
        token_ids=torch.cat([context_ids, fed_back]) if num_context else fed_back,
        positions=position_rows,
        slots=slot_rows,
        sampled_rows=sampled_rows,
        bounds=bounds,
        chunks=chunks,
        generation_begin=num_context,
        generation_lengths=generation_positions + 1,
    )


def generation_rows(batch: ScheduledBatch, table: SlotTable, tokens_per_block: int) -> NDArray[np.int64]:
    """[2, generation slots] in their order: slot, position of its last token. ValueError as `pack`."""
    slots = np.array(batch.generation_slots, dtype=np.int64)
    rows = np.stack([slots, table.num_tokens[slots]])
    _check_blocks(*rows, table, tokens_per_block)
    return rows


def _context_rows(batch: ScheduledBatch) -> tuple[tuple[PackedChunk, ...], NDArray[np.int64]]:
    """The chunks, and [3, context rows]: slot, position and token id of each row."""
    rows = np.empty((3, batch.num_context_tokens), dtype=np.int64)
    chunks = []
    begin = 0
    for chunk in batch.context:
        end = begin + len(chunk.token_ids)
        rows[0, begin:end] = chunk.slot
        rows[1, begin:end] = np.arange(chunk.start, chunk.start + end - begin)
        rows[2, begin:end] = chunk.token_ids
        chunks.append(PackedChunk(chunk.slot, begin, end, chunk.start))
        begin = end
    return tuple(chunks), rows


def _check_blocks(
    slots: NDArray[np.int64], positions: NDArray[np.int64], table: SlotTable, tokens_per_block: int
) -> None:
    """A row without a block would write into the null block, that all others read."""
    lacking = np.flatnonzero(positions // tokens_per_block >= table.num_blocks[slots])
    if lacking.size:
        slot, position = int(slots[lacking[0]]), int(positions[lacking[0]])
        raise ValueError(
            f"slot {slot} has {table.num_blocks[slot]} blocks of {tokens_per_block} tokens, "
            f"too few for position {position}"
        )

"""A plan's inputs about a batch's rows: their slots, the positions to write, and the keys that each row reads.

A plan computes rows in the order of their slots, and within a slot by position. Generation rows are attended to by
slot, at most one per slot; context chunks separately, padded to the longest. A chunk of a single row is computed
as a generation row, which gives the same result. All inputs are tensors, so that a replay of a recorded batch
reads the current slots and positions. Independent of the model. Used on the loop thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inflight.engine.packing import FixedRows, PackedChunk, TileLimits, cut_into_tiles
from inflight.sampling.transfer import upload


@dataclass(frozen=True, slots=True)
class PlacedRows:
    """The rows of a batch, or of a part of one, with their places in the caches.

    Attributes:
        slots: [rows] int64 on the device; rows of a slot are ordered by position.
        positions: [rows] int64 on the device.
        fixed: The rows that belong to chunks, and the generation rows, at most one per slot.
    """

    slots: Tensor
    positions: Tensor
    fixed: FixedRows


def place_rows(slots: Tensor, positions: Tensor, chunks: Sequence[PackedChunk]) -> PlacedRows:
    """Return rows without padding: chunks' rows first, then generation rows."""
    count = len(slots)
    long = [chunk for chunk in chunks if chunk.end - chunk.begin > 1]
    widest = max((chunk.end - chunk.begin for chunk in long), default=1)
    generating = [chunk.begin for chunk in chunks if chunk.end - chunk.begin == 1]
    generating += range(chunks[-1].end if chunks else 0, count)
    tiles = np.array(cut_into_tiles(long, widest), dtype=np.int64).reshape(-1)
    numbers = upload(np.concatenate([tiles, np.array(generating, dtype=np.int64)]), slots.device)
    of_tiles, generation_rows = numbers.split_with_sizes([len(tiles), len(generating)])
    return PlacedRows(slots, positions, FixedRows(of_tiles.view(-1, 4), generation_rows, widest))


def fill_up(
    slots: Tensor, positions: Tensor, fixed: FixedRows, null_slot: int, num_slots: int, length: int
) -> PlacedRows:
    """Return the rows of a padded batch, with places for the padding rows.

    A plan has no spare slot for padding. So padding rows are written after the sequences of the batch, in the
    first slots with unused positions, which are written again before they are read. A batch of padding rows
    only may use any slot.

    Args:
        slots: [rows] int64.
        positions: [rows] int64.
        fixed: The kinds of the rows.
        null_slot: The slot of padding rows.
        num_slots: The plan's number of slots.
        length: Number of positions of a slot's cache; `RowCache.has_room_beside` has checked that they are enough.
    """
    is_filler = slots == null_slot
    own = torch.where(is_filler, num_slots, slots)
    lengths = torch.zeros(num_slots + 1, dtype=torch.int64, device=slots.device)
    lengths = lengths.scatter_reduce(0, own, positions + 1, "amax")[:num_slots]
    room = torch.where((lengths > 0) | is_filler.all(), length - lengths, 0).cumsum(0)
    number = is_filler.cumsum(0) - 1
    behind = torch.searchsorted(room, number, right=True).clamp(max=num_slots - 1)
    generating = fixed.generation_rows
    generating = torch.where(is_filler[generating.clamp(min=0)], -1, generating)
    return PlacedRows(
        torch.where(is_filler, behind, slots),
        torch.where(is_filler, length - room[behind] + number, positions),
        FixedRows(fixed.tiles, generating, fixed.tile_rows),
    )


@dataclass(frozen=True, slots=True)
class PlanRows:
    """A plan's inputs about its rows, int32 on the device; attributes have the names of the inputs.

    Attributes:
        slot_order: [rows] for each of the plan's rows, its index in the batch.
        packed_order: [rows] for each of the batch's rows, its index in the plan.
        write_indices: [slots] position of a slot's first row; 0 for a slot without rows.
        update_lengths: [slots + 1] number of rows of all slots before each slot.
        kv_lengths: [slots] number of positions of a slot, including its rows; 0 for a slot without rows.
        ctx_slots: [chunks] slot of each chunk of several rows.
        ctx_q_gather: [chunks, longest] the plan's rows of each chunk, padded by repeating the last one.
        gen_q_gather: [slots] the plan's generation row of each slot; 0 for slots without one.
        gen_kv_lengths: [slots] number of positions that the generation row reads; 1 for slots without one.
        o_gather: [rows] for each of the plan's rows, the index of its attention output: slots first, then chunks
            row by row; arbitrary for padding rows.
    """

    slot_order: Tensor
    packed_order: Tensor
    write_indices: Tensor
    update_lengths: Tensor
    kv_lengths: Tensor
    ctx_slots: Tensor
    ctx_q_gather: Tensor
    gen_q_gather: Tensor
    gen_kv_lengths: Tensor
    o_gather: Tensor


def lay_out_for_plan(rows: PlacedRows, num_slots: int) -> PlanRows:
    """Return the inputs of a plan with `num_slots` slots, for at least one row."""
    slots, positions, tiles = rows.slots, rows.positions, rows.fixed.tiles
    count, device = len(slots), slots.device
    order = slots.argsort(stable=True)
    plan_row = torch.empty_like(order).index_copy_(0, order, torch.arange(count, device=device))
    num_rows = torch.zeros(num_slots, dtype=torch.int64, device=device)
    num_rows = num_rows.index_add(0, slots, torch.ones_like(slots))
    lengths = torch.cat([num_rows.new_zeros(1), num_rows.cumsum(0)])
    firsts = positions[order][lengths[:-1].clamp(max=count - 1)] * (num_rows > 0)

    # Unused rows and slots are written to an additional entry at the end, which is then cut off.
    first, end = tiles[:, :1], tiles[:, 1:2]
    of_tiles = first + torch.arange(rows.fixed.tile_rows, device=device)
    tile_places = num_slots + torch.arange(of_tiles.numel(), device=device)
    generates = rows.fixed.generation_rows >= 0
    generating = rows.fixed.generation_rows.clamp(min=0)
    of_slots = torch.where(generates, slots[generating], num_slots)
    places = torch.zeros(count + 1, dtype=torch.int64, device=device)
    places.index_copy_(0, torch.where(of_tiles < end, of_tiles, count).flatten(), tile_places)
    places.index_copy_(0, torch.where(generates, generating, count), of_slots)
    nothing, one = (torch.full((num_slots + 1,), value, dtype=torch.int64, device=device) for value in (0, 1))
    return PlanRows(
        *(
            each.int()
            for each in (
                order,
                plan_row,
                firsts,
                lengths,
                firsts + num_rows,
                tiles[:, 2].contiguous(),
                plan_row[torch.minimum(of_tiles, end - 1).clamp(min=0)],
                nothing.index_copy_(0, of_slots, plan_row[generating])[:-1],
                one.index_copy_(0, of_slots, positions[generating] + 1)[:-1],
                places[order],
            )
        )
    )


def tile_limits(num_rows: int, max_chunks: int, longest: int) -> TileLimits:
    """Return the tile limits of a recorded batch: a plan computes tiles like chunks, padded to at most twice the
    batch's rows.

    Any batch fits that has a single chunk, or at most half as many chunks as tiles.

    Args:
        num_rows: Number of rows of the batch.
        max_chunks: The plan's maximum number of chunks.
        longest: Number of rows of the plan's longest chunk.
    """
    return TileLimits(max_chunks, min(num_rows, longest, -(-2 * num_rows // max_chunks)))


@dataclass(frozen=True, slots=True)
class PartLimits:
    """The limits of one run of a plan.

    Attributes:
        max_rows: Maximum number of rows.
        max_chunks: Maximum number of context chunks with several rows.
        max_ranks: Maximum sum of ranks of all LoRA adapters.
    """

    max_rows: int
    max_chunks: int
    max_ranks: int


@dataclass(frozen=True, slots=True)
class BatchPart:
    """Consecutive rows of a batch that a plan computes in one run.

    Attributes:
        begin: The first row.
        end: The row after the last.
        chunks: Context chunks, or pieces of chunks, with row indices relative to this part.
    """

    begin: int
    end: int
    chunks: tuple[PackedChunk, ...]


def cut_batch(
    chunks: Sequence[PackedChunk],
    num_rows: int,
    adapters: NDArray[np.int64] | None,
    adapter_ranks: Mapping[int, int],
    limits: PartLimits,
) -> list[BatchPart]:
    """Divide a batch into parts that run in order: a part reads keys and values that earlier parts wrote.

    Args:
        chunks: The batch's context chunks.
        num_rows: Number of rows of the batch; each row after the chunks belongs to another sequence.
        adapters: [rows] first page of each row's adapter, -1 without one; None: no row has an adapter.
        adapter_ranks: The rank of each of these adapters, by its first page.
        limits: The limits of a part.
    """
    pieces = [
        PackedChunk(
            chunk.slot, begin, min(begin + limits.max_rows, chunk.end), chunk.start + begin - chunk.begin
        )
        for chunk in chunks
        for begin in range(chunk.begin, chunk.end, limits.max_rows)
    ]
    first = chunks[-1].end if chunks else 0
    sequences: list[tuple[int, int, PackedChunk | None]] = [(each.begin, each.end, each) for each in pieces]
    sequences += ((row, row + 1, None) for row in range(first, num_rows))
    parts: list[BatchPart] = []
    begin, of_part, num_long, ranks = 0, list[PackedChunk](), 0, dict[int, int]()
    for row, end, piece in sequences:
        adapter = -1 if adapters is None else int(adapters[row])
        own, is_long = {adapter: adapter_ranks.get(adapter, 0)}, end - row > 1
        is_full = end - begin > limits.max_rows or num_long + is_long > limits.max_chunks
        if row > begin and (is_full or sum((ranks | own).values()) > limits.max_ranks > 0):
            parts.append(BatchPart(begin, row, tuple(of_part)))
            begin, of_part, num_long, ranks = row, [], 0, {}
        num_long += is_long
        ranks |= own
        if piece is not None:
            of_part.append(PackedChunk(piece.slot, row - begin, end - begin, piece.start))
    return [*parts, BatchPart(begin, num_rows, tuple(of_part))]

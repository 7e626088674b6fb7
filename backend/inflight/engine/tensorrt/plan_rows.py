"""The inputs of a plan about a batch's rows: their slots, where they are written, and which rows each row
reads.

A plan computes rows in the order of their slots, and of a slot in the order of their positions. Generation rows
are attended to by slot, each slot's at most one; context chunks apart, padded to the longest. A chunk of a single
row is computed as a generation row: it is the same. Everything is in tensors, so that a recorded batch follows
what is in the slots and positions that it reads at a replay. Knows no model. Called by the loop thread.
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
    """The places in the caches of the rows of a batch, or of a part of one.

    Attributes:
        slots: [rows] int64 on the device; rows of a slot are in the order of their positions.
        positions: [rows] int64 on the device.
        fixed: Which of them are chunks', and which generate; no slot is there twice among those that generate.
    """

    slots: Tensor
    positions: Tensor
    fixed: FixedRows


def place_rows(slots: Tensor, positions: Tensor, chunks: Sequence[PackedChunk]) -> PlacedRows:
    """Rows that are all some sequence's: those of chunks, which come first, and behind them generation rows."""
    count = len(slots)
    long = [chunk for chunk in chunks if chunk.end - chunk.begin > 1]
    widest = max((chunk.end - chunk.begin for chunk in long), default=1)
    generating = [chunk.begin for chunk in chunks if chunk.end - chunk.begin == 1]
    generating += range(chunks[-1].end if chunks else 0, count)
    tiles = np.array(cut_into_tiles(long, widest), dtype=np.int64).reshape(-1)
    numbers = upload(np.concatenate([tiles, np.array(generating, dtype=np.int64)]), slots.device)
    of_tiles, generation_rows = numbers.split([len(tiles), len(generating)])
    return PlacedRows(slots, positions, FixedRows(of_tiles.view(-1, 4), generation_rows, widest))


def fill_up(
    slots: Tensor, positions: Tensor, fixed: FixedRows, null_slot: int, num_slots: int, length: int
) -> PlacedRows:
    """Rows of which some only fill the batch up.

    A plan has no row to spare for these. They are written behind the sequences of the batch, to the first that
    have room: what is there is written again before it is read. Of a batch that has nothing but these, any slot
    will do.

    Args:
        slots: [rows] int64.
        positions: [rows] int64.
        fixed: Which rows are what.
        null_slot: The slot of those that fill it up.
        num_slots: Of the plan.
        length: Positions of a slot's cache; `RowCache.has_room_beside` says whether they suffice.
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
    """The inputs of a plan that say which rows are what, int32 on the device; their names are the plan's.

    Attributes:
        slot_order: [rows] for each of the plan's rows, which of the batch's it is.
        packed_order: [rows] for each of the batch's rows, which of the plan's it is.
        write_indices: [slots] position of a slot's first row; 0 without one.
        update_lengths: [slots + 1] how many rows the slots before have.
        kv_lengths: [slots] how many positions a slot has with its rows; 0 without any.
        ctx_slots: [chunks] slot of each chunk of several rows.
        ctx_q_gather: [chunks, longest] its rows, the plan's; the last one again where it is shorter.
        gen_q_gather: [slots] the plan's row of a slot that generates; 0 of another.
        gen_kv_lengths: [slots] how many positions that row reads; 1 of another.
        o_gather: [rows] for each of the plan's rows, where its attention is: slots' first, then the chunks', row
            by row; any of a row that only fills the batch up.
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
    """The inputs of a plan for at least one row. `num_slots` are the plan's."""
    slots, positions, tiles = rows.slots, rows.positions, rows.fixed.tiles
    count, device = len(slots), slots.device
    order = slots.argsort(stable=True)
    plan_row = torch.empty_like(order).index_copy_(0, order, torch.arange(count, device=device))
    num_rows = torch.zeros(num_slots, dtype=torch.int64, device=device)
    num_rows = num_rows.index_add(0, slots, torch.ones_like(slots))
    lengths = torch.cat([num_rows.new_zeros(1), num_rows.cumsum(0)])
    firsts = positions[order][lengths[:-1].clamp(max=count - 1)] * (num_rows > 0)

    # What is no row, or no slot, goes to one behind the last, which is then left out.
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
    """The tile limits of a recorded batch: a plan computes tiles like chunks, padded to at most twice its
    rows.

    Half as many chunks as tiles fit in any case, and a single one.

    Args:
        num_rows: Of the batch.
        max_chunks: Of the plan.
        longest: Rows of the plan's longest chunk.
    """
    return TileLimits(max_chunks, min(num_rows, longest, -(-2 * num_rows // max_chunks)))


@dataclass(frozen=True, slots=True)
class PartLimits:
    """The limits of one run of a plan.

    Attributes:
        max_rows: Rows.
        max_chunks: Context chunks of several rows.
        max_ranks: Ranks of all LoRA adapters together.
    """

    max_rows: int
    max_chunks: int
    max_ranks: int


@dataclass(frozen=True, slots=True)
class BatchPart:
    """Consecutive rows of a batch that a plan takes at once.

    Attributes:
        begin: The first row.
        end: The row behind the last.
        chunks: Context chunks, or pieces of one, by these rows.
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
    """Cut a batch into parts that run one after another: of a sequence each part reads what those before wrote.

    Args:
        chunks: Of the batch.
        num_rows: Of the batch; behind the chunks', each row is a sequence of its own.
        adapters: [rows] the first page of each row's adapter, -1 for none; None: no row has one.
        adapter_ranks: How many ranks each of these adapters has.
        limits: Of a part.
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

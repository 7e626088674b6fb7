"""What a plan is told of a batch's rows: which slots they are of, where they are written, and who reads what.

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

from inflight.decoding.transfer import upload
from inflight.engine.packing import PackedChunk


@dataclass(frozen=True, slots=True)
class PlacedRows:
    """Where the rows of a batch, or of a part of one, are in the caches.

    Attributes:
        slots: [rows] int64 on the device; no slot of generation rows is there twice.
        positions: [rows] int64 on the device.
        num_read: [rows] int64 on the device: how many positions a generation row reads.
        chunks: Of these rows; they come first.
    """

    slots: Tensor
    positions: Tensor
    num_read: Tensor
    chunks: Sequence[PackedChunk]


def place_rows(slots: Tensor, positions: Tensor, chunks: Sequence[PackedChunk]) -> PlacedRows:
    """Rows that are all some sequence's."""
    return PlacedRows(slots, positions, positions + 1, chunks)


def place_filled_rows(
    slots: Tensor, positions: Tensor, null_slot: int, num_slots: int, last_position: int
) -> PlacedRows:
    """Generation rows, of which some only fill the batch up.

    A plan has no row to spare for these. Each is written to the last position of a slot that is idle in this
    batch, which nobody reads.

    Args:
        slots: [rows] int64; there are at most `num_slots` rows.
        positions: [rows] int64.
        null_slot: The slot of those that fill it up.
        num_slots: Of the plan.
        last_position: Of a slot's cache.
    """
    is_filler = slots == null_slot
    is_busy = torch.zeros(num_slots + 1, dtype=torch.int64, device=slots.device)
    is_busy.index_fill_(0, torch.where(is_filler, num_slots, slots), 1)
    idle_first = is_busy[:num_slots].argsort(stable=True)
    number = (is_filler.cumsum(0) - 1).clamp(min=0)
    return PlacedRows(
        torch.where(is_filler, idle_first[number], slots),
        torch.where(is_filler, last_position, positions),
        torch.where(is_filler, 1, positions + 1),
        (),
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
            by row.
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
    """Of at least one row. `num_slots` are the plan's."""
    slots, positions = rows.slots, rows.positions
    count, device = len(slots), slots.device
    order = slots.argsort(stable=True)
    plan_row = torch.empty_like(order).index_copy_(0, order, torch.arange(count, device=device))
    num_rows = torch.zeros(num_slots, dtype=torch.int64, device=device)
    num_rows = num_rows.index_add(0, slots, torch.ones_like(slots))
    lengths = torch.cat([num_rows.new_zeros(1), num_rows.cumsum(0)])
    firsts = positions[order][lengths[:-1].clamp(max=count - 1)] * (num_rows > 0)

    long = [chunk for chunk in rows.chunks if chunk.end - chunk.begin > 1]
    short = [chunk.begin for chunk in rows.chunks if chunk.end - chunk.begin == 1]
    generation_begin = rows.chunks[-1].end if rows.chunks else 0
    generating = torch.arange(generation_begin, count, device=device)
    widest = max((chunk.end - chunk.begin for chunk in long), default=1)
    numbers = [np.array(short, dtype=np.int64), _padded(long, widest), *_places(long, widest, num_slots)]
    numbers.append(np.array([chunk.slot for chunk in long], dtype=np.int64))
    parts = upload(np.concatenate(numbers), device).split([len(each) for each in numbers])
    of_short, padded, chunk_rows, chunk_places, chunk_slots = parts
    if short:
        generating = torch.cat([of_short, generating])
    of_slots = slots[generating]
    places = torch.zeros_like(slots).index_copy_(0, chunk_rows, chunk_places)
    places.index_copy_(0, generating, of_slots)
    return PlanRows(
        *(
            each.int()
            for each in (
                order,
                plan_row,
                firsts,
                lengths,
                firsts + num_rows,
                chunk_slots,
                plan_row[padded].view(len(long), widest),
                torch.zeros_like(num_rows).index_copy_(0, of_slots, plan_row[generating]),
                torch.ones_like(num_rows).index_copy_(0, of_slots, rows.num_read[generating]),
                places[order],
            )
        )
    )


def _padded(chunks: Sequence[PackedChunk], widest: int) -> NDArray[np.int64]:
    """[chunks * widest], the batch's rows of each."""
    rows = [np.minimum(np.arange(widest) + chunk.begin, chunk.end - 1) for chunk in chunks]
    return np.concatenate([*rows, np.empty(0, dtype=np.int64)])


def _places(
    chunks: Sequence[PackedChunk], widest: int, num_slots: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The batch's rows of all chunks, and where the attention of each is."""
    nothing = np.empty(0, dtype=np.int64)
    rows = [np.arange(chunk.begin, chunk.end) for chunk in chunks]
    places = [
        num_slots + number * widest + np.arange(chunk.end - chunk.begin)
        for number, chunk in enumerate(chunks)
    ]
    return np.concatenate([nothing, *rows]), np.concatenate([nothing, *places])


@dataclass(frozen=True, slots=True)
class PartLimits:
    """What a plan takes at once.

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

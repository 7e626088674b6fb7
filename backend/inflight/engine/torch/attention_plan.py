"""Who attends to what in one packed forward pass: made once an iteration, used by every layer.

Layers with the same window share a plan, and blocks outside of it are not read. Generation rows are cut into
groups of similar length, since the rows of a group are padded to its longest; under a window chunks are cut into
pieces, since every row of a piece is computed with all the keys that any of them sees.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from inflight.engine.torch.packing import PackedBatch, PackedChunk
from inflight.engine.torch.windows import AttentionWindow

_PIECE_ROWS = 256  # under a window, pieces of fewer rows cost more in calls than they save in keys
_SPLIT_SAVES_KEYS = 512  # reading fewer padding keys than this costs less than another group's calls


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """A context chunk or a piece of one.

    Attributes:
        begin: First row.
        end: Row after the last.
        block_ids: Blocks whose keys are attended to, in order; None: its own rows are all the keys.
        num_keys: Keys attended to, from the first block's first.
        mask: [rows, num_keys], 0 where a row sees a key and -inf elsewhere; None: causal.
    """

    begin: int
    end: int
    block_ids: Tensor | None
    num_keys: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """Generation rows of similar length.

    Attributes:
        begin: First row.
        end: Row after the last.
        block_ids: [rows * blocks], equally many for every row.
        mask: [rows, 1, 1, blocks * tokens_per_block], 0 where a row sees a key and -inf elsewhere.
    """

    begin: int
    end: int
    block_ids: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """All rows of a batch, for one window."""

    chunks: tuple[ChunkPlan, ...]
    generation: tuple[GenerationPlan, ...]


def plan_attention(
    packed: PackedBatch,
    block_tables: Tensor,
    tokens_per_block: int,
    window: AttentionWindow | None,
    dtype: torch.dtype,
) -> AttentionPlan:
    """The plan for layers with `window` (None: every token sees all before it); masks are `dtype`."""
    pieces = [piece for chunk in packed.chunks for piece in _pieces(chunk, window)]
    return AttentionPlan(
        tuple(_plan_chunk(piece, block_tables, tokens_per_block, window, dtype) for piece in pieces),
        tuple(
            _plan_generation(packed, begin, end, block_tables, tokens_per_block, window, dtype)
            for begin, end in _groups(packed)
        ),
    )


def _pieces(chunk: PackedChunk, window: AttentionWindow | None) -> Iterator[PackedChunk]:
    """All but the first read the keys of those before them from the cache, where they are by then."""
    num_rows = chunk.end - chunk.begin
    size = num_rows if window is None else max(window.size, _PIECE_ROWS)
    for first in range(0, num_rows, size):
        begin = chunk.begin + first
        yield PackedChunk(chunk.slot, begin, min(begin + size, chunk.end), chunk.start + first)


def _plan_chunk(
    chunk: PackedChunk,
    block_tables: Tensor,
    tokens_per_block: int,
    window: AttentionWindow | None,
    dtype: torch.dtype,
) -> ChunkPlan:
    num_rows = chunk.end - chunk.begin
    if chunk.start == 0 and (window is None or num_rows <= window.size):
        return ChunkPlan(chunk.begin, chunk.end, None, num_rows, None)
    length, device = chunk.start + num_rows, block_tables.device
    num_blocks = -(-length // tokens_per_block)
    num_sink_blocks, first_block, block_ids = 0, 0, None
    if chunk.start > 0:
        if window is not None:
            num_sink_blocks = min(_sink_blocks(window, tokens_per_block), num_blocks)
            first_block = max(num_sink_blocks, (chunk.start - window.recent + 1) // tokens_per_block)
        table = block_tables[chunk.slot]
        block_ids = table[first_block:num_blocks]
        if num_sink_blocks:
            block_ids = torch.cat([table[:num_sink_blocks], block_ids])
    of_sinks = torch.arange(num_sink_blocks * tokens_per_block, device=device)
    keys = torch.arange(first_block * tokens_per_block, num_blocks * tokens_per_block, device=device)
    unused = num_blocks * tokens_per_block - length  # places at the end of the last block
    keys = torch.cat([of_sinks, keys])[: len(of_sinks) + len(keys) - unused]
    hidden = _hidden(keys, torch.arange(chunk.start, length, device=device)[:, None], window)
    return ChunkPlan(chunk.begin, chunk.end, block_ids, len(keys), _mask(hidden, dtype))


def _groups(packed: PackedBatch) -> list[tuple[int, int]]:
    """Generation rows begin .. end - 1, cut where the rest is so much shorter that a group of its own pays."""
    lengths = packed.generation_lengths.tolist()
    starts = []
    longest = 0
    for index, length in enumerate(lengths):
        saved = (longest - length) * (len(lengths) - index)
        if not starts or (4 * length <= 3 * longest and saved >= _SPLIT_SAVES_KEYS):
            starts.append(index)
            longest = length
    bounds = [packed.generation_begin + index for index in (*starts, len(lengths))]
    return list(pairwise(bounds))


def _plan_generation(
    packed: PackedBatch,
    begin: int,
    end: int,
    block_tables: Tensor,
    tokens_per_block: int,
    window: AttentionWindow | None,
    dtype: torch.dtype,
) -> GenerationPlan:
    slots, positions = packed.slots[begin:end], packed.positions[begin:end, None]
    offset = packed.generation_begin
    lengths = packed.generation_lengths[begin - offset : end - offset]
    device = block_tables.device
    num_blocks = -(-int(lengths[0]) // tokens_per_block)
    if window is None:
        block_ids = block_tables[slots, :num_blocks]
        keys = torch.arange(num_blocks * tokens_per_block, device=device)
    else:
        num_sink_blocks = min(_sink_blocks(window, tokens_per_block), num_blocks)
        firsts = ((positions - window.recent + 1) // tokens_per_block).clamp_(min=num_sink_blocks)
        first_on_host = ((lengths - window.recent) // tokens_per_block).clip(min=num_sink_blocks)
        num_recent = int((-(-lengths // tokens_per_block) - first_on_host).max())
        columns = firsts + torch.arange(num_recent, device=device)
        if num_sink_blocks:
            of_sinks = torch.arange(num_sink_blocks, device=device).expand(len(slots), -1)
            columns = torch.cat([of_sinks, columns], dim=1)
        # Past the end of the table any block will do: its keys are masked.
        block_ids = block_tables[slots].gather(1, columns.clamp(max=block_tables.shape[1] - 1))
        places = torch.arange(tokens_per_block, device=device)
        keys = (columns[:, :, None] * tokens_per_block + places).flatten(1)
    mask = _mask(_hidden(keys, positions, window), dtype)
    return GenerationPlan(begin, end, block_ids.reshape(-1), mask[:, None, None, :])


def _sink_blocks(window: AttentionWindow, tokens_per_block: int) -> int:
    return -(-window.sinks // tokens_per_block)


def _hidden(keys: Tensor, positions: Tensor, window: AttentionWindow | None) -> Tensor:
    """Which keys, by their positions [n] or [rows, n], the rows at `positions` [rows, 1] do not see: [rows, n]."""
    hidden = keys > positions
    if window is not None:
        outside = keys <= positions - window.recent
        if window.sinks:
            outside &= keys >= window.sinks
        hidden |= outside
    return hidden


def _mask(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """As it is added to the scores; made here, a boolean one would be converted again in every layer."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)

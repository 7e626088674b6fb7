"""Who attends to what in one packed forward pass: made once an iteration, used by every layer.

Layers with the same sliding window share a plan. Generation rows are cut into groups of similar length, since the
rows of a group are padded to its longest.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from inflight.engine.torch.packing import PackedBatch, PackedChunk

_SPLIT_SAVES_KEYS = 512  # reading fewer padding keys than this costs less than another group's calls


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """One context chunk.

    Attributes:
        begin: First row.
        end: Row after the last.
        block_ids: Blocks whose keys are attended to, in order; None: the chunk's own rows are all the keys.
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
    """All rows of a batch, for one sliding window."""

    chunks: tuple[ChunkPlan, ...]
    generation: tuple[GenerationPlan, ...]


def plan_attention(
    packed: PackedBatch,
    block_tables: Tensor,
    tokens_per_block: int,
    window: int | None,
    dtype: torch.dtype,
) -> AttentionPlan:
    """The plan for layers with `window` (None: every token sees all before it); masks are `dtype`."""
    return AttentionPlan(
        tuple(_plan_chunk(chunk, block_tables, tokens_per_block, window, dtype) for chunk in packed.chunks),
        tuple(
            _plan_generation(packed, begin, end, block_tables, tokens_per_block, window, dtype)
            for begin, end in _groups(packed)
        ),
    )


def _plan_chunk(
    chunk: PackedChunk, block_tables: Tensor, tokens_per_block: int, window: int | None, dtype: torch.dtype
) -> ChunkPlan:
    num_rows = chunk.end - chunk.begin
    if chunk.start == 0 and (window is None or num_rows <= window):
        return ChunkPlan(chunk.begin, chunk.end, None, num_rows, None)
    length = chunk.start + num_rows
    first_seen = 0 if window is None else max(0, chunk.start - window + 1)
    first_block = 0 if chunk.start == 0 else first_seen // tokens_per_block
    first_key = first_block * tokens_per_block
    rows = torch.arange(chunk.start, length, device=block_tables.device)[:, None]
    keys = torch.arange(first_key, length, device=block_tables.device)
    hidden = keys > rows
    if window is not None:
        hidden |= keys <= rows - window
    block_ids = None
    if chunk.start > 0:
        block_ids = block_tables[chunk.slot, first_block : -(-length // tokens_per_block)]
    return ChunkPlan(chunk.begin, chunk.end, block_ids, length - first_key, _mask(hidden, dtype))


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
    window: int | None,
    dtype: torch.dtype,
) -> GenerationPlan:
    slots, positions = packed.slots[begin:end], packed.positions[begin:end, None]
    offset = packed.generation_begin
    lengths = packed.generation_lengths[begin - offset : end - offset]
    device = block_tables.device
    if window is None:
        num_blocks = -(-int(lengths[0]) // tokens_per_block)
        block_ids = block_tables[slots, :num_blocks]
        hidden = torch.arange(num_blocks * tokens_per_block, device=device) > positions
    else:
        first_blocks = (positions - window + 1).clamp_(min=0) // tokens_per_block
        first_on_host = (lengths - window).clip(min=0) // tokens_per_block
        num_blocks = int((-(-lengths // tokens_per_block) - first_on_host).max())
        columns = first_blocks + torch.arange(num_blocks, device=device)
        # Past the end of the table any block will do: its keys are masked.
        block_ids = block_tables[slots].gather(1, columns.clamp(max=block_tables.shape[1] - 1))
        keys = first_blocks * tokens_per_block + torch.arange(num_blocks * tokens_per_block, device=device)
        hidden = (keys > positions) | (keys <= positions - window)
    return GenerationPlan(begin, end, block_ids.reshape(-1), _mask(hidden, dtype)[:, None, None, :])


def _mask(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """As it is added to the scores; made here, a boolean one would be converted again in every layer."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)

"""The metadata for attention over gathered KV blocks: the blocks and masks of a batch's rows, made once per
iteration.

Layers with the same window share the metadata, and blocks outside of the window are left out. Generation rows are
divided into groups of similar length, because all rows of a group are padded to the length of the longest. The
rows of a chunk of a prompt are computed with all keys that any of them sees. With a window the chunk is therefore
cut into pieces, whose rows see fewer keys. With linear biases (ALiBi) masks contain each head's biases, and pieces
limit their memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inflight.engine.kv_cache import KvCache
from inflight.engine.packing import PackedBatch, PackedChunk
from inflight.engine.windows import AttentionWindow
from inflight.models.decoder_config import Alibi
from inflight.sampling.transfer import upload

_PIECE_ROWS = 256  # under a window, smaller pieces cost more in calls than they save in keys
_SPLIT_SAVES_KEYS = 512  # padding keys that a further group must save to be worth its calls


@dataclass(frozen=True, slots=True)
class ChunkMetadata:
    """The metadata of a context chunk or a piece of one.

    Attributes:
        begin: First row.
        end: Row after the last.
        block_ids: Blocks whose keys are attended to, in order; None: the keys are the chunk's own rows, as
            computed.
        num_keys: Number of keys attended to, counted from the first block's first token.
        mask: [rows, num_keys], or with linear biases [kv_heads, group, rows, num_keys]: 0 or a bias where a row
            sees a key, and -inf elsewhere; None: causal.
    """

    begin: int
    end: int
    block_ids: Tensor | None
    num_keys: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class GenerationMetadata:
    """The metadata of generation rows of similar length.

    Attributes:
        begin: First row.
        end: Row after the last.
        block_ids: [rows * blocks], the same number of blocks for every row.
        mask: [rows, 1, 1, blocks * tokens_per_block], or with linear biases [rows, kv_heads, group, blocks *
            tokens_per_block]: 0 or a bias where a row sees a key, and -inf elsewhere.
    """

    begin: int
    end: int
    block_ids: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class GatheringMetadata:
    """The metadata of a batch's rows, for one window."""

    chunks: tuple[ChunkMetadata, ...]
    generation: tuple[GenerationMetadata, ...]


class LinearBiases:
    """The linear biases of attention scores (ALiBi).

    Args:
        config: The slopes of this rank's heads.
        num_kv_heads: Number of this rank's key heads.
    """

    def __init__(self, config: Alibi, num_kv_heads: int) -> None:
        dtype = torch.bfloat16 if config.is_rounded else torch.float32
        self._slopes = torch.tensor(config.slopes, dtype=dtype).view(num_kv_heads, -1, 1, 1)
        self._scale = config.scale

    def between(self, positions: Tensor, keys: Tensor) -> Tensor:
        """Return the biases of scores, [kv_heads, group, rows, n] float32.

        `positions`: positions of the queries, [rows, 1]; `keys`: positions of the keys, [n] or [rows, n].
        """
        # Relative to the query's own bias, which does not change the softmax, biases of near keys are small.
        return self._at(keys) - self._at(positions)

    def _at(self, positions: Tensor) -> Tensor:
        self._slopes = self._slopes.to(positions.device)  # copied by the first iteration only
        return (self._slopes * positions).float() * self._scale


def make_metadata(
    packed: PackedBatch,
    cache: KvCache,
    window: AttentionWindow | None,
    biases: LinearBiases | None = None,
) -> GatheringMetadata:
    """Return the metadata for layers with `window`; None: every token sees all tokens before it.

    `biases`: the model's linear biases; None: it has none.
    """
    return _Preparation(packed, cache, window, biases).make()


class _Preparation:
    """Makes the metadata for layers with one window."""

    def __init__(
        self,
        packed: PackedBatch,
        cache: KvCache,
        window: AttentionWindow | None,
        biases: LinearBiases | None,
    ) -> None:
        self._packed, self._block_tables, self._window = packed, packed.block_tables, window
        self._biases = biases
        self._tokens_per_block, self._dtype = cache.tokens_per_block, cache.dtype
        # Quantized keys and values are always read from the cache, so that results do not depend on the chunks.
        self._reads_own_rows = cache.quantization is None

    def make(self) -> GatheringMetadata:
        """Return the metadata of all rows."""
        pieces = [piece for chunk in self._packed.chunks for piece in self._pieces(chunk)]
        return GatheringMetadata(
            tuple(self._chunk(piece) for piece in pieces),
            tuple(self._generation(begin, end) for begin, end in self._groups()),
        )

    def _pieces(self, chunk: PackedChunk) -> Iterator[PackedChunk]:
        """Yield the chunk or its pieces; a piece reads the keys of earlier pieces from the cache."""
        num_rows = chunk.end - chunk.begin
        size = num_rows if self._window is None else max(self._window.size, _PIECE_ROWS)
        size = size if self._biases is None else min(size, _PIECE_ROWS)
        for first in range(0, num_rows, size):
            begin = chunk.begin + first
            yield PackedChunk(chunk.slot, begin, min(begin + size, chunk.end), chunk.start + first)

    def _chunk(self, chunk: PackedChunk) -> ChunkMetadata:
        block_tables, tokens_per_block, window = self._block_tables, self._tokens_per_block, self._window
        num_rows, device = chunk.end - chunk.begin, block_tables.device
        after, ends = chunk.start + num_rows, self._ends(chunk)
        length = after if ends is None else max(after, int(ends.max()) + 1)
        positions = torch.arange(chunk.start, after, device=device)[:, None]
        last = positions if ends is None else upload(ends, device)[:, None]
        num_blocks = -(-length // tokens_per_block)
        num_sink_blocks, first_block, block_ids = 0, 0, None
        if not self._reads_own_rows:
            block_ids = block_tables[chunk.slot, :num_blocks]
        if chunk.start == 0 and length == num_rows and (window is None or num_rows <= window.size):
            mask = None
            if self._biases is not None or ends is not None:
                mask = self._mask(positions[:, 0], positions, last)
            return ChunkMetadata(chunk.begin, chunk.end, block_ids, num_rows, mask)
        if chunk.start > 0 or length > num_rows:
            if window is not None:
                num_sink_blocks = min(_sink_blocks(window, tokens_per_block), num_blocks)
                first_block = max(num_sink_blocks, (chunk.start - window.recent + 1) // tokens_per_block)
            table = block_tables[chunk.slot]
            block_ids = table[first_block:num_blocks]
            if num_sink_blocks:
                block_ids = torch.cat([table[:num_sink_blocks], block_ids])
        of_sinks = torch.arange(num_sink_blocks * tokens_per_block, device=device)
        keys = torch.arange(first_block * tokens_per_block, num_blocks * tokens_per_block, device=device)
        unused = num_blocks * tokens_per_block - length  # unused places at the end of the last block
        keys = torch.cat([of_sinks, keys])[: len(of_sinks) + len(keys) - unused]
        mask = self._mask(keys, positions, last)
        return ChunkMetadata(chunk.begin, chunk.end, block_ids, len(keys), mask)

    def _ends(self, chunk: PackedChunk) -> NDArray[np.int64] | None:
        """Return the last position that each row of a chunk sees; None: its own."""
        if self._packed.ends is None or self._window is None or not self._window.is_bidirectional:
            return None
        ends = self._packed.ends[chunk.begin : chunk.end]
        has_later = (ends > np.arange(chunk.start, chunk.start + len(ends))).any()
        return ends if has_later else None

    def _groups(self) -> list[tuple[int, int]]:
        """Divide generation rows into groups (begin, end).

        Rows are divided further only as long as that saves enough padding.
        """
        lengths = self._packed.generation_lengths.tolist()
        starts: list[int] = []
        longest = 0
        for index, length in enumerate(lengths):
            saved = (longest - length) * (len(lengths) - index)
            if not starts or (4 * length <= 3 * longest and saved >= _SPLIT_SAVES_KEYS):
                starts.append(index)
                longest = length
        bounds = [self._packed.generation_begin + index for index in (*starts, len(lengths))]
        return list(pairwise(bounds))

    def _generation(self, begin: int, end: int) -> GenerationMetadata:
        packed, block_tables = self._packed, self._block_tables
        tokens_per_block, window = self._tokens_per_block, self._window
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
            # Columns past the end of the table may read any block, as its keys are masked.
            block_ids = block_tables[slots].gather(1, columns.clamp(max=block_tables.shape[1] - 1))
            places = torch.arange(tokens_per_block, device=device)
            keys = (columns[:, :, None] * tokens_per_block + places).flatten(1)
        mask = self._mask(keys, positions, positions)
        mask = mask[:, None, None, :] if self._biases is None else mask.permute(2, 0, 1, 3)
        return GenerationMetadata(begin, end, block_ids.reshape(-1), mask)

    def _mask(self, keys: Tensor, positions: Tensor, ends: Tensor) -> Tensor:
        """Return the mask to add to scores, [rows, n], or with biases [kv_heads, group, rows, n].

        A boolean mask would be converted in every layer. Arguments are those of `_hidden`.
        """
        hidden = _hidden(keys, positions, ends, self._window)
        if self._biases is None:
            mask = torch.zeros(hidden.shape, dtype=self._dtype, device=hidden.device)
        else:
            mask = self._biases.between(positions, keys).to(self._dtype)
        return mask.masked_fill_(hidden, -torch.inf)


def _sink_blocks(window: AttentionWindow, tokens_per_block: int) -> int:
    return -(-window.sinks // tokens_per_block)


def _hidden(keys: Tensor, positions: Tensor, ends: Tensor, window: AttentionWindow | None) -> Tensor:
    """Return a mask [rows, n], True where a row does not see a key.

    Args:
        keys: Positions of the keys, [n] or [rows, n].
        positions: Positions of the rows, [rows, 1].
        ends: The last position that each row sees, [rows, 1].
        window: The window.
    """
    hidden = keys > ends
    if window is not None:
        first = positions - window.recent + 1
        if window.is_chunk:
            first = positions - positions % window.recent
        outside = keys < first.clamp(min=window.begin)
        if window.sinks:
            outside &= keys >= window.sinks
        hidden |= outside
    return hidden

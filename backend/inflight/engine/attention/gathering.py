"""Attention over gathered KV blocks: the blocks are copied into one piece, then attended to.

It runs everywhere. `GATHERING` uses torch's scaled dot product attention, `BY_PRODUCTS` plain matrix products.

Layers with the same window share a plan, and gathering leaves out blocks outside of the window. Generation rows
are divided into groups of similar length, as the rows of a group are padded to its longest. Under a window, chunks
are cut into pieces, as every row of a piece is computed with all keys that any of its rows sees.

A key head is never copied for the query heads that share it. In a context chunk it is broadcast over these query
heads; in generation they are passed as the rows of one head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.engine.kv_cache import KvCache
from inflight.engine.packing import PackedBatch, PackedChunk
from inflight.engine.windows import AttentionWindow
from inflight.models import DecoderConfig

_PIECE_ROWS = 256  # under a window, smaller pieces cost more in calls than they save in keys
_SPLIT_SAVES_KEYS = 512  # saving fewer padding keys than this costs less than another group's calls
_TILE_ROWS = 16  # divides the number of rows of every kernel's tiles
_MOST_SCORES = 1 << 26  # 256 MiB in float32


Kernel = Callable[..., Tensor]
"""Attention over contiguous keys and values; see `GatheringAttention` for its arguments."""


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """The plan of a context chunk or a piece of one.

    Attributes:
        begin: First row.
        end: Row after the last.
        block_ids: Blocks whose keys are attended to, in order; None: the keys are the chunk's own rows, unrounded.
        num_keys: Number of keys attended to, counted from the first block's first token.
        mask: [rows, num_keys], 0 where a row sees a key and -inf elsewhere; None: causal.
    """

    begin: int
    end: int
    block_ids: Tensor | None
    num_keys: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """The plan of generation rows of similar length.

    Attributes:
        begin: First row.
        end: Row after the last.
        block_ids: [rows * blocks], the same number of blocks for every row.
        mask: [rows, 1, 1, blocks * tokens_per_block], 0 where a row sees a key and -inf elsewhere.
    """

    begin: int
    end: int
    block_ids: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The plan of a batch's rows, for one window."""

    chunks: tuple[ChunkPlan, ...]
    generation: tuple[GenerationPlan, ...]


class GatheringAttention:
    """Copies the blocks to read into one piece, and attends to the copy.

    Args:
        kernel: `torch.nn.functional.scaled_dot_product_attention`, or an equivalent. It takes queries [entries,
            heads, rows, head_dim], keys and values [entries, heads, keys, head_dim], `scale`, the factor of the
            scores (None: head_dim ** -0.5), and either `attn_mask`, which is added to the scores and broadcast to
            [entries, heads, rows, keys], or `is_causal`: row i reads the keys up to i. For a model with learned
            sinks it also takes `sinks`, an additional score of each row without key or value, broadcast to
            [entries, heads, rows]. It returns the output of every query, in the queries' shape.
    """

    has_fixed_shapes = False
    takes_fixed_rows = False
    name = "over gathered KV blocks"

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def plan(
        self, packed: PackedBatch, cache: KvCache, windows: Sequence[AttentionWindow | None]
    ) -> Mapping[AttentionWindow | None, AttentionPlan]:
        return {window: _Planner(packed, cache, window).plan() for window in windows}

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        layer: int,
        plan: AttentionPlan,
        cache: KvCache,
        sinks: Tensor | None = None,
    ) -> Tensor:
        num_rows, num_heads, head_dim = queries.shape
        num_kv_heads = keys.shape[1]
        queries = queries.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
        read = torch.empty_like(queries)
        by_group = None if sinks is None else sinks.view(queries.shape[1:3])
        for chunk in plan.chunks:
            self._attend_chunk(read, queries, keys, values, layer, chunk, cache, by_group)
        for group in plan.generation:
            self._attend_generation(read, queries, layer, group, cache, by_group)
        return read.view(num_rows, num_heads * head_dim)

    def _attend_chunk(
        self,
        read: Tensor,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        layer: int,
        chunk: ChunkPlan,
        cache: KvCache,
        sinks: Tensor | None,
    ) -> None:
        """Compute a chunk's rows together; for some numbers of rows the last one separately, like a generation
        row.

        With a mask and a key head broadcast by a stride of 0, torch's memory-efficient CUDA kernel computes a last
        tile of a single row wrongly: it takes heads for rows, and reads their masks out of bounds (torch 2.11 and
        2.13). Its tiles have 32, 64 or 128 rows.
        """
        rows = slice(chunk.begin, chunk.end)
        if chunk.block_ids is None:
            keys, values = keys[rows], values[rows]
        else:
            keys, values = cache.gather(layer, chunk.block_ids)
            keys, values = keys[: chunk.num_keys], values[: chunk.num_keys]
        keys, values = keys.transpose(0, 1), values.transpose(0, 1)  # [kv_heads, keys, head_dim]
        if chunk.mask is not None and (chunk.end - chunk.begin) % _TILE_ROWS == 1:
            last = slice(chunk.end - 1, chunk.end)
            read[last] = self._kernel(
                queries[last], keys[None], values[None], attn_mask=chunk.mask[-1:], **_given(sinks)
            )
            rows = slice(chunk.begin, chunk.end - 1)
        num_rows = rows.stop - rows.start
        if num_rows == 0:
            return
        by_head = queries[rows].permute(1, 2, 0, 3)  # [kv_heads, group, rows, head_dim]
        shape = (*by_head.shape[:2], *keys.shape[1:])
        result = self._kernel(
            by_head,
            keys.unsqueeze(1).expand(shape),
            values.unsqueeze(1).expand(shape),
            attn_mask=None if chunk.mask is None else chunk.mask[:num_rows],
            is_causal=chunk.mask is None,
            **_given(None if sinks is None else sinks[:, :, None]),
        )
        read[rows] = result.permute(2, 0, 1, 3)

    def _attend_generation(
        self,
        read: Tensor,
        queries: Tensor,
        layer: int,
        group: GenerationPlan,
        cache: KvCache,
        sinks: Tensor | None,
    ) -> None:
        rows = slice(group.begin, group.end)
        keys, values = cache.gather(layer, group.block_ids)
        shape = (group.end - group.begin, group.mask.shape[-1], *keys.shape[1:])
        read[rows] = self._kernel(
            # [rows, kv_heads, group, head_dim]: a group's heads take the place of query positions
            queries[rows],
            keys.view(shape).transpose(1, 2),
            values.view(shape).transpose(1, 2),
            attn_mask=group.mask,
            **_given(sinks),
        )


def _given(sinks: Tensor | None) -> dict[str, Tensor]:
    """Return the keyword arguments for learned sinks; empty without them, as such a kernel has no parameter for
    them."""
    return {} if sinks is None else {"sinks": sinks}


def share_of_keys(log_sums: Tensor, sinks: Tensor) -> Tensor:
    """Return the share of the softmax that learned sinks leave to the keys; `log_sums` are the keys' log-sum-exps.

    Attention's results are multiplied by it. With s the sum of exponentials, it is s / (s + exp(sink)).
    """
    return torch.sigmoid(log_sums - sinks.float())


def cpu_attention_with_sinks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    sinks: Tensor,
) -> Tensor:
    """A `Kernel`: torch's scaled dot product attention for CPUs, which can return its softmaxes' log-sum-exps.

    Raises NotImplementedError on other devices, whose kernels do not return them in the same way.
    """
    if query.device.type != "cpu":
        raise NotImplementedError("torch's kernel on this device cannot add learned sinks")
    read, log_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, is_causal=is_causal, attn_mask=attn_mask, scale=scale
    )
    return (read * share_of_keys(log_sums, sinks)[..., None]).to(query.dtype)


def by_products(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """A `Kernel` of matrix products in float32, with which other kernels are compared.

    With `soft_cap`, scores become cap * tanh(score / cap) before the mask. Entries are processed a few at a time,
    as the scores of all of them may not fit into memory.
    """
    num_entries, num_heads, num_rows, head_dim = query.shape
    num_keys = key.shape[2]
    if attn_mask is None:
        attn_mask = torch.full((num_rows, num_keys), -torch.inf, device=query.device).triu_(1)
    masks = attn_mask.expand(num_entries, num_heads, num_rows, num_keys)
    ends = masks[..., :0] if sinks is None else sinks.expand(masks.shape[:3])[..., None]
    size = max(1, _MOST_SCORES // (num_heads * num_rows * num_keys))
    parts: list[Tensor] = []
    for part in zip(*(torch.split(tensor, size) for tensor in (query, key, value, masks, ends)), strict=True):
        queries, keys, values, mask, end = (tensor.float() for tensor in part)
        scores = (queries * (head_dim**-0.5 if scale is None else scale)) @ keys.transpose(-1, -2)
        if soft_cap is not None:
            scores = torch.tanh(scores / soft_cap) * soft_cap
        scores = scores + mask
        if sinks is not None:
            scores = torch.cat([scores, end], dim=-1)
        parts.append((scores.softmax(dim=-1)[..., :num_keys] @ values).to(query.dtype))
    return torch.cat(parts)


GATHERING = GatheringAttention(F.scaled_dot_product_attention)
BY_PRODUCTS = GatheringAttention(by_products)


def gathering(decoder: DecoderConfig) -> GatheringAttention:
    """Return `GATHERING` for this model's scores; capped scores are computed by products, as torch's kernel has no
    cap.

    With learned sinks it works on CPUs only: elsewhere the check of attention refuses it, and products are used.
    """
    if decoder.attention_soft_cap is not None:
        return by_plain_products(decoder)
    kernel = cpu_attention_with_sinks if decoder.learned_sinks else F.scaled_dot_product_attention
    if decoder.attention_scale is None and not decoder.learned_sinks:
        return GATHERING
    return GatheringAttention(partial(kernel, scale=decoder.attention_scale))


def by_plain_products(decoder: DecoderConfig) -> GatheringAttention:
    """Return `BY_PRODUCTS` for this model's scores."""
    scale, soft_cap = decoder.attention_scale, decoder.attention_soft_cap
    if scale is None and soft_cap is None:
        return BY_PRODUCTS
    return GatheringAttention(partial(by_products, scale=scale, soft_cap=soft_cap))


class _Planner:
    """Makes the plan for layers with `window` (None: every token sees all tokens before it)."""

    def __init__(self, packed: PackedBatch, cache: KvCache, window: AttentionWindow | None) -> None:
        self._packed, self._block_tables, self._window = packed, packed.block_tables, window
        self._tokens_per_block, self._dtype = cache.tokens_per_block, cache.dtype
        # Rounded keys and values are always read from the cache, so that results do not depend on the chunks.
        self._reads_own_rows = cache.rounding is None

    def plan(self) -> AttentionPlan:
        """Return the plan of all rows."""
        pieces = [piece for chunk in self._packed.chunks for piece in self._pieces(chunk)]
        return AttentionPlan(
            tuple(self._plan_chunk(piece) for piece in pieces),
            tuple(self._plan_generation(begin, end) for begin, end in self._groups()),
        )

    def _pieces(self, chunk: PackedChunk) -> Iterator[PackedChunk]:
        """Yield the chunk or its pieces; a piece reads the keys of earlier pieces from the cache."""
        num_rows = chunk.end - chunk.begin
        size = num_rows if self._window is None else max(self._window.size, _PIECE_ROWS)
        for first in range(0, num_rows, size):
            begin = chunk.begin + first
            yield PackedChunk(chunk.slot, begin, min(begin + size, chunk.end), chunk.start + first)

    def _plan_chunk(self, chunk: PackedChunk) -> ChunkPlan:
        block_tables, tokens_per_block, window = self._block_tables, self._tokens_per_block, self._window
        num_rows = chunk.end - chunk.begin
        length, device = chunk.start + num_rows, block_tables.device
        num_blocks = -(-length // tokens_per_block)
        num_sink_blocks, first_block, block_ids = 0, 0, None
        if not self._reads_own_rows:
            block_ids = block_tables[chunk.slot, :num_blocks]
        if chunk.start == 0 and (window is None or num_rows <= window.size):
            return ChunkPlan(chunk.begin, chunk.end, block_ids, num_rows, None)
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
        unused = num_blocks * tokens_per_block - length  # unused places at the end of the last block
        keys = torch.cat([of_sinks, keys])[: len(of_sinks) + len(keys) - unused]
        hidden = _hidden(keys, torch.arange(chunk.start, length, device=device)[:, None], window)
        return ChunkPlan(chunk.begin, chunk.end, block_ids, len(keys), _mask(hidden, self._dtype))

    def _groups(self) -> list[tuple[int, int]]:
        """Divide generation rows into groups (begin, end), where a group of shorter rows saves enough padding."""
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

    def _plan_generation(self, begin: int, end: int) -> GenerationPlan:
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
            # Past the end of the table any block will do, as its keys are masked.
            block_ids = block_tables[slots].gather(1, columns.clamp(max=block_tables.shape[1] - 1))
            places = torch.arange(tokens_per_block, device=device)
            keys = (columns[:, :, None] * tokens_per_block + places).flatten(1)
        mask = _mask(_hidden(keys, positions, window), self._dtype)
        return GenerationPlan(begin, end, block_ids.reshape(-1), mask[:, None, None, :])


def _sink_blocks(window: AttentionWindow, tokens_per_block: int) -> int:
    return -(-window.sinks // tokens_per_block)


def _hidden(keys: Tensor, positions: Tensor, window: AttentionWindow | None) -> Tensor:
    """Return a mask [rows, n] of the keys that rows do not see, by positions of keys, [n] or [rows, n], and of
    rows, [rows, 1]."""
    hidden = keys > positions
    if window is not None:
        first = positions - window.recent + 1
        if window.is_chunk:
            first = positions - positions % window.recent
        outside = keys < first
        if window.sinks:
            outside &= keys >= window.sinks
        hidden |= outside
    return hidden


def _mask(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask in the form that is added to scores; a boolean one would be converted in every layer."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)

"""Attention of packed rows over the paged KV cache, one layer at a time.

What makes a plan once an iteration and computes a layer by it is an `Attention`. The one here runs everywhere: it
gathers the blocks that are read. `paged_attention.py` has one that reads them in place, for GPUs.

Query heads that share a key head are never given copies of it: in a context chunk they are one batch entry's heads
over a broadcast key head, in generation they stand where a sequence's rows would.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.engine.torch.attention_plan import AttentionPlan, ChunkPlan, GenerationPlan, plan_attention
from inflight.engine.torch.kv_cache import KvCache
from inflight.engine.torch.packing import PackedBatch
from inflight.engine.torch.windows import AttentionWindow


class Attention(Protocol):
    """How rows read keys and values.

    Attributes:
        has_fixed_shapes: Whether plans and results of generation batches follow from the number of rows alone, and
            nothing is asked of the host.
    """

    has_fixed_shapes: bool

    def plan(
        self,
        packed: PackedBatch,
        block_tables: Tensor,
        tokens_per_block: int,
        windows: Sequence[AttentionWindow | None],
        dtype: torch.dtype,
    ) -> Mapping[AttentionWindow | None, Any]:
        """What `attend` takes, for the layers of each window (None: every token sees all before it)."""

    def attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, layer: int, plan: Any, cache: KvCache
    ) -> Tensor:
        """What every row has read.

        Args:
            queries: [rows, heads, head_dim].
            keys: [rows, kv_heads, head_dim], in the cache already.
            values: [rows, kv_heads, head_dim], in the cache already.
            layer: Which layer's cache to read.
            plan: For this layer's window.
            cache: Where earlier tokens' keys and values are.

        Returns:
            [rows, heads * head_dim].
        """


class GatheringAttention:
    """Puts the blocks that are read one after another, and reads those."""

    has_fixed_shapes = False

    def plan(
        self,
        packed: PackedBatch,
        block_tables: Tensor,
        tokens_per_block: int,
        windows: Sequence[AttentionWindow | None],
        dtype: torch.dtype,
    ) -> Mapping[AttentionWindow | None, AttentionPlan]:
        """As `Attention.plan`; masks are `dtype`."""
        return {
            window: plan_attention(packed, block_tables, tokens_per_block, window, dtype)
            for window in windows
        }

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        layer: int,
        plan: AttentionPlan,
        cache: KvCache,
    ) -> Tensor:
        """As `Attention.attend`."""
        return _attend(queries, keys, values, layer, plan, cache)


GATHERING = GatheringAttention()


def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, layer: int, plan: AttentionPlan, cache: KvCache
) -> Tensor:
    num_rows, num_heads, head_dim = queries.shape
    num_kv_heads = keys.shape[1]
    queries = queries.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    read = torch.empty_like(queries)
    for chunk in plan.chunks:
        _attend_chunk(read, queries, keys, values, layer, chunk, cache)
    for group in plan.generation:
        _attend_generation(read, queries, layer, group, cache)
    return read.view(num_rows, num_heads * head_dim)


def _attend_chunk(
    read: Tensor, queries: Tensor, keys: Tensor, values: Tensor, layer: int, chunk: ChunkPlan, cache: KvCache
) -> None:
    rows = slice(chunk.begin, chunk.end)
    if chunk.block_ids is None:
        keys, values = keys[rows], values[rows]
    else:
        keys, values = cache.gather(layer, chunk.block_ids)
        keys, values = keys[: chunk.num_keys], values[: chunk.num_keys]
    by_head = queries[rows].permute(1, 2, 0, 3)  # [kv_heads, group, rows, head_dim]
    shape = (*by_head.shape[:2], chunk.num_keys, by_head.shape[3])
    result = F.scaled_dot_product_attention(
        by_head,
        keys.transpose(0, 1).unsqueeze(1).expand(shape),
        values.transpose(0, 1).unsqueeze(1).expand(shape),
        attn_mask=chunk.mask,
        is_causal=chunk.mask is None,
    )
    read[rows] = result.permute(2, 0, 1, 3)


def _attend_generation(
    read: Tensor, queries: Tensor, layer: int, group: GenerationPlan, cache: KvCache
) -> None:
    rows = slice(group.begin, group.end)
    keys, values = cache.gather(layer, group.block_ids)
    shape = (group.end - group.begin, group.mask.shape[-1], *keys.shape[1:])
    read[rows] = F.scaled_dot_product_attention(
        queries[rows],  # [rows, kv_heads, group, head_dim]: a group's heads in the place of query positions
        keys.view(shape).transpose(1, 2),
        values.view(shape).transpose(1, 2),
        attn_mask=group.mask,
    )

"""Attention of packed rows over the paged KV cache, one layer at a time.

Query heads that share a key head are never given copies of it: in a context chunk they are one batch entry's heads
over a broadcast key head, in generation they stand where a sequence's rows would.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.engine.torch.attention_plan import AttentionPlan, ChunkPlan, GenerationPlan
from inflight.engine.torch.kv_cache import KvCache


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, layer: int, plan: AttentionPlan, cache: KvCache
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

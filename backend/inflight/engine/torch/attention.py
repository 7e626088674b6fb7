"""Attention of packed rows over the paged KV cache, one layer at a time.

What makes a plan once an iteration and computes a layer by it is an `Attention`. The two here run everywhere: they
gather the blocks that are read, and differ in the kernel. `paged_attention.py` has one for GPUs that reads blocks
in place.

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

_TILE_ROWS = 16  # divides the rows of every kernel's tiles
_MOST_SCORES = 1 << 26  # 256 MiB of them in float32


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


class Kernel(Protocol):
    """`torch.nn.functional.scaled_dot_product_attention`, as far as it is used here."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        *,
        is_causal: bool = False,
    ) -> Tensor:
        """What every query has read, [entries, heads, rows, head_dim].

        Args:
            query: [entries, heads, rows, head_dim].
            key: [entries, heads, keys, head_dim].
            value: As `key`.
            attn_mask: Added to the scores, [entries, heads, rows, keys] or what broadcasts to that.
            is_causal: True if and only if there is no mask: row i reads the keys up to i.
        """


class GatheringAttention:
    """Puts the blocks that are read one after another, and reads those.

    Args:
        kernel: What computes it.
    """

    has_fixed_shapes = False

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

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
        num_rows, num_heads, head_dim = queries.shape
        num_kv_heads = keys.shape[1]
        queries = queries.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
        read = torch.empty_like(queries)
        for chunk in plan.chunks:
            _attend_chunk(self._kernel, read, queries, keys, values, layer, chunk, cache)
        for group in plan.generation:
            _attend_generation(self._kernel, read, queries, layer, group, cache)
        return read.view(num_rows, num_heads * head_dim)


def by_products(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *, is_causal: bool = False
) -> Tensor:
    """As `Kernel`, in float32 by nothing but matrix products: what other kernels are compared with.

    Entries are taken a few at a time, since the scores of all of them may be more than there is memory for.
    """
    num_entries, num_heads, num_rows, head_dim = query.shape
    num_keys = key.shape[2]
    if attn_mask is None:
        attn_mask = torch.full((num_rows, num_keys), -torch.inf, device=query.device).triu_(1)
    masks = attn_mask.expand(num_entries, num_heads, num_rows, num_keys)
    size = max(1, _MOST_SCORES // (num_heads * num_rows * num_keys))
    parts = []
    for part in zip(*(tensor.split(size) for tensor in (query, key, value, masks)), strict=True):
        queries, keys, values, mask = (tensor.float() for tensor in part)
        scores = (queries * head_dim**-0.5) @ keys.transpose(-1, -2) + mask
        parts.append((scores.softmax(dim=-1) @ values).to(query.dtype))
    return torch.cat(parts)


GATHERING = GatheringAttention(F.scaled_dot_product_attention)
BY_PRODUCTS = GatheringAttention(by_products)


def _attend_chunk(
    kernel: Kernel,
    read: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    layer: int,
    chunk: ChunkPlan,
    cache: KvCache,
) -> None:
    """Rows of one sequence, all together; of some numbers the last one as generation rows are.

    Under a mask, and with a key head that is broadcast by a stride of 0, torch's memory-efficient kernel for CUDA
    computes a last tile of a single row wrongly: it puts the heads in the place of rows, and reads their masks
    where there are none (torch 2.11 and 2.13). Its tiles are of 32, 64 or 128 rows.
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
        read[last] = kernel(queries[last], keys[None], values[None], attn_mask=chunk.mask[-1:])
        rows = slice(chunk.begin, chunk.end - 1)
    num_rows = rows.stop - rows.start
    if num_rows == 0:
        return
    by_head = queries[rows].permute(1, 2, 0, 3)  # [kv_heads, group, rows, head_dim]
    shape = (*by_head.shape[:2], *keys.shape[1:])
    result = kernel(
        by_head,
        keys.unsqueeze(1).expand(shape),
        values.unsqueeze(1).expand(shape),
        attn_mask=None if chunk.mask is None else chunk.mask[:num_rows],
        is_causal=chunk.mask is None,
    )
    read[rows] = result.permute(2, 0, 1, 3)


def _attend_generation(
    kernel: Kernel, read: Tensor, queries: Tensor, layer: int, group: GenerationPlan, cache: KvCache
) -> None:
    rows = slice(group.begin, group.end)
    keys, values = cache.gather(layer, group.block_ids)
    shape = (group.end - group.begin, group.mask.shape[-1], *keys.shape[1:])
    read[rows] = kernel(
        queries[rows],  # [rows, kv_heads, group, head_dim]: a group's heads in the place of query positions
        keys.view(shape).transpose(1, 2),
        values.view(shape).transpose(1, 2),
        attn_mask=group.mask,
    )

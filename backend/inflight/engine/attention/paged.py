"""Attention that reads KV blocks in place: one call per layer for context chunks and generation rows.

The kernel is an argument; `find.py` finds torch's. Its tensor arguments are made on the device from the packed
rows, and its other arguments do not depend on the lengths of sequences, so generation batches can be recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from inflight.engine.attention.gathering import share_of_keys
from inflight.engine.kv_cache import KvCache
from inflight.engine.packing import PackedBatch
from inflight.engine.windows import AttentionWindow

VarlenAttention = Callable[..., Any]
"""A function that computes attention over KV blocks in place; arguments as in `PagedAttention`."""


@dataclass(frozen=True, slots=True)
class PagedMetadata:
    """The metadata of a batch's rows, for one window: the kernel's tensors and bounds."""

    row_bounds: Tensor
    key_bounds: Tensor | None
    lengths: Tensor
    block_table: Tensor
    max_rows: int
    max_keys: int
    window_size: tuple[int, int]


class PagedAttention:
    """An `Attention` by a kernel that takes block tables.

    Args:
        varlen: `torch.nn.attention.varlen.varlen_attn`, or an equivalent. It takes, in this order,

            query         [rows, heads, head_dim]
            key, value    [blocks, tokens_per_block, kv_heads, head_dim]
            cu_seq_q      [sequences + 1] int32, index of each sequence's first query
            cu_seq_k      [sequences + 1] int32, index of its first key, as if keys were contiguous; None for
                          kernels that would take them to be contiguous
            max_q, max_k  upper bounds of the queries, and keys, of a sequence

            and as keyword arguments

            window_size   number of keys before and after its own that a query sees, -1: all; its own is as far
                          from the last key as the query is from the last query
            enable_gqa    whether there may be fewer key heads than query heads
            seqused_k     [sequences] int32, number of keys of each sequence
            block_table   [sequences, blocks of the longest sequence] int32
            num_splits    number of parts into which a sequence's keys are divided

            and returns the output of every query, [rows, heads, head_dim]; in a model with learned sinks, a
            pair of the output and the logarithms of the softmaxes' sums, [heads, rows] float32.
        takes_key_bounds: Whether the kernel gets `cu_seq_k`.
    """

    has_fixed_shapes = True
    takes_fixed_rows = False

    def __init__(self, varlen: VarlenAttention, takes_key_bounds: bool) -> None:
        self._varlen = varlen
        self._takes_key_bounds = takes_key_bounds
        self.name = "FlashAttention 2" if takes_key_bounds else "FlashAttention 3"

    def prepare(
        self, packed: PackedBatch, cache: KvCache, windows: Sequence[AttentionWindow | None]
    ) -> Mapping[AttentionWindow | None, PagedMetadata]:
        """Raises ValueError for windows with sinks and for chunked or bidirectional attention, which the kernel
        does not support."""
        last_rows = packed.bounds[1:] - 1
        lengths = (packed.positions[last_rows] + 1).int()
        key_bounds = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)) if self._takes_key_bounds else None
        row_bounds = packed.bounds.int()
        block_table = packed.block_tables[packed.slots[last_rows]].int()
        max_rows = max((chunk.end - chunk.begin for chunk in packed.chunks), default=1)
        max_keys = packed.block_tables.shape[1] * cache.tokens_per_block
        return {
            window: PagedMetadata(
                row_bounds,
                key_bounds,
                lengths,
                block_table,
                max_rows,
                max_keys,
                _window_size(window, max_rows),
            )
            for window in windows
        }

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        layer: int,
        metadata: PagedMetadata,
        cache: KvCache,
        sinks: Tensor | None = None,
    ) -> Tensor:
        key_pages, value_pages = cache.pages(layer)
        read = self._varlen(
            queries,
            key_pages,
            value_pages,
            metadata.row_bounds,
            metadata.key_bounds,
            metadata.max_rows,
            metadata.max_keys,
            window_size=metadata.window_size,
            enable_gqa=True,
            seqused_k=metadata.lengths,
            block_table=metadata.block_table,
            num_splits=1,  # sums over keys must not depend on the rest of the batch
        )
        if sinks is not None:
            values_read, log_sums = read
            read = (values_read * share_of_keys(log_sums.T, sinks)[..., None]).to(queries.dtype)
        return read.flatten(1)


def _window_size(window: AttentionWindow | None, max_rows: int) -> tuple[int, int]:
    if window is not None:
        if window.sinks:
            raise ValueError("it has no windows with sinks")
        if window.is_chunk:
            raise ValueError("it has no chunked attention")
        if window.is_bidirectional:
            raise ValueError("it has no bidirectional attention")
        return window.recent - 1, 0
    # A single row is the last token, so no key comes after it and -1 is right too. With 0, FlashAttention 2 would
    # read a key head once per query head.
    return (-1, 0) if max_rows > 1 else (-1, -1)

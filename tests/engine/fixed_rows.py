"""Attention by `FixedRows` for recorded batches with chunks, on any device, unoptimized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from inflight.engine.kv_cache import KvCache
from inflight.engine.packing import FixedRows, PackedBatch, cut_into_tiles
from inflight.engine.windows import AttentionWindow

Metadata = tuple[Tensor, Tensor, Tensor, Tensor, AttentionWindow | None]


class FixedRowsAttention:
    """Uses tensor operations only, so that it can be recorded.

    Rows that belong neither to a chunk nor to generation get NaN.

    Attributes:
        num_rows: Number of rows of every prepared batch.
    """

    has_fixed_shapes = takes_fixed_rows = True
    name = "by fixed rows"

    def __init__(self) -> None:
        self.num_rows: list[int] = []

    def prepare(
        self, packed: PackedBatch, cache: KvCache, windows: Sequence[AttentionWindow | None]
    ) -> Mapping[AttentionWindow | None, Metadata]:
        rows = torch.arange(len(packed.positions), device=packed.positions.device)
        self.num_rows.append(len(rows))
        fixed = packed.fixed
        if fixed is None:
            tiles = torch.tensor(cut_into_tiles(packed.chunks), dtype=torch.int64).reshape(-1, 4)
            fixed = FixedRows(tiles.to(rows.device), rows[packed.generation_begin :])
        first, end, slots, starts = fixed.tiles.unbind(1)
        inside = (rows[:, None] >= first) & (rows[:, None] < end)
        generates = (rows[:, None] == fixed.generation_rows).any(1)
        positions = ((starts + rows[:, None] - first) * inside).sum(1) + packed.positions * generates
        slots = (slots * inside).sum(1) + packed.slots * generates
        tables = packed.block_tables[slots]
        return {window: (tables, positions, inside.any(1), generates, window) for window in windows}

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        layer: int,
        metadata: Metadata,
        cache: KvCache,
        sinks: Any = None,
    ) -> Tensor:
        tables, positions, in_chunk, generates, window = metadata
        _, heads, head_dim = queries.shape
        pages = cache.pages(layer)
        if cache.quantization is not None:
            levels = zip(pages, cache.scales(layer) or (), strict=True)
            pages = [
                cache.quantization.restore(page, scales.view(page.shape[:3]), cache.dtype)
                for page, scales in levels
            ]
        read, written = (
            page[tables].flatten(1, 2).repeat_interleave(heads // page.shape[2], dim=2, output_size=heads)
            for page in pages
        )
        places = torch.arange(read.shape[1], device=queries.device)
        visible = places <= positions[:, None]
        if window is not None:
            visible = visible & ((places > positions[:, None] - window.recent) | (places < window.sinks))
        scores = torch.einsum("rhd,rkhd->rhk", queries, read) * head_dim**-0.5
        weights = scores.masked_fill(~visible[:, None], -torch.inf).softmax(-1)
        written = written.masked_fill(~visible[:, :, None, None], 0)
        found = torch.einsum("rhk,rkhd->rhd", weights, written)
        used = in_chunk | generates
        return found.masked_fill(~used[:, None, None], torch.nan).flatten(1)

"""`Attention` by kernels in Triton's language: for blocks of any size, and for batches that can be recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from inflight.engine.attention.check import CannotAttend
from inflight.engine.attention.paged import PagedAttention, PagedMetadata
from inflight.engine.cuda.kernels.attention import (
    MAX_HEAD_DIM,
    attend_chunks,
    attend_generation,
)
from inflight.engine.kv_cache import KvCache
from inflight.engine.packing import FixedRows, PackedBatch, cut_into_tiles
from inflight.engine.windows import AttentionWindow
from inflight.models import DecoderConfig
from inflight.sampling.transfer import upload


@dataclass(frozen=True, slots=True)
class KernelMetadata:
    """The metadata of a batch's rows for one window: the kernels' arguments besides queries, keys and values.

    If `chunks` is set, another attention computes the rows before `generation_begin`, with `chunks` as metadata.
    """

    tables: Tensor
    rows: FixedRows
    slots: Tensor
    positions: Tensor
    window: AttentionWindow | None
    generation_begin: int = 0
    chunks: PagedMetadata | None = None


class KernelAttention:
    """An `Attention` with one kernel call for all context chunks, and two for generation rows.

    Args:
        decoder: The decoder, as this rank computes it.
        for_chunks: Torch's attention, for the context chunks of batches without `FixedRows`: its kernel is written
            for the processor that it runs on. None: the kernel in Triton's language computes all chunks.

    Raises:
        CannotAttend: The heads are too wide.
    """

    has_fixed_shapes = True
    takes_fixed_rows = True

    def __init__(self, decoder: DecoderConfig, for_chunks: PagedAttention | None = None) -> None:
        if decoder.head_dim > MAX_HEAD_DIM:
            raise CannotAttend(
                f"it takes heads of at most {MAX_HEAD_DIM} values, and the model's have {decoder.head_dim}"
            )
        scale = decoder.attention_scale
        self._scale = decoder.head_dim**-0.5 if scale is None else scale
        self._soft_cap = decoder.attention_soft_cap
        self._for_chunks = for_chunks
        self.name = "kernels in Triton's language"
        if for_chunks is not None:
            self.name += f" (for chunks that are not recorded, {for_chunks.name})"

    def prepare(
        self, packed: PackedBatch, cache: KvCache, windows: Sequence[AttentionWindow | None]
    ) -> Mapping[AttentionWindow | None, KernelMetadata]:
        """Raises ValueError for windows of chunked or bidirectional attention, which the kernels do not have."""
        if any(window is not None and window.is_chunk for window in windows):
            raise ValueError("it has no chunked attention")
        if any(window is not None and window.is_bidirectional for window in windows):
            raise ValueError("it has no bidirectional attention")
        rows = packed.fixed or _found_rows(packed)
        slots, positions = packed.slots.contiguous(), packed.positions.contiguous()
        begin = packed.generation_begin
        chunks: Mapping[AttentionWindow | None, PagedMetadata] = {}
        if self._for_chunks is not None and packed.chunks:
            chunks = self._for_chunks.prepare(_chunks_of(packed), cache, windows)
        return {
            window: KernelMetadata(
                packed.block_tables, rows, slots, positions, window, begin, chunks.get(window)
            )
            for window in windows
        }

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        layer: int,
        metadata: KernelMetadata,
        cache: KvCache,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Rows that belong neither to a chunk nor to generation stay uninitialized in the result."""
        pages, rows = cache.pages(layer), metadata.rows
        read = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        scores = metadata.window, self._scale, self._soft_cap, sinks, cache.scales(layer)
        if self._for_chunks is not None and metadata.chunks is not None:
            end = metadata.generation_begin
            given = queries[:end], keys[:end], values[:end]
            found = self._for_chunks.attend(*given, layer, metadata.chunks, cache, sinks)
            read[:end] = found.view(-1, *queries.shape[1:])
        elif len(rows.tiles):
            attend_chunks(read, queries, pages, metadata.tables, rows.tiles, *scores)
        if len(rows.generation_rows):
            of_rows = rows.generation_rows, metadata.slots, metadata.positions
            attend_generation(read, queries, pages, metadata.tables, *of_rows, *scores)
        return read.flatten(1)


def _chunks_of(packed: PackedBatch) -> PackedBatch:
    """Return the same batch without its generation rows."""
    begin, count = packed.generation_begin, len(packed.chunks)
    return replace(
        packed,
        positions=packed.positions[:begin],
        slots=packed.slots[:begin],
        bounds=packed.bounds[: count + 1],
        generation_lengths=packed.generation_lengths[:0],
    )


def _found_rows(packed: PackedBatch) -> FixedRows:
    device, begin = packed.positions.device, packed.generation_begin
    tiles = np.array(cut_into_tiles(packed.chunks), dtype=np.int64).reshape(-1, 4)
    on_device = upload(tiles, device) if len(tiles) else packed.positions.new_empty((0, 4))
    return FixedRows(on_device, torch.arange(begin, len(packed.positions), device=device))

"""An `Attention` by the kernels here: blocks of any size are read in place, and generation can be recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from inflight.decoding.transfer import upload
from inflight.engine.packing import PackedBatch
from inflight.engine.torch.attention_check import CannotAttend
from inflight.engine.torch.kernels.attention import (
    MAX_HEAD_DIM,
    attend_chunks,
    attend_generation,
    cut_into_tiles,
)
from inflight.engine.torch.kv_cache import KvCache
from inflight.engine.windows import AttentionWindow
from inflight.models import DecoderConfig


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """All rows of a batch, for one window: what the kernels take beside queries, keys and values."""

    tables: Tensor
    tiles: Tensor | None
    slots: Tensor
    positions: Tensor
    generation_begin: int
    window: AttentionWindow | None


class KernelAttention:
    """An `Attention` of one call for all context chunks, and two for generation rows.

    Args:
        decoder: As this rank computes it.

    Raises:
        CannotAttend: Its heads are too wide.
    """

    has_fixed_shapes = True
    name = "kernels in Triton's language"

    def __init__(self, decoder: DecoderConfig) -> None:
        if decoder.head_dim > MAX_HEAD_DIM:
            raise CannotAttend(f"it takes heads of {MAX_HEAD_DIM}, and the model's are of {decoder.head_dim}")
        scale = decoder.attention_scale
        self._scale = decoder.head_dim**-0.5 if scale is None else scale
        self._soft_cap = decoder.attention_soft_cap

    def plan(
        self, packed: PackedBatch, cache: KvCache, windows: Sequence[AttentionWindow | None]
    ) -> Mapping[AttentionWindow | None, KernelPlan]:
        """As `Attention.plan`."""
        begin = packed.generation_begin
        tiles = upload(np.array(cut_into_tiles(packed.chunks)), cache.device) if packed.chunks else None
        slots, positions = packed.slots[begin:].contiguous(), packed.positions[begin:].contiguous()
        return {
            window: KernelPlan(packed.block_tables, tiles, slots, positions, begin, window)
            for window in windows
        }

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        layer: int,
        plan: KernelPlan,
        cache: KvCache,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """As `Attention.attend`."""
        pages, begin = cache.pages(layer), plan.generation_begin
        read = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        scores = plan.window, self._scale, self._soft_cap, sinks
        if plan.tiles is not None:
            attend_chunks(read, queries, pages, plan.tables, plan.tiles, *scores)
        if begin < len(queries):
            rows = read[begin:], queries[begin:]
            attend_generation(*rows, pages, plan.tables, plan.slots, plan.positions, *scores)
        return read.flatten(1)

"""Rows whose keys and values are in KV blocks in random order, for attention on any device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from inflight.engine.attention.check import fixed_rows, pack_rows
from inflight.engine.attention.gathering import by_plain_products
from inflight.engine.kv_cache import KvCache
from inflight.engine.kv_quantization import KvQuantization
from inflight.engine.packing import PackedBatch, PackedChunk
from inflight.engine.windows import AttentionWindow
from inflight.models import DecoderConfig

CPU = torch.device("cpu")


class Rows:
    """Queries, and three sequences of up to `longest` tokens."""

    def __init__(
        self,
        decoder: DecoderConfig,
        tokens_per_block: int,
        longest: int,
        dtype: torch.dtype,
        seed: int,
        device: torch.device = CPU,
        sequences: int = 3,
        quantization: KvQuantization | None = None,
    ) -> None:
        generator = torch.Generator(device).manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device).to(dtype)

        blocks = -(-longest // tokens_per_block)
        self.decoder, count = decoder, sequences * blocks
        shape = replace(decoder, num_layers=1)
        self.cache = KvCache(shape, count, tokens_per_block, dtype, device, quantization)
        self.tables = torch.randperm(count, generator=generator, device=device).view(sequences, blocks)
        heads, kv_heads, size = decoder.num_heads, decoder.num_kv_heads, decoder.head_dim
        stored = torch.arange(count * tokens_per_block, device=device)
        self.cache.write(0, stored, *(random(len(stored), kv_heads, size) for _ in range(2)))
        self.queries = random(sequences, longest, heads, size)
        self.sinks = random(heads) if decoder.learned_sinks else None

    def attend(self, attention: Any, packed: PackedBatch, window: AttentionWindow | None) -> Tensor:
        metadata = attention.prepare(packed, self.cache, (window,))[window]
        queries = self.queries[packed.slots, packed.positions]
        blocks = self.tables[packed.slots, packed.positions // self.cache.tokens_per_block]
        places = blocks * self.cache.tokens_per_block + packed.positions % self.cache.tokens_per_block
        pages = (page.flatten(0, 1)[places] for page in self.cache.pages(0))
        return attention.attend(queries, *pages, 0, metadata, self.cache, self.sinks)


def largest_error(
    attention: Any, rows: Rows, num_rows: int, start: int, lengths: tuple[int, int], window: Any
) -> float:
    """Return the largest error of a chunk after `start` tokens and two generation rows, launched and recorded."""
    packed = pack_rows((PackedChunk(0, 0, num_rows, start),), (1, 2), lengths, rows.tables)
    recorded = replace(packed, chunks=(), generation_begin=0, fixed=fixed_rows(packed))
    expected = rows.attend(by_plain_products(rows.decoder), packed, window)
    found = [rows.attend(attention, given, window) for given in (packed, recorded)]
    return max(float((each - expected).abs().max()) for each in found)

"""Whether attention that reads KV blocks in place can be had for a model: it is tried, and its results compared.

Which dtypes, head sizes, block sizes and processors a kernel takes changes with torch and with what else is
installed, and what is accepted may still be computed wrongly. So nothing of that is known here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from inflight.engine.torch.attention import GATHERING, Attention
from inflight.engine.torch.kv_cache import KvCache
from inflight.engine.torch.packing import PackedBatch, PackedChunk
from inflight.engine.torch.windows import AttentionWindow
from inflight.models import DecoderConfig

_SEQUENCES, _BLOCKS = 3, 3  # of each sequence
_CHUNK_ROWS = 9
_TOLERANCE = 0.05  # values are around 1, and half precision is off by some thousandths


class CannotPage(Exception):
    """Why blocks cannot be read in place."""


def check_paging(
    attention: Attention,
    decoder: DecoderConfig,
    tokens_per_block: int,
    windows: Sequence[AttentionWindow | None],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Compare `attention` with gathered blocks, on generation rows with and without a chunk behind a prefix.

    Args:
        attention: What is tried.
        decoder: As this rank computes it: its heads count.
        tokens_per_block: Tokens per KV block.
        windows: Of the layers.
        dtype: Of queries, keys and values.
        device: Where they are.

    Raises:
        CannotPage: It raises, or computes something else.
    """
    if any(window is not None and window.sinks for window in windows):
        raise CannotPage("it has no windows with sinks")
    windows = tuple(dict.fromkeys(windows))
    cache = KvCache(replace(decoder, num_layers=1), _SEQUENCES * _BLOCKS, tokens_per_block, dtype, device)
    tables = torch.arange(cache.num_blocks, device=device).view(_SEQUENCES, _BLOCKS).flip(1)
    heads, kv_heads = decoder.num_heads, decoder.num_kv_heads
    stored = torch.arange(cache.num_blocks * tokens_per_block, device=device)
    generator = torch.Generator(device).manual_seed(0)
    shape = (len(stored), heads + 2 * kv_heads, decoder.head_dim)
    drawn = torch.randn(shape, generator=generator, device=device).to(dtype)
    queries, keys, values = drawn.split((heads, kv_heads, kv_heads), dim=1)
    cache.write(0, stored, keys, values)
    for packed in _batches(tokens_per_block, device):
        blocks = tables[packed.slots, packed.positions // tokens_per_block]
        rows = blocks * tokens_per_block + packed.positions % tokens_per_block
        _compare(attention, (queries[rows], keys[rows], values[rows]), packed, tables, windows, cache)


def _batches(tokens_per_block: int, device: torch.device) -> Iterator[PackedBatch]:
    lengths = (2 * tokens_per_block + 1, tokens_per_block, 1)
    start = max(1, tokens_per_block - 4)
    chunk = PackedChunk(0, 0, min(_CHUNK_ROWS, _BLOCKS * tokens_per_block - start), start)
    yield _pack((chunk,), (1, 2), lengths[:2], device)
    yield _pack((), (0, 1, 2), lengths, device)


def _pack(
    chunks: tuple[PackedChunk, ...], slots: Sequence[int], lengths: Sequence[int], device: torch.device
) -> PackedBatch:
    context = [(chunk.slot, chunk.start + row) for chunk in chunks for row in range(chunk.end - chunk.begin)]
    rows = [*context, *((slot, length - 1) for slot, length in zip(slots, lengths, strict=True))]
    slot_rows, positions = torch.tensor(rows, device=device).unbind(1)
    bounds = [*(chunk.begin for chunk in chunks), *range(len(context), len(rows) + 1)]
    return PackedBatch(
        token_ids=torch.zeros_like(positions),
        positions=positions,
        slots=slot_rows,
        sampled_rows=torch.arange(len(rows), device=device),
        bounds=torch.tensor(bounds, device=device),
        chunks=chunks,
        generation_begin=len(context),
        generation_lengths=np.array(lengths, dtype=np.int64),
    )


def _compare(
    attention: Attention,
    heads: tuple[Tensor, Tensor, Tensor],
    packed: PackedBatch,
    tables: Tensor,
    windows: Sequence[AttentionWindow | None],
    cache: KvCache,
) -> None:
    dtype = heads[0].dtype
    expected = GATHERING.plan(packed, tables, cache.tokens_per_block, windows, dtype)
    try:
        plans = attention.plan(packed, tables, cache.tokens_per_block, windows, dtype)
        found = {window: attention.attend(*heads, 0, plans[window], cache) for window in windows}
    except Exception as error:  # whatever a kernel that cannot raises
        raise CannotPage(str(error).split("\n")[0]) from error
    for window in windows:
        error = (found[window] - GATHERING.attend(*heads, 0, expected[window], cache)).abs().max()
        if not error < _TOLERANCE:  # nor where it is nan
            raise CannotPage(f"its results are off by {float(error):.3g} with window {window}")

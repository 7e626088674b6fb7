"""Checks whether a device computes a model's attention correctly, by comparison with plain matrix products.

The dtypes, head sizes, block sizes and processors that a kernel supports change with torch and other packages, and
an accepted configuration may still be computed wrongly. So no list of supported configurations is hard-coded.
Kernels work on tiles of rows, and defects show where a tile is full or has a single row: hence the numbers of rows
that are tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from inflight.engine.attention.gathering import by_plain_products
from inflight.engine.attention.interface import Attention
from inflight.engine.kv_cache import KvCache
from inflight.engine.kv_quantization import KvQuantization
from inflight.engine.packing import FixedRows, PackedBatch, PackedChunk, cut_into_tiles
from inflight.engine.windows import AttentionWindow
from inflight.models import DecoderConfig

_SEQUENCES = 3
_CHUNK_ROWS = (1, 9, 63, 64, 65, 128, 129)
_LONG = (600, 257, 256)  # lengths of generation rows, as a kernel may read keys in parts of 256
_TOLERANCE = 0.05  # results are around 1, and half precision has errors of some thousandths


class CannotAttend(Exception):
    """The reason why an attention cannot be used."""


def check_attention(
    attention: Attention,
    decoder: DecoderConfig,
    tokens_per_block: int,
    windows: Sequence[AttentionWindow | None],
    dtype: torch.dtype,
    device: torch.device,
    quantization: KvQuantization | None = None,
) -> None:
    """Compare `attention` with plain matrix products on generation rows, alone and beside chunks.

    Chunks have as many rows as tiles have, one less and one more, with and without a prefix before them.

    Args:
        attention: The attention to check.
        decoder: The decoder, as this rank computes it, whose first layer's heads are used.
        tokens_per_block: Tokens per KV block.
        windows: Windows of the layers.
        dtype: Data type of queries, keys and values.
        device: The device to check on.
        quantization: 8-bit format in which the KV cache stores keys and values; None: not quantized.

    Raises:
        CannotAttend: `attention` raises, or its results are wrong.
    """
    windows = tuple(dict.fromkeys(windows))
    longest = max(_prefix(tokens_per_block) + max(_CHUNK_ROWS), *_LONG)
    num_blocks = max(3, -(-longest // tokens_per_block))  # per sequence
    decoder = decoder.only(0)
    cache = KvCache(decoder, _SEQUENCES * num_blocks, tokens_per_block, dtype, device, quantization)
    tables = torch.arange(cache.num_blocks, device=device).view(_SEQUENCES, num_blocks).flip(1)
    heads, kv_heads = decoder.num_heads, decoder.num_kv_heads
    stored = torch.arange(cache.num_blocks * tokens_per_block, device=device)
    generator = torch.Generator(device).manual_seed(0)
    shape = (len(stored), heads + 2 * kv_heads, decoder.head_dim)
    drawn = torch.randn(shape, generator=generator, device=device).to(dtype)
    queries, keys, values = drawn.split_with_sizes((heads, kv_heads, kv_heads), dim=1)
    if decoder.latent is not None:
        values = keys
    cache.write(0, stored, keys, values)
    sinks = (
        torch.randn(heads, generator=generator, device=device).to(dtype) if decoder.learned_sinks else None
    )
    for packed in _batches(tokens_per_block, tables):
        blocks = tables[packed.slots, packed.positions // tokens_per_block]
        rows = blocks * tokens_per_block + packed.positions % tokens_per_block
        given = (queries[rows], keys[rows], values[rows]), sinks
        _compare(attention, by_plain_products(decoder), *given, packed, packed, windows, cache)
        if attention.takes_fixed_rows:
            recorded = replace(packed, chunks=(), generation_begin=0, fixed=fixed_rows(packed))
            _compare(attention, by_plain_products(decoder), *given, packed, recorded, windows, cache)


def _prefix(tokens_per_block: int) -> int:
    """Return a number of tokens before a chunk, so that it begins inside a block if blocks have several tokens."""
    return max(1, tokens_per_block - 4)


def _batches(tokens_per_block: int, tables: Tensor) -> Iterator[PackedBatch]:
    lengths = (2 * tokens_per_block + 1, tokens_per_block, 1)
    for num_rows in _CHUNK_ROWS:
        for start in (0, _prefix(tokens_per_block)):
            yield pack_rows((PackedChunk(0, 0, num_rows, start),), (1, 2), lengths[:2], tables)
    for all_lengths in (lengths, _LONG):
        yield pack_rows((), (0, 1, 2), all_lengths, tables)


def pack_rows(
    chunks: tuple[PackedChunk, ...], slots: Sequence[int], lengths: Sequence[int], tables: Tensor
) -> PackedBatch:
    context = [(chunk.slot, chunk.start + row) for chunk in chunks for row in range(chunk.end - chunk.begin)]
    rows = [*context, *((slot, length - 1) for slot, length in zip(slots, lengths, strict=True))]
    device = tables.device
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
        block_tables=tables,
    )


def fixed_rows(packed: PackedBatch) -> FixedRows:
    """Return the rows of `packed` in arrays of fixed size, which have unused places."""
    device, begin, count = packed.positions.device, packed.generation_begin, len(packed.positions)
    tiles = [*cut_into_tiles(packed.chunks), [0, 0, 0, 0]]
    rows = [*range(begin, count), -1]
    return FixedRows(torch.tensor(tiles, device=device), torch.tensor(rows, device=device))


def _compare(
    attention: Attention,
    oracle: Attention,
    heads: tuple[Tensor, Tensor, Tensor],
    sinks: Tensor | None,
    packed: PackedBatch,
    given: PackedBatch,
    windows: Sequence[AttentionWindow | None],
    cache: KvCache,
) -> None:
    """Compare the results of `attention` for `given` and of `oracle` for `packed`; `given` is `packed` or has the
    same rows in the form for recordings."""
    expected = oracle.prepare(packed, cache, windows)
    try:
        metadata = attention.prepare(given, cache, windows)
        found = {window: attention.attend(*heads, 0, metadata[window], cache, sinks) for window in windows}
    except Exception as error:  # an unsupported kernel may raise anything
        raise CannotAttend(str(error).split("\n")[0]) from error
    for window in windows:
        error = (found[window] - oracle.attend(*heads, 0, expected[window], cache, sinks)).abs().max()
        if not error < _TOLERANCE:  # true for NaN too
            raise CannotAttend(
                f"its results are wrong by {float(error):.3g} with {_described(packed, window)}"
            )


def _described(packed: PackedBatch, window: AttentionWindow | None) -> str:
    chunks = [
        f"a chunk of {chunk.end - chunk.begin} rows from position {chunk.start}" for chunk in packed.chunks
    ]
    return f"{' and '.join(chunks) or 'generation rows alone'}, window {window}"

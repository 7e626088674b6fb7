"""Attention over paged KV blocks: a kernel for generation rows, which splits their keys, and one for context
chunks.

A generation row's keys are split into parts by the row's length alone, so that sums are made in the same order
whatever else is in the batch. The number of programs that share the parts depends on the number of rows, and does
not change results. A chunk's rows see keys in tiles that begin at the same positions however the context is
chunked.

Scores and sums are float32. Products use the queries' dtype, and float32 is not rounded to TF32. 8-bit keys and
values are converted to the queries' dtype as they are read. Keys after the last row of a sequence are never
read, so the rest of a block may contain anything.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.engine.cuda.kernels.kv_levels import levels_of, load_tokens, or_any
from inflight.engine.cuda.kernels.language import Value, constexpr, jit, tl
from inflight.engine.cuda.kernels.launching import PER_BATCH, launch, power_of_two
from inflight.engine.packing import TILE_ROWS
from inflight.engine.windows import AttentionWindow

MAX_HEAD_DIM = 256
"""For wider heads, a tile of keys does not fit into a processor's shared memory."""

_TILE_KEYS = 64  # for heads of up to 128, in half precision
_TILE_BYTES = 8192  # size of a tile of rows for which 4 warps have enough registers; larger tiles get 8 warps
_MIN_PART = 256  # keys; combining shorter parts costs more than splitting saves
_PROGRAMS = 1024  # enough to fill the processors of a GPU several times
# Programs per row and key head, so that among many short rows a long one is not read by a single program.
_MIN_SHARING = 4
PARTS_AT_ONCE = 4  # parts read together by `_add_up`
_MIN_DOT = 16  # rows of the smallest product that Triton compiles


def num_parts(num_kv_heads: int, longest: int) -> int:
    """Return the maximum number of parts of a generation row's keys: about 256 programs for a single long row.

    `longest` is the maximum length of a sequence in tokens, which limits the number of parts.
    """
    parts = max(4, min(64, power_of_two(256 // num_kv_heads)))
    return min(parts, power_of_two(-(-longest // _MIN_PART)))


@jit()
def _see(
    best: Value, total: Value, read: Value, queries: Value, key_page: Value, value_page: Value,
    key_scales: Value, value_scales: Value, table: Value, places: Value, is_read: Value, visible: Value,
    scale: Value, key_block: Value, key_token: Value, value_block: Value, value_token: Value,
    scale_token: Value, SOFT_CAP: constexpr, TOKENS_PER_BLOCK: constexpr, HEAD_DIM: constexpr,
    WIDTH: constexpr, LEVELS: constexpr, ALL_VISIBLE: constexpr,
):  # fmt: skip
    """Add a tile of keys to rows' running softmaxes.

    `best` [rows], `total` [rows] and `read` [rows, WIDTH] are the maximum score, the sum of exponentials and the
    weighted sum of values so far. `places` [keys] are the keys' positions. `is_read` [keys] masks the keys to
    read, and `visible` the keys that each row sees: [rows, keys], or [1, keys] if all rows see the same keys.
    With ALL_VISIBLE every row sees every key of the tile, and both masks are ignored.
    """
    columns = tl.arange(0, WIDTH)
    if ALL_VISIBLE:
        blocks = tl.load(table + places // TOKENS_PER_BLOCK)
        inside = (columns < HEAD_DIM)[None, :]
    else:
        blocks = tl.load(table + places // TOKENS_PER_BLOCK, mask=is_read, other=0)
        inside = is_read[:, None] & (columns < HEAD_DIM)[None, :]
    offsets = places % TOKENS_PER_BLOCK
    key_rows = blocks * key_block + offsets * key_token
    tokens = (blocks * TOKENS_PER_BLOCK + offsets) * scale_token
    keys = load_tokens(key_page, key_rows, columns, inside, key_scales, tokens, is_read, queries, LEVELS)
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
    if SOFT_CAP > 0:
        scores = (2 * tl.sigmoid(2 * scores / SOFT_CAP) - 1) * SOFT_CAP  # cap * tanh(score / cap)
    if ALL_VISIBLE:
        now_best = tl.maximum(best, tl.max(scores, axis=1))
        reference = now_best
    else:
        scores = tl.where(visible, scores, float("-inf"))
        now_best = tl.maximum(best, tl.max(scores, axis=1))
        reference = tl.where(now_best == float("-inf"), 0.0, now_best)  # for rows that have seen no key yet
    weights = tl.exp(scores - reference[:, None])
    decay = tl.exp(best - reference)
    value_rows = blocks * value_block + offsets * value_token
    values = load_tokens(
        value_page, value_rows, columns, inside, value_scales, tokens, is_read, queries, LEVELS
    )
    added = tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return now_best, total * decay + tl.sum(weights, axis=1), read * decay[:, None] + added


@jit(do_not_specialize_on_alignment=PER_BATCH)
def _attend_generation(
    queries: Value, keys: Value, values: Value, tables: Value, rows: Value, slots: Value, positions: Value,
    parts_read: Value, parts_best: Value, parts_total: Value, scale: Value, query_row: Value,
    query_head: Value, key_block: Value, key_token: Value, key_head: Value, value_block: Value,
    value_token: Value, value_head: Value, table_row: Value, key_scales: Value, value_scales: Value,
    scale_token: Value, LEVELS: constexpr, RECENT: constexpr, SINKS: constexpr, SOFT_CAP: constexpr,
    TOKENS_PER_BLOCK: constexpr, GROUP: constexpr, HEAD_DIM: constexpr, ROWS: constexpr, WIDTH: constexpr,
    NUM_PARTS: constexpr, MIN_PART: constexpr, TILE: constexpr,
):  # fmt: skip
    """Attend with a row's query heads of one key head to every n-th part of the row's keys.

    Grid: generation rows, key heads, n programs that share the parts. The softmax of a part is stored in
    `parts_read` [generation rows, heads, NUM_PARTS, HEAD_DIM], `parts_best` and `parts_total` [generation rows,
    heads, NUM_PARTS], float32.
    """
    index = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.load(rows + index)
    position = tl.load(positions + row, mask=row >= 0, other=-1)  # -1: no row, and so no keys
    row = tl.maximum(row, 0)
    table = tables + tl.load(slots + row) * table_row
    first = position * 0  # of the same dtype
    if RECENT > 0:
        first = tl.maximum(position - RECENT + 1, 0)
    span = position + 1 - first
    part_size = tl.maximum(tl.cdiv(tl.cdiv(span, NUM_PARTS), TILE) * TILE, MIN_PART)
    in_group = tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    is_head = in_group < GROUP
    heads = kv_head * GROUP + in_group
    inside = is_head[:, None] & (columns < HEAD_DIM)[None, :]
    query = tl.load(
        queries + row * query_row + heads[:, None] * query_head + columns[None, :],
        mask=inside, other=0.0,
    )  # fmt: skip
    key_page = keys + kv_head * key_head
    value_page = values + kv_head * value_head
    key_scales += kv_head
    value_scales += kv_head
    for part in range(tl.program_id(2), tl.cdiv(span, part_size), tl.num_programs(2)):
        best = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        read = tl.zeros([ROWS, WIDTH], tl.float32)
        if SINKS > 0:  # noqa: SIM102 - this condition is evaluated at compile time, the inner one at run time
            if part == 0:
                end_of_sinks = tl.minimum(first, SINKS)
                for begin in range(0, end_of_sinks, TILE):
                    places = begin + tl.arange(0, TILE)
                    is_read = places < end_of_sinks
                    best, total, read = _see(
                        best, total, read, query, key_page, value_page, key_scales, value_scales, table, places,
                        is_read, is_read[None, :], scale, key_block, key_token, value_block, value_token,
                        scale_token, SOFT_CAP, TOKENS_PER_BLOCK, HEAD_DIM, WIDTH, LEVELS, False,
                    )  # fmt: skip
        begin_of_part = first + part * part_size
        end_of_part = tl.minimum(begin_of_part + part_size, position + 1)
        for begin in range(begin_of_part, end_of_part, TILE):
            places = begin + tl.arange(0, TILE)
            is_read = places < end_of_part
            best, total, read = _see(
                best, total, read, query, key_page, value_page, key_scales, value_scales, table, places,
                is_read, is_read[None, :], scale, key_block, key_token, value_block, value_token, scale_token,
                SOFT_CAP, TOKENS_PER_BLOCK, HEAD_DIM, WIDTH, LEVELS, False,
            )  # fmt: skip
        place = (index.to(tl.int64) * tl.num_programs(1) * GROUP + heads) * NUM_PARTS + part
        tl.store(parts_best + place, best, mask=is_head)
        tl.store(parts_total + place, total, mask=is_head)
        tl.store(parts_read + place[:, None] * HEAD_DIM + columns[None, :], read, mask=inside)


@jit(do_not_specialize_on_alignment=PER_BATCH)
def _add_up(
    results: Value, rows: Value, positions: Value, parts_read: Value, parts_best: Value, parts_total: Value,
    sinks: Value, RECENT: constexpr, HAS_SINKS: constexpr, HEAD_DIM: constexpr, WIDTH: constexpr,
    NUM_PARTS: constexpr, MIN_PART: constexpr, TILE: constexpr, AT_ONCE: constexpr,
):  # fmt: skip
    """Combine the parts' softmaxes of a row and head into `results` [rows, heads, HEAD_DIM].

    Grid: generation rows, heads.
    """
    index = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.load(rows + index)
    position = tl.load(positions + row, mask=row >= 0, other=-1)
    span = position + 1
    if RECENT > 0:
        span = tl.minimum(span, RECENT)
    part_size = tl.maximum(tl.cdiv(tl.cdiv(span, NUM_PARTS), TILE) * TILE, MIN_PART)
    num_parts = tl.cdiv(span, part_size)
    parts = tl.arange(0, NUM_PARTS)
    columns = tl.arange(0, WIDTH)
    place = (index.to(tl.int64) * tl.num_programs(1) + head) * NUM_PARTS
    bests = tl.load(parts_best + place + parts, mask=parts < num_parts, other=float("-inf"))
    best = tl.max(bests, axis=0)
    totals = tl.load(parts_total + place + parts, mask=parts < num_parts, other=0.0)
    total = tl.sum(totals * tl.exp(bests - best), axis=0)
    if HAS_SINKS:
        total += tl.exp(tl.load(sinks + head).to(tl.float32) - best)
    result = tl.zeros([WIDTH], tl.float32)
    # A few parts at a time: most rows have few, and a tile for the maximum number would be nearly empty.
    for first in range(0, num_parts, AT_ONCE):
        some = first + tl.arange(0, AT_ONCE)
        decay = tl.exp(tl.load(parts_best + place + some, mask=some < num_parts, other=float("-inf")) - best)
        inside = (some < num_parts)[:, None] & (columns < HEAD_DIM)[None, :]
        read = tl.load(
            parts_read + (place + some)[:, None] * HEAD_DIM + columns[None, :], mask=inside, other=0.0
        )
        result += tl.sum(read * decay[:, None], axis=0)
    result = result / total
    target = results + (row * tl.num_programs(1) + head) * HEAD_DIM + columns
    tl.store(target, result.to(results.dtype.element_ty), mask=(columns < HEAD_DIM) & (row >= 0))


@jit(do_not_specialize_on_alignment=PER_BATCH)
def _attend_chunk(
    results: Value, queries: Value, keys: Value, values: Value, tables: Value, tiles: Value, sinks: Value,
    scale: Value, query_row: Value, query_head: Value, key_block: Value, key_token: Value, key_head: Value,
    value_block: Value, value_token: Value, value_head: Value, table_row: Value, key_scales: Value,
    value_scales: Value, scale_token: Value, LEVELS: constexpr, RECENT: constexpr, SINKS: constexpr,
    HAS_SINKS: constexpr, SOFT_CAP: constexpr, TOKENS_PER_BLOCK: constexpr, GROUP: constexpr,
    HEAD_DIM: constexpr, ROWS: constexpr, WIDTH: constexpr, TILE: constexpr,
):  # fmt: skip
    """Attend with a tile of a chunk's rows, for one query head. Grid: heads, tiles.

    `results` is [rows, heads, HEAD_DIM]; for `tiles` see `FixedRows.tiles`.
    """
    of_tile = tiles + (tl.num_programs(1) - 1 - tl.program_id(1)) * 4  # the longest contexts first
    head = tl.program_id(0)
    first_row = tl.load(of_tile)
    num_rows = tl.load(of_tile + 1) - first_row
    table = tables + tl.load(of_tile + 2) * table_row
    start = tl.load(of_tile + 3)
    in_tile = tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    is_row = in_tile < num_rows
    positions = start + in_tile
    inside = is_row[:, None] & (columns < HEAD_DIM)[None, :]
    query = tl.load(
        queries + (first_row + in_tile)[:, None] * query_row + head * query_head + columns[None, :],
        mask=inside, other=0.0,
    )  # fmt: skip
    key_page = keys + (head // GROUP) * key_head
    value_page = values + (head // GROUP) * value_head
    key_scales += head // GROUP
    value_scales += head // GROUP
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    read = tl.zeros([ROWS, WIDTH], tl.float32)
    first = start * 0  # of the same dtype
    if RECENT > 0:
        first = tl.maximum(start - RECENT + 1, 0) // TILE * TILE
    if SINKS > 0:
        end_of_sinks = tl.minimum(first, SINKS)
        for begin in range(0, end_of_sinks, TILE):
            places = begin + tl.arange(0, TILE)
            is_read = places < end_of_sinks
            best, total, read = _see(
                best, total, read, query, key_page, value_page, key_scales, value_scales, table, places,
                is_read, is_read[None, :], scale, key_block, key_token, value_block, value_token, scale_token,
                SOFT_CAP, TOKENS_PER_BLOCK, HEAD_DIM, WIDTH, LEVELS, False,
            )  # fmt: skip
    begin_masked = first
    if RECENT == 0 and not queries.dtype.element_ty.is_fp32():
        # Tiles that every row sees completely need no mask. In float32 there is one loop, as two loops would
        # need more registers than there are.
        begin_masked = (start + 1) // TILE * TILE
        for begin in range(0, begin_masked, TILE):
            places = begin + tl.arange(0, TILE)
            best, total, read = _see(
                best, total, read, query, key_page, value_page, key_scales, value_scales, table, places,
                places >= 0, None, scale, key_block, key_token, value_block, value_token, scale_token,
                SOFT_CAP, TOKENS_PER_BLOCK, HEAD_DIM, WIDTH, LEVELS, True,
            )  # fmt: skip
    for begin in range(begin_masked, start + num_rows, TILE):
        places = begin + tl.arange(0, TILE)
        is_read = places < start + num_rows
        visible = is_read[None, :] & (places[None, :] <= positions[:, None])
        if RECENT > 0:
            is_read = is_read & ((places > start - RECENT) | (places < SINKS))
            is_near = places[None, :] > positions[:, None] - RECENT
            visible = visible & (is_near | (places < SINKS)[None, :])
        best, total, read = _see(
            best, total, read, query, key_page, value_page, key_scales, value_scales, table, places,
            is_read, visible, scale, key_block, key_token, value_block, value_token, scale_token,
            SOFT_CAP, TOKENS_PER_BLOCK, HEAD_DIM, WIDTH, LEVELS, False,
        )  # fmt: skip
    if HAS_SINKS:
        total += tl.exp(tl.load(sinks + head).to(tl.float32) - best)
    result = read / tl.where(is_row, total, 1.0)[:, None]
    target = ((first_row + in_tile)[:, None] * tl.num_programs(0) + head) * HEAD_DIM + columns[None, :]
    tl.store(results + target, result.to(results.dtype.element_ty), mask=inside)


def attend_generation(
    results: Tensor,
    queries: Tensor,
    pages: tuple[Tensor, Tensor],
    tables: Tensor,
    rows: Tensor,
    slots: Tensor,
    positions: Tensor,
    window: AttentionWindow | None,
    scale: float,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Compute the attention of generation rows. Does not wait for the device; the grid depends on shapes only.

    Args:
        results: [all rows, heads, head_dim], contiguous; written at `rows`.
        queries: [all rows, heads, head_dim], the last dimension contiguous; float32, bfloat16 or float16.
        pages: The stored keys and values, [blocks, tokens_per_block, kv_heads, head_dim], the last dimension
            contiguous.
        tables: [slots, blocks] int64, contiguous: the block tables of the slots.
        rows: [generation rows] int64, contiguous: the indices of generation rows; -1: unused.
        slots: [all rows] int64, contiguous.
        positions: [all rows] int64, contiguous: positions of the rows' own tokens, whose keys are in the pages.
        window: The window of the layer; None: a row sees all keys up to its own.
        scale: Factor of the scores.
        soft_cap: Scores become cap * tanh(score / cap); None: unchanged.
        sinks: [heads], each head's learned score.
        scales: Scales of 8-bit keys and values, [blocks * tokens_per_block, kv_heads] float32, contiguous.
    """
    num_rows, (_, num_heads, head_dim) = len(rows), queries.shape
    keys, values = pages
    num_kv_heads = keys.shape[2]
    group = num_heads // num_kv_heads
    parts = num_parts(num_kv_heads, tables.shape[1] * keys.shape[1])
    shape = (num_rows, num_heads, parts)
    parts_read = torch.empty((*shape, head_dim), dtype=torch.float32, device=queries.device)
    parts_best = torch.empty(shape, dtype=torch.float32, device=queries.device)
    parts_total = torch.empty_like(parts_best)
    width = max(_MIN_DOT, power_of_two(head_dim))
    recent, num_sinks = (0, 0) if window is None else (window.recent, window.sinks)
    sharing = min(parts, max(_MIN_SHARING, _PROGRAMS // (num_rows * num_kv_heads)))
    group_rows = max(_MIN_DOT, power_of_two(group))
    keys_at_once, num_warps = _tiling(group_rows, width, queries.dtype)
    split = {"NUM_PARTS": parts, "MIN_PART": _MIN_PART, "TILE": keys_at_once}
    launch(
        _attend_generation, (num_rows, num_kv_heads, sharing),
        queries, keys, values, tables, rows, slots, positions, parts_read, parts_best, parts_total, scale,
        *queries.stride()[:2], *keys.stride()[:3], *values.stride()[:3], tables.stride(0),
        *or_any(scales, pages), keys.shape[2], LEVELS=levels_of(keys.dtype),
        RECENT=recent, SINKS=num_sinks, SOFT_CAP=soft_cap or 0.0, TOKENS_PER_BLOCK=keys.shape[1],
        GROUP=group, HEAD_DIM=head_dim, ROWS=group_rows, WIDTH=width, num_warps=num_warps, **split,
    )  # fmt: skip
    launch(
        _add_up, (num_rows, num_heads),
        results, rows, positions, parts_read, parts_best, parts_total, _or_nothing(sinks, results),
        RECENT=recent, HAS_SINKS=sinks is not None, HEAD_DIM=head_dim, WIDTH=width,
        AT_ONCE=min(parts, PARTS_AT_ONCE), num_warps=2 if width > 64 else 1, **split,
    )  # fmt: skip


def attend_chunks(
    results: Tensor,
    queries: Tensor,
    pages: tuple[Tensor, Tensor],
    tables: Tensor,
    tiles: Tensor,
    window: AttentionWindow | None,
    scale: float,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Compute the attention of context chunks' rows; for other arguments see `attend_generation`.

    Args:
        results: Written at the rows of `tiles`.
        queries: Queries of the rows of `tiles`, and possibly of other rows.
        pages: The stored keys and values, including the chunks' own.
        tables: See `attend_generation`.
        tiles: See `FixedRows.tiles`.
        window: See `attend_generation`.
        scale: See `attend_generation`.
        soft_cap: See `attend_generation`.
        sinks: See `attend_generation`.
        scales: See `attend_generation`.
    """
    _, num_heads, head_dim = queries.shape
    keys, values = pages
    recent, num_sinks = (0, 0) if window is None else (window.recent, window.sinks)
    width = max(_MIN_DOT, power_of_two(head_dim))
    keys_at_once, num_warps, num_stages = chunk_tiling(width, queries.dtype)
    launch(
        _attend_chunk, (num_heads, len(tiles)),
        results, queries, keys, values, tables, tiles, _or_nothing(sinks, results), scale,
        *queries.stride()[:2], *keys.stride()[:3], *values.stride()[:3], tables.stride(0),
        *or_any(scales, pages), keys.shape[2], LEVELS=levels_of(keys.dtype),
        RECENT=recent, SINKS=num_sinks, HAS_SINKS=sinks is not None, SOFT_CAP=soft_cap or 0.0,
        TOKENS_PER_BLOCK=keys.shape[1], GROUP=num_heads // keys.shape[2], HEAD_DIM=head_dim, ROWS=TILE_ROWS,
        WIDTH=width, TILE=keys_at_once, num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip


def chunk_tiling(width: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Return the keys per tile of `_attend_chunk`, the number of warps, and the number of pipeline stages.

    Half precision uses 4 warps, as many as share one of Hopper's products of 64 rows. With 8 warps, a prompt of
    8,192 tokens with heads of 128 took 3.8 ms per layer on an H100 instead of 2.0.
    """
    keys, num_warps = _tiling(TILE_ROWS, width, dtype)
    if dtype.itemsize > 2 or width > 128:
        return keys, num_warps, 3
    return keys, 4, 2


def _tiling(rows: int, width: int, dtype: torch.dtype) -> tuple[int, int]:
    """Return the keys per tile for this many rows, and the number of warps.

    Tiles must fit into shared memory and sums into registers, as `test_triton_kernels.py` checks for the compiled
    kernels.
    """
    keys = _TILE_KEYS // (2 if width > 128 else 1) // (2 if dtype.itemsize > 2 else 1)
    return max(_MIN_DOT, keys), 4 if rows * width * dtype.itemsize <= _TILE_BYTES else 8


def _or_nothing(sinks: Tensor | None, any_tensor: Tensor) -> Tensor:
    """Return `sinks`, or `any_tensor` if None, as a kernel needs a tensor argument even if it does not read it."""
    return any_tensor if sinks is None else sinks

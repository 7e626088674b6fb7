"""Records forward passes and replays them, each with one call to the device instead of hundreds (CUDA graphs).

A recording has a fixed number of rows, and reads and writes fixed memory. So several numbers of rows are recorded.
A batch is padded to the next of these numbers. The padding rows belong to the null slot and write to the null
block. The batch's data goes to the recordings' input in a single copy. Everything else, such as block tables and
last tokens, is already in the slot table. Independent of CUDA: the recording function is an argument. Called on
the loop thread.

There are recordings of generation rows alone, up to the number of slots. If the attention takes `FixedRows`, there
are others of context chunks and generation rows together, up to _MAX_ROWS rows: computing a larger batch takes
longer than launching its operations one by one, so a recording would save nothing.

If LoRA adapters are enabled, every recording exists a second time, with a fixed number of adapter pages, for
batches in which some row has an adapter. Batches with more pages or with DoRA magnitudes are not replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inflight.core.schedule.batch import ScheduledBatch
from inflight.engine.adapter_pool import ActiveAdapters, AdapterPool
from inflight.engine.interfaces import BlockCache, RecordedDecoder
from inflight.engine.kv_cache import Numbers
from inflight.engine.packing import (
    FixedRows,
    PackedBatch,
    adapters_of,
    cut_into_tiles,
    generation_rows,
    lay_out,
)
from inflight.engine.slots import SlotTable
from inflight.sampling.transfer import staged, upload

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""A function that runs operations and records them; it returns a function that replays the recording, which reads
and writes the same memory."""

_STEP = 8  # rows; fewer rows take as long
_MIN_MIXED = 16  # rows of the smallest recording with chunks
_MAX_ROWS = 1024  # rows of the largest recording; on an H100, 1b takes about 5 ms for them, and 8b 30
_MAX_CHUNKS = 32  # chunks of one recording; with more, most of its tiles would be empty in most batches
_GRAPH_BYTES = 32 << 20
_ADAPTER_RANKS = 128
"""Sum of the ranks of a recorded batch's adapters, rounded up to pages: 8 adapters of rank 16. A replay always
multiplies this many ranks."""


def recorded_sizes(most: int) -> list[int]:
    """Return numbers of rows to record, ascending, up to `most`: each at most a quarter, or 8 rows, above the
    previous."""
    sizes = [size for size in (1, 2, 4) if size < most]
    size = _STEP
    while size < most:
        sizes.append(size)
        size += max(_STEP, (1 << (size.bit_length() - 1)) // 4)
    return [*sizes, most]


def mixed_sizes(max_num_tokens: int) -> list[int]:
    """Return the numbers of rows to record with chunks, for an engine with at most `max_num_tokens` rows."""
    most = min(max_num_tokens, _MAX_ROWS)
    return [size for size in recorded_sizes(most) if size >= _MIN_MIXED or size == most]


@dataclass(frozen=True, slots=True)
class RecordedKinds:
    """The kinds of batches that are recorded.

    Attributes:
        generation_sizes: Numbers of rows of recordings of generation rows, ascending.
        mixed_sizes: Numbers of rows of recordings with context chunks, ascending.
        with_adapters: Whether each number of rows is recorded a second time, with adapters.
    """

    generation_sizes: tuple[int, ...]
    mixed_sizes: tuple[int, ...] = ()
    with_adapters: bool = False

    @classmethod
    def of(
        cls, takes_fixed_rows: bool, num_slots: int, max_num_tokens: int, with_adapters: bool
    ) -> RecordedKinds:
        """Return the kinds for `num_slots` sequences and batches of at most `max_num_tokens` rows."""
        mixed = mixed_sizes(max_num_tokens) if takes_fixed_rows else ()
        return cls(tuple(recorded_sizes(num_slots)), tuple(mixed), with_adapters)

    @property
    def num_bytes(self) -> int:
        """A generous estimate of the recordings' device memory in bytes; the exact size is not known in
        advance."""
        count = len(self.generation_sizes) + len(self.mixed_sizes)
        return _GRAPH_BYTES * count * (2 if self.with_adapters else 1)


@dataclass(frozen=True, slots=True)
class _Recording:
    """The kind of one recording: number of rows, with or without context chunks, with or without adapters."""

    size: int
    has_chunks: bool
    with_adapters: bool


def _most_pages(pool: AdapterPool) -> int:
    """Return the number of adapter pages of a recorded batch."""
    ranks = _ADAPTER_RANKS if pool.max_active_rank is None else min(_ADAPTER_RANKS, pool.max_active_rank)
    return min(pool.num_pages, max(1, ranks // pool.page_rank))


class IterationGraphs:
    """Recordings of a decoder's layers.

    Args:
        decoder: A decoder with all layers of a model, and an attention of fixed shapes.
        table: The slot table of the rows' slots.
        cache: The KV cache, whose memory the recordings write to.
        capture: The recording function.
        max_num_tokens: Maximum number of rows of a batch.

    Attributes:
        kinds: The recorded kinds of batches.
    """

    def __init__(
        self,
        decoder: RecordedDecoder,
        table: SlotTable,
        cache: BlockCache,
        capture: Capture,
        max_num_tokens: int,
    ) -> None:
        self._decoder, self._table, self._cache = decoder, table, cache
        self._pool = pool = decoder.adapters
        kinds = RecordedKinds.of(decoder.takes_fixed_rows, table.null_slot, max_num_tokens, pool is not None)
        most_chunks = min(table.null_slot, _MAX_CHUNKS)
        self._tile_limits = {
            size: limits
            for size in kinds.mixed_sizes
            if (limits := decoder.tile_limits(size, min(size, most_chunks))) is not None
        }
        self.kinds = kinds = replace(kinds, mixed_sizes=tuple(self._tile_limits))
        device, most = cache.device, max(*kinds.generation_sizes, *kinds.mixed_sizes)
        num_numbers = [sum(self._parts(size, False)) for size in kinds.generation_sizes]
        num_numbers += [sum(self._parts(size, True)) for size in kinds.mixed_sizes]
        self._numbers = torch.zeros(max(num_numbers), dtype=torch.int64, device=device)
        self._bounds = torch.arange(most + 1, device=device)
        shape = (most, decoder.config.hidden_size)
        self._hidden = torch.zeros(shape, dtype=decoder.dtype, device=device)
        self._num_pages = num_pages = 0 if pool is None else _most_pages(pool)
        # Pages, each page's owner, and each row's adapter, as in `ActiveAdapters.of_rows`.
        self._adapters = torch.zeros(2 * num_pages + most, dtype=torch.int64, device=device)
        recordings = [
            _Recording(size, has_chunks, with_adapters)
            for has_chunks, sizes in ((False, kinds.generation_sizes), (True, kinds.mixed_sizes))
            for size in sizes
            for with_adapters in ((False,) if pool is None else (False, True))
        ]
        # The largest first, as the other recordings reuse its memory.
        recordings.sort(key=lambda each: (each.size, each.has_chunks, each.with_adapters), reverse=True)
        self._replays = {each: self._capture(each, capture) for each in recordings}

    @property
    def count(self) -> int:
        """Number of recorded forward passes (CUDA graphs)."""
        return len(self._replays)

    @property
    def adapter_ranks(self) -> int:
        """Maximum sum of ranks of a replayed batch's adapters; 0: batches with adapters are not replayed."""
        return 0 if self._pool is None else self._num_pages * self._pool.page_rank

    def drop_mixed(self) -> None:
        """Drop the recordings with chunks."""
        self.kinds = replace(self.kinds, mixed_sizes=())
        self._replays = {each: run for each, run in self._replays.items() if not each.has_chunks}

    def forward(self, batch: ScheduledBatch) -> tuple[Tensor, Tensor] | None:
        """Replay a batch without rows of prompt tables: fill the cache and return the last layer's output.

        Args:
            batch: The batch, already applied to the slot table.

        Returns:
            The output [rows, hidden_size] in the engine's dtype, valid until the next call, and the indices of
            its sampled rows [n] int64. Rows are in the order of `pack` if there are chunks, else in the order of
            `batch.generation_slots`. None, without any effect, if no recording fits: too many rows, chunks or
            adapters, or the cache cannot take the padding rows.

        Raises:
            ValueError: See `pack`.
        """
        return self._forward_mixed(batch) if batch.context else self._forward_generation(batch)

    def _forward_generation(self, batch: ScheduledBatch) -> tuple[Tensor, Tensor] | None:
        rows = generation_rows(batch, self._table)
        count = rows.shape[1]
        size = next((size for size in self.kinds.generation_sizes if size >= count), None)
        replay = None if size is None else self._find(size, False, *rows)
        if replay is None:
            return None
        recording, run = replay
        filled = np.zeros((2, recording.size), dtype=np.int64)
        filled[0] = self._table.null_slot
        filled[:, :count] = rows
        self._send(filled.reshape(-1))
        run()
        return self._hidden[:count], self._bounds[:count]

    def _forward_mixed(self, batch: ScheduledBatch) -> tuple[Tensor, Tensor] | None:
        sizes = self.kinds.mixed_sizes
        if not sizes or batch.num_tokens > sizes[-1]:
            return None
        rows = lay_out(batch, self._table)
        count, begin = len(rows.slots), rows.generation_begin
        for size, limits in self._tile_limits.items():
            if size >= count and len(tiles := cut_into_tiles(rows.chunks, limits.rows)) <= limits.count:
                break
        else:
            return None
        replay = self._find(size, True, rows.slots, rows.positions)
        if replay is None:
            return None
        recording, run = replay
        parts = self._parts(recording.size, True)
        filled = np.zeros(sum(parts), dtype=np.int64)
        slots, positions, token_ids, generating, tile_rows = np.split(filled, np.cumsum(parts)[:-1])
        slots[:count], slots[count:] = rows.slots, self._table.null_slot
        positions[:count] = rows.positions
        token_ids[:begin], token_ids[begin:] = rows.known_ids[:begin], -1
        generating[: count - begin], generating[count - begin :] = range(begin, count), -1
        tile_rows.reshape(-1, 4)[: len(tiles)] = tiles
        self._send(filled)
        run()
        return self._hidden[:count], upload(np.array(rows.sampled, dtype=np.int64), self._hidden.device)

    def _find(
        self, size: int, has_chunks: bool, slots: Numbers, positions: Numbers
    ) -> tuple[_Recording, Callable[[], None]] | None:
        """Return the recording of this size and set the rows' adapters; None if the recording cannot take the
        rows."""
        if not self._cache.has_room_beside(slots, positions, size - len(slots)):
            return None
        adapters = adapters_of(slots, self._table)
        if adapters is not None and not self._set_adapters(adapters, size):
            return None
        recording = _Recording(size, has_chunks, adapters is not None)
        return recording, self._replays[recording]

    def _parts(self, size: int, has_chunks: bool) -> list[int]:
        """Return the lengths of a recording's inputs for `size` rows: slots, positions; with chunks also token ids
        (-1 where the slot's last token is the input), generation rows, tiles."""
        if not has_chunks:
            return [size, size]
        return [size, size, size, min(size, self._table.null_slot), 4 * self._tile_limits[size].count]

    def _send(self, numbers: NDArray[np.int64]) -> None:
        self._numbers[: len(numbers)].copy_(staged(numbers, self._numbers.device), non_blocking=True)

    def _set_adapters(self, adapters: NDArray[np.int64], size: int) -> bool:
        """Set the rows' adapters; return False if their pages are more than the recorded number."""
        assert self._pool is not None, "rows have adapters only if there is a pool"
        found, most = self._pool.find(adapters), self._num_pages
        if found.magnitude_rows is not None or len(found.pages) > most:
            return False
        filled = np.full(2 * most + size, -1, dtype=np.int64)
        filled[: 2 * most] = found.padded(most)
        filled[2 * most :][: len(adapters)] = adapters
        self._adapters[: len(filled)].copy_(staged(filled, self._adapters.device), non_blocking=True)
        return True

    def _capture(self, recording: _Recording, capture: Capture) -> Callable[[], None]:
        parts = self._parts(recording.size, recording.has_chunks)
        numbers = np.zeros(sum(parts), dtype=np.int64)
        numbers[: recording.size] = self._table.null_slot
        self._send(numbers)
        return capture(lambda: self._run(recording))

    def _run(self, recording: _Recording) -> None:
        size, table = recording.size, self._table
        parts = self._parts(size, recording.has_chunks)
        slots, positions, *others = self._numbers[: sum(parts)].split_with_sizes(parts)
        token_ids = table.last_tokens[slots]
        if recording.has_chunks:
            known_ids, generating, tiles = others
            token_ids = torch.where(known_ids < 0, token_ids, known_ids)
            fixed = FixedRows(tiles.view(-1, 4), generating, self._tile_limits[size].rows)
        else:
            fixed = FixedRows(slots.new_empty((0, 4)), self._bounds[:size], tile_rows=1)
        packed = PackedBatch(
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            sampled_rows=self._bounds[:size],
            bounds=self._bounds[: size + 1],
            chunks=(),
            generation_begin=0,
            generation_lengths=np.empty(0, dtype=np.int64),  # attention of fixed shapes does not use these
            block_tables=table.block_tables,
            fixed=fixed,
        )
        active = None
        if recording.with_adapters and self._pool is not None:
            numbers = [self._num_pages, self._num_pages, size]
            pages, owners, adapters = self._adapters[: sum(numbers)].split_with_sizes(numbers)
            active = ActiveAdapters.of_rows(self._pool.layers, adapters, pages, owners)
        self._hidden[:size].copy_(self._decoder.forward(packed, self._cache, active=active))

"""Generation batches as recorded operations: a forward pass is one call to the device instead of hundreds.

A recording is of a fixed number of rows and reads and writes fixed memory. So a few numbers of rows are recorded,
a batch is filled up to the next of them with rows of the null slot, which write into the null block, and what
differs from batch to batch, slots and positions, is copied to where the recordings read it. Everything else, block
tables and last tokens, is in the slot table already. Knows no CUDA: who records is given. Called by the loop
thread.

Where LoRA adapters are taken, every number of rows is recorded a second time, with a fixed number of pages of
adapters, for batches in which some row has an adapter. A batch whose adapters have more pages, or magnitudes, is
not replayed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inflight.decoding.transfer import staged
from inflight.engine.packing import PackedBatch, adapters_of
from inflight.engine.slots import SlotTable
from inflight.engine.torch.adapters import ActiveAdapters
from inflight.engine.torch.decoder import Decoder
from inflight.engine.torch.kv_cache import KvCache

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Runs operations and records them; what it returns runs them again, on what is in the same memory by then."""

_STEP = 8  # rows; fewer cost as much
_GRAPH_BYTES = 32 << 20
_ADAPTER_RANKS = 128
"""Of all adapters of a recorded batch, rounded to pages: 8 of rank 16. A replay multiplies so many in any case."""


def graph_bytes(most: int, with_adapters: bool = False) -> int:
    """About what the recordings for up to `most` rows take on the device, generously: it is not known before."""
    return _GRAPH_BYTES * len(recorded_sizes(most)) * (2 if with_adapters else 1)


def recorded_sizes(most: int) -> list[int]:
    """Numbers of rows, ascending, up to `most`: each at most a quarter, or 8 rows, above the one before."""
    sizes = [size for size in (1, 2, 4) if size < most]
    size = _STEP
    while size < most:
        sizes.append(size)
        size += max(_STEP, (1 << (size.bit_length() - 1)) // 4)
    return [*sizes, most]


class GenerationGraphs:
    """Recordings of a decoder's layers, for up to as many rows as there are slots.

    Args:
        decoder: With an attention that has fixed shapes, all of a model.
        table: Whose slots the rows are.
        cache: Which the recordings write to for good.
        capture: Records.
    """

    def __init__(self, decoder: Decoder, table: SlotTable, cache: KvCache, capture: Capture) -> None:
        self._decoder, self._table, self._cache = decoder, table, cache
        device, most = cache.device, table.null_slot
        self._sizes = recorded_sizes(most)
        self._rows = torch.zeros(2 * most, dtype=torch.int64, device=device)
        self._bounds = torch.arange(most + 1, device=device)
        shape = (most, decoder.config.hidden_size)
        self._hidden = torch.zeros(shape, dtype=decoder.dtype, device=device)
        self._pool = pool = decoder.adapters
        num_pages = 0 if pool is None else min(pool.num_pages, max(1, _ADAPTER_RANKS // pool.page_rank))
        self._num_pages = num_pages
        # Pages, each one's owner, and each row's adapter, as `ActiveAdapters.of_rows` takes them.
        self._adapters = torch.zeros(2 * num_pages + most, dtype=torch.int64, device=device)
        # The largest first: the others find room in its memory.
        self._replays = {
            (size, with_adapters): self._capture(size, with_adapters, capture)
            for with_adapters in ((False,) if pool is None else (True, False))
            for size in reversed(self._sizes)
        }

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of rows that are recorded, ascending."""
        return tuple(self._sizes)

    @property
    def count(self) -> int:
        """How many recordings there are."""
        return len(self._replays)

    @property
    def adapter_ranks(self) -> int:
        """Ranks that the adapters of a replayed batch may have together; 0: none has any."""
        return 0 if self._pool is None else self._num_pages * self._pool.page_rank

    def forward(self, rows: NDArray[np.int64]) -> tuple[Tensor, Tensor] | None:
        """The last layer's output for generation rows; fills the cache.

        Args:
            rows: [2, n] on the host: slots and positions, n from 1 to the number of slots.

        Returns:
            [n, hidden_size] in the engine's dtype, valid until the next call, and [n] int64, which of its rows
            choose tokens: all. None, and nothing is done, if the rows' adapters are more than is recorded.
        """
        count = rows.shape[1]
        size = next(size for size in self._sizes if size >= count)
        adapters = adapters_of(rows[0], self._table)
        if adapters is not None and not self._set_adapters(adapters, size):
            return None
        self._set_rows(rows, size)
        self._replays[size, adapters is not None]()
        return self._hidden[:count], self._bounds[:count]

    def _set_rows(self, rows: NDArray[np.int64], size: int) -> None:
        filled = np.zeros((2, size), dtype=np.int64)
        filled[0] = self._table.null_slot
        filled[:, : rows.shape[1]] = rows
        self._rows[: 2 * size].copy_(staged(filled.reshape(-1), self._rows.device), non_blocking=True)

    def _set_adapters(self, adapters: NDArray[np.int64], size: int) -> bool:
        """Say which adapters the rows have; False if these are more than is recorded."""
        assert self._pool is not None, "rows have adapters only where there is room for some"
        found, most = self._pool.find(adapters), self._num_pages
        if found.magnitude_rows is not None or len(found.pages) > most:
            return False
        filled = np.full(2 * most + size, -1, dtype=np.int64)
        filled[: 2 * most] = found.padded(most)
        filled[2 * most :][: len(adapters)] = adapters
        self._adapters[: len(filled)].copy_(staged(filled, self._adapters.device), non_blocking=True)
        return True

    def _capture(self, size: int, with_adapters: bool, capture: Capture) -> Callable[[], None]:
        self._set_rows(np.empty((2, 0), dtype=np.int64), size)
        return capture(lambda: self._run(size, with_adapters))

    def _run(self, size: int, with_adapters: bool) -> None:
        slots, positions = self._rows[: 2 * size].view(2, size).unbind()
        packed = PackedBatch(
            token_ids=self._table.last_tokens[slots],
            positions=positions,
            slots=slots,
            sampled_rows=self._bounds[:size],
            bounds=self._bounds[: size + 1],
            chunks=(),
            generation_begin=0,
            generation_lengths=np.empty(0, dtype=np.int64),  # attention of fixed shapes does not ask
            block_tables=self._table.block_tables,
        )
        active = None
        if with_adapters and self._pool is not None:
            parts = [self._num_pages, self._num_pages, size]
            pages, owners, adapters = self._adapters[: sum(parts)].split(parts)
            active = ActiveAdapters.of_rows(self._pool.layers, adapters, pages, owners)
        self._hidden[:size].copy_(self._decoder.forward(packed, self._cache, active=active))

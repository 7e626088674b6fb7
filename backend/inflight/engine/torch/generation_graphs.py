"""Generation batches as recorded operations: a forward pass is one call to the device instead of hundreds.

A recording is of a fixed number of rows and reads and writes fixed memory. So a few numbers of rows are recorded,
a batch is filled up to the next of them with rows of the null slot, which write into the null block, and what
differs from batch to batch, slots and positions, is copied to where the recordings read it. Everything else, block
tables and last tokens, is in the slot table already. Knows no CUDA: who records is given. Called by the loop
thread.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inflight.decoding.transfer import staged
from inflight.engine.packing import PackedBatch
from inflight.engine.slots import SlotTable
from inflight.engine.torch.decoder import Decoder
from inflight.engine.torch.kv_cache import KvCache

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Runs operations and records them; what it returns runs them again, on what is in the same memory by then."""

_STEP = 8  # rows; fewer cost as much
_GRAPH_BYTES = 32 << 20


def graph_bytes(most: int) -> int:
    """About what the recordings for up to `most` rows take on the device, generously: it is not known before."""
    return _GRAPH_BYTES * len(recorded_sizes(most))


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
        # The largest first: the others find room in its memory.
        self._replays = {size: self._capture(size, capture) for size in reversed(self._sizes)}

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of rows that are recorded, ascending."""
        return tuple(self._sizes)

    def forward(self, rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """The last layer's output for generation rows; fills the cache.

        Args:
            rows: [2, n] on the host: slots and positions, n from 1 to the number of slots.

        Returns:
            [n, hidden_size] in the engine's dtype, valid until the next call, and [n] int64, which of its rows
            choose tokens: all.
        """
        count = rows.shape[1]
        size = next(size for size in self._sizes if size >= count)
        self._set_rows(rows, size)
        self._replays[size]()
        return self._hidden[:count], self._bounds[:count]

    def _set_rows(self, rows: NDArray[np.int64], size: int) -> None:
        filled = np.zeros((2, size), dtype=np.int64)
        filled[0] = self._table.null_slot
        filled[:, : rows.shape[1]] = rows
        self._rows[: 2 * size].copy_(staged(filled.reshape(-1), self._rows.device), non_blocking=True)

    def _capture(self, size: int, capture: Capture) -> Callable[[], None]:
        self._set_rows(np.empty((2, 0), dtype=np.int64), size)
        return capture(lambda: self._run(size))

    def _run(self, size: int) -> None:
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
        self._hidden[:size].copy_(self._decoder.forward(packed, self._cache))

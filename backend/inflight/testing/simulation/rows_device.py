"""A device with linear caches: attention reads a slot's row, which is filled from blocks.

It makes exactly the copies that `RowResidency` requests. It fails an assertion if a row's content differs from
its blocks, or if values of an earlier sequence are left after a sequence's end.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from inflight.core.schedule.batch import EngineLimits, ScheduledBatch, SlotStart
from inflight.engine.tensorrt.row_residency import RowResidency

from .device import SimulatedDevice

_ZERO = 0


class RowsDevice(SimulatedDevice):
    """A `SimulatedDevice` whose linear caches are one row for each slot.

    Attributes:
        num_loads: Columns copied from blocks.
        num_spared: Chunks of starting sequences whose first tokens came from the cache.
    """

    num_loads = num_spared = 0

    def __init__(self, limits: EngineLimits, seed: int) -> None:
        super().__init__(limits, seed)
        size = limits.tokens_per_block
        num_columns = -(-limits.max_sequence_length // size)
        self._rows = [[_ZERO] * (num_columns * size) for _ in range(limits.max_num_sequences)]
        self._is_breaking = False
        self._residency = RowResidency(limits.max_num_sequences, num_columns, size, limits.num_blocks)

    @contextmanager
    def _forgotten_on_failure(
        self, batch: ScheduledBatch, starts: Sequence[SlotStart], loads: Sequence[Any] = ()
    ):
        with super()._forgotten_on_failure(batch, starts, loads):
            try:
                yield
            except BaseException:
                self._residency.forget(batch)
                raise

    def break_down(self, batch: ScheduledBatch) -> None:
        """Fail like a `SimulatedDevice`; rows may keep a wrong content."""
        self._is_breaking = True
        try:
            super().break_down(batch)
        finally:
            self._is_breaking = False

    def _apply(self, batch: ScheduledBatch) -> None:
        super()._apply(batch)
        num_tokens = np.zeros(self.limits.max_num_sequences, np.int64)
        for slot, held in self._slots.items():
            num_tokens[slot] = held.num_tokens
        size = self.limits.tokens_per_block
        changes = self._residency.apply(batch, num_tokens)
        if self._is_breaking and changes:
            changes = changes[: self._rng.randrange(len(changes))]
        for change in changes:
            row = self._rows[change.slot]
            if change.cleared_from is not None:
                row[change.cleared_from :] = [_ZERO] * (len(row) - change.cleared_from)
            RowsDevice.num_loads += len(change.loads)
            for load in change.loads:
                begin = load.column * size
                row[begin : begin + load.num_tokens] = self._cache[load.block_id][: load.num_tokens]
        starting = {start.slot for start in batch.starts}
        for chunk in batch.context:
            if chunk.slot in starting:
                RowsDevice.num_spared += chunk.start > 0
                behind = self._rows[chunk.slot][chunk.start :]
                assert not any(behind), "the row still has values of the slot's previous sequence"

    def _run_token(self, row: Any, token_id: int, later: Sequence[int] = ()) -> int:
        """Compute a token like the base class, but read the slot's row instead of blocks."""
        slot = next(slot for slot, held in self._slots.items() if held is row)
        position, size = row.num_tokens, self.limits.tokens_per_block
        block_ids: list[int] = row.block_table
        held = [digest for block_id in block_ids for digest in self._cache[block_id]]
        assert self._rows[slot][:position] == held[:position], "the row's content differs from its blocks"
        digest = super()._run_token(row, token_id, later)
        assert self._cache[row.block_table[position // size]][position % size] == digest
        self._rows[slot][position] = digest
        return digest

"""The linear KV caches of a plan, one row per slot, and the blocks from which rows are copied.

    rows    [layers, 2, slots, kv_heads, length, head_dim]; 2 is keys, values
    blocks  as `engine.kv_cache` has them, [layers, 2, blocks, tokens_per_block, kv_heads, head_dim]

A plan reads and writes rows only. This module makes the copies that `RowResidency` asks for, in a few operations
over all layers, as rows are one tensor and blocks another. If sequences cannot share blocks, there are only rows,
and block ids are just numbers for the scheduler. Used on the loop thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inflight.core.schedule.batch import ScheduledBatch
from inflight.engine.host_memory import zeros
from inflight.engine.kv_cache import KvCache, Numbers
from inflight.engine.tensorrt.row_residency import RowChange, RowResidency
from inflight.models import DecoderConfig
from inflight.sampling.transfer import upload

_TOKENS_AT_ONCE = 256  # tokens copied at a time: 32 MiB for a model with 128 KiB per token


def row_bytes(held: DecoderConfig, max_seq_len: int, dtype: torch.dtype) -> int:
    """Return the size of a slot's row over all layers in bytes."""
    return 2 * held.num_layers * held.kv_size * max_seq_len * dtype.itemsize


class RowCache:
    """Device memory for rows, and for blocks if there are any.

    Args:
        held: This rank's part of the model.
        num_slots: Number of rows.
        max_seq_len: Number of positions of a row.
        num_blocks: Number of block ids that the scheduler uses.
        tokens_per_block: Tokens per block.
        shares_blocks: Whether sequences may share or reuse blocks; if not, there are no blocks.
        dtype: Data type of keys and values.
        device: The device of all memory.

    Attributes:
        null_block: Id of the block that no sequence uses.
        num_blocks: The argument of the same name.
        tokens_per_block: The argument of the same name.
        num_slots: The argument of the same name.
        length: Number of positions of a row.
    """

    def __init__(
        self,
        held: DecoderConfig,
        num_slots: int,
        max_seq_len: int,
        num_blocks: int,
        tokens_per_block: int,
        shares_blocks: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (held.num_layers, 2, num_slots, held.num_kv_heads, max_seq_len, held.head_dim)
        on_host = device.type == "cpu"
        self._rows = zeros(shape, dtype) if on_host else torch.zeros(shape, dtype=dtype, device=device)
        self._blocks = KvCache(held, num_blocks, tokens_per_block, dtype, device) if shares_blocks else None
        self._residency = RowResidency(
            num_slots, -(-max_seq_len // tokens_per_block), tokens_per_block, num_blocks
        )
        self.null_block = self.num_blocks = num_blocks
        self.tokens_per_block = tokens_per_block
        self.num_slots = num_slots
        self.length = max_seq_len

    @property
    def states(self) -> None:
        """Always None, because plans do not support recurrent layers."""
        return

    @property
    def device(self) -> torch.device:
        """The device that the cache is on."""
        return self._rows.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of keys and values."""
        return self._rows.dtype

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values in a plan's form: [slots, kv_heads, length, head_dim], contiguous."""
        keys, values = self._rows[index]
        return keys, values

    def as_bytes(self) -> None:
        """Return None: the cache consists of the rows of slots, and blocks are copies that may be outdated."""

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        self._known_blocks().copy(sources, targets)

    def clear(self, block_ids: Tensor) -> None:
        self._known_blocks().clear(block_ids)

    def has_room_beside(self, slots: Numbers, positions: Numbers, num_rows: int) -> bool:
        """See `BlockCache`: whether `fill_up` finds enough unused positions for `num_rows` padding rows."""
        lengths = np.full(self.num_slots, self.length, dtype=np.int64)
        lengths[slots] = 0
        np.maximum.at(lengths, slots, np.asarray(positions) + 1)
        return int((self.length - lengths).sum()) >= num_rows

    def prepare(self, batch: ScheduledBatch, num_tokens: NDArray[np.int64]) -> None:
        """Copy to the cache's rows the data that the batch reads; called after the batch's block copies.

        For the arguments see `RowResidency.apply`.

        Raises:
            ValueError: A row needs the data of another row, and there are no blocks.
        """
        changes = self._residency.apply(batch, num_tokens)
        for change in changes:
            if change.cleared_from is not None:
                self._rows[:, :, change.slot, :, change.cleared_from :] = 0
        if any(change.loads for change in changes):
            self._load(changes)

    def forget(self, batch: ScheduledBatch) -> None:
        """Forget the slots of a failed batch."""
        self._residency.forget(batch)

    def write_through(self, slots: Tensor, positions: Tensor, places: Tensor) -> None:
        """Copy the keys and values that a batch has written from rows to blocks.

        Args:
            slots: [n] int64 on the device.
            positions: [n] int64 on the device: positions in the slots' rows.
            places: [n] int64 on the device: places in the blocks, block * tokens_per_block + offset.
        """
        if self._blocks is None:
            return
        tokens = self._blocks.all_tokens
        for begin in range(0, len(slots), _TOKENS_AT_ONCE):
            some = slice(begin, begin + _TOKENS_AT_ONCE)
            written = self._rows[:, :, slots[some], :, positions[some]]  # [n, layers, 2, kv_heads, head_dim]
            tokens[:, :, places[some]] = written.permute(1, 2, 0, 3, 4)

    def _load(self, changes: Sequence[RowChange]) -> None:
        tokens, size = self._known_blocks().all_tokens, self.tokens_per_block
        parts = [
            (change.slot, load.column * size, load.block_id * size, load.num_tokens)
            for change in changes
            for load in change.loads
        ]
        slots, firsts, places, counts = np.array(parts, dtype=np.int64).T
        within = np.arange(int(counts.sum())) - np.repeat(counts.cumsum() - counts, counts)
        numbers = np.stack([np.repeat(each, counts) for each in (slots, firsts, places)])
        numbers[1:] += within
        for part in torch.split(upload(numbers, self.device), _TOKENS_AT_ONCE, dim=1):
            of_slot, positions, place = part
            read = tokens[:, :, place]  # [layers, 2, n, kv_heads, head_dim]
            self._rows[:, :, of_slot, :, positions] = read.permute(2, 0, 1, 3, 4)

    def _known_blocks(self) -> KvCache:
        if self._blocks is None:
            raise ValueError("a sequence reuses another's blocks, but this cache keeps none")
        return self._blocks

"""Rotary positions of sequences with multimodal rotary embedding (mRoPE), where they are not the tokens' indices.

A request brings cosines and sines for the tokens of its prompt, and a number that is added to the index of each
generated token. Used on the loop thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inflight.core.request.prompt_table import RotaryTable
from inflight.core.schedule.batch import ScheduledBatch
from inflight.engine.matrices import to_tensor
from inflight.sampling.transfer import upload


@dataclass(frozen=True, slots=True)
class RowRotations:
    """The rotations of the rows of a forward pass that has sequences with rotary tables.

    Attributes:
        positions: [rows] int64 on the device: each row's rotary position; any one for the rows in `given`.
        given: [n] int64 on the device, indices of the rows whose cosines and sines the requests bring.
        cos, sin: [n, rotary_dim / 2] float32 on the device.
    """

    positions: Tensor
    given: Tensor
    cos: Tensor
    sin: Tensor

    def of_rows(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin of each row, [rows, rotary_dim / 2], from the model's tables by position."""
        return (
            cos[self.positions].index_copy_(0, self.given, self.cos),
            sin[self.positions].index_copy_(0, self.given, self.sin),
        )


@dataclass(frozen=True, slots=True)
class _SlotRotations:
    """A slot's cosines and sines [prompt tokens, rotary_dim / 2] on the device, and the request's table."""

    cos: Tensor
    sin: Tensor
    of: RotaryTable


class RotaryTables:
    """The rotary tables by slot; sequences with equal tables share one copy."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tables: dict[int, _SlotRotations] = {}

    def apply(self, batch: ScheduledBatch) -> None:
        """Drop the tables of released slots, load those of sequences that start, and follow the moves of beams."""
        for slot in batch.released_slots if self._tables else ():
            self._tables.pop(slot, None)
        for start in batch.starts:
            table = start.request.rotary_table
            if table is not None:
                self._tables[start.slot] = self._fetch(table, start.request.prompt_length)
            else:
                self._tables.pop(start.slot, None)
        if self._tables and batch.moves:
            parents = {move.slot: self._tables.get(move.parent_slot) for move in batch.moves}
            for slot, table in parents.items():
                self._tables.pop(slot, None)
                if table is not None:
                    self._tables[slot] = table

    def have_rows_in(self, batch: ScheduledBatch) -> bool:
        """Whether the batch has rows of a slot with a table."""
        if not self._tables:
            return False
        slots = (*(chunk.slot for chunk in batch.context), *batch.generation_slots)
        return not self._tables.keys().isdisjoint(slots)

    def rotations(self, slots: Sequence[int], positions: Sequence[int]) -> RowRotations | None:
        """Return the rotations of rows, given their slots and positions; None if no row's slot has a table."""
        if not self._tables or self._tables.keys().isdisjoint(slots):
            return None
        of_slots, indices = np.array(slots, dtype=np.int64), np.array(positions, dtype=np.int64)
        rotary = indices.copy()
        given: list[NDArray[np.int64]] = []
        cos: list[Tensor] = []
        sin: list[Tensor] = []
        for slot, table in self._tables.items():
            rows = np.flatnonzero(of_slots == slot)
            in_prompt = rows[indices[rows] < len(table.cos)]
            rotary[rows] += table.of.delta
            rotary[in_prompt] = 0
            if len(in_prompt):
                places = upload(indices[in_prompt], self._device)
                given.append(in_prompt)
                cos.append(table.cos[places])
                sin.append(table.sin[places])
        if not given:
            given, empty = [np.empty(0, dtype=np.int64)], torch.empty(0, device=self._device)
            cos = sin = [empty.reshape(0, next(iter(self._tables.values())).cos.shape[1])]
        return RowRotations(
            upload(rotary, self._device),
            upload(np.concatenate(given), self._device),
            torch.cat(cos),
            torch.cat(sin),
        )

    def _fetch(self, table: RotaryTable, num_tokens: int) -> _SlotRotations:
        for there in self._tables.values():
            if there.of.digest == table.digest and len(there.cos) == num_tokens:
                return there
        rows = to_tensor(table.cos_sin, self._device)[:num_tokens]
        pairs = rows.view(len(rows), -1, 2)
        return _SlotRotations(pairs[..., 0].contiguous(), pairs[..., 1].contiguous(), table)

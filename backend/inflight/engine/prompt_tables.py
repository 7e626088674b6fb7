"""The prompt tables of running sequences, on the device from a sequence's start until it leaves its slot.

Token ids from the vocabulary's size on are virtual: they stand for rows of the request's table, which replace
embeddings. Only context chunks have virtual ids, as the model never generates them. Used on the loop thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inflight.core.request.prompt_table import PromptTable
from inflight.core.schedule.batch import ScheduledBatch
from inflight.engine.matrices import to_tensor
from inflight.sampling.transfer import upload


@dataclass(frozen=True, slots=True)
class VirtualRows:
    """The rows of a forward pass with virtual tokens.

    Attributes:
        rows: [n] int64 on the device, indices of the rows.
        embeddings: [n, hidden_size] on the device, in the model's dtype: the rows' embeddings.
        added: For each of the first layers, [n, hidden_size] to add to the rows after the layer.
    """

    rows: Tensor
    embeddings: Tensor
    added: tuple[Tensor, ...] = ()

    def add_after(self, layer: int, x: Tensor) -> bool:
        """Add to x [rows, hidden_size], in place, what follows a layer of the whole model; return whether anything
        does."""
        if layer >= len(self.added):
            return False
        x.index_add_(0, self.rows, self.added[layer])
        return True


class PromptTables:
    """The tables by slot; sequences with equal tables share one copy.

    Args:
        vocab_size: The first virtual id.
        dtype: The model's data type, to which tables are converted.
        device: The device of the tables.
        hidden_size: The model's width; wider tables have more to add after the first layers.
        is_needed: Whether this rank uses tables: not a pipeline stage that neither embeds tokens nor adds rows.
    """

    def __init__(
        self,
        vocab_size: int,
        dtype: torch.dtype,
        device: torch.device,
        hidden_size: int,
        is_needed: bool = True,
    ) -> None:
        self._vocab_size, self._dtype, self._device = vocab_size, dtype, device
        self._hidden_size, self._is_needed = hidden_size, is_needed
        self._tables: dict[int, tuple[bytes, Tensor]] = {}  # by slot: the table's digest, [rows, width]

    @property
    def num_tables(self) -> int:
        """Number of different tables on the device."""
        return len({digest for digest, _ in self._tables.values()})

    def apply(self, batch: ScheduledBatch) -> None:
        """Drop the tables of released slots, and load the tables of sequences that start."""
        if self._tables:
            for slot in batch.released_slots:
                self._tables.pop(slot, None)
        for start in batch.starts:
            table = start.request.prompt_table
            if table is not None and self._is_needed:
                self._tables[start.slot] = table.digest, self._fetch(table)
            elif self._tables:
                self._tables.pop(start.slot, None)

    def virtual_rows(self, batch: ScheduledBatch) -> VirtualRows | None:
        """Return the batch's virtual tokens, with row indices in the order of `pack`; None if there are none."""
        found = list(self._find(batch)) if self._tables else []
        if not found:
            return None
        rows = upload(np.concatenate([rows for rows, _ in found]), self._device)
        width = self._hidden_size
        parts = [table.split_with_sizes([width] * (table.shape[1] // width), dim=1) for _, table in found]
        embeddings, *added = (torch.cat(each) for each in self._aligned(parts))
        return VirtualRows(rows, embeddings, tuple(added))

    @staticmethod
    def _aligned(parts: Sequence[Sequence[Tensor]]) -> Iterator[list[Tensor]]:
        """Yield the parts of all tables by index; a narrower table adds zeros."""
        for index in range(max(map(len, parts))):
            yield [part[index] if index < len(part) else torch.zeros_like(part[0]) for part in parts]

    def _find(self, batch: ScheduledBatch) -> Iterator[tuple[NDArray[np.int64], Tensor]]:
        """Yield for each chunk with virtual tokens the indices of their rows, and their tables' rows."""
        begin = 0
        for chunk in batch.context:
            if chunk.slot in self._tables:
                ids = np.array(chunk.token_ids, dtype=np.int64) - self._vocab_size
                virtual = np.flatnonzero(ids >= 0)
                if len(virtual):
                    _, table = self._tables[chunk.slot]
                    yield begin + virtual, table[upload(ids[virtual], self._device)]
            begin += len(chunk.token_ids)

    def _fetch(self, table: PromptTable) -> Tensor:
        for digest, there in self._tables.values():
            if digest == table.digest:
                return there
        return to_tensor(table.rows, self._device).to(self._dtype)

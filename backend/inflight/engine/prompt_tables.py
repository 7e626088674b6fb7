"""The prompt tables of running sequences, on the device from a sequence's start until it leaves its slot.

Token ids from the vocabulary's size on are virtual: they stand for rows of the request's table, which replace
embeddings. Only context chunks have virtual ids, as the model never generates them. Used on the loop thread.
"""

from __future__ import annotations

from collections.abc import Iterator
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
    """

    rows: Tensor
    embeddings: Tensor


class PromptTables:
    """The tables by slot; sequences with equal tables share one copy.

    Args:
        vocab_size: The first virtual id.
        dtype: The model's data type, to which tables are converted.
        device: The device of the tables.
        is_first_stage: Whether tokens are embedded on this rank; other pipeline stages need no tables.
    """

    def __init__(
        self, vocab_size: int, dtype: torch.dtype, device: torch.device, is_first_stage: bool = True
    ) -> None:
        self._vocab_size, self._dtype, self._device = vocab_size, dtype, device
        self._is_first_stage = is_first_stage
        self._tables: dict[int, tuple[bytes, Tensor]] = {}  # by slot: the table's digest, [rows, hidden_size]

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
            if table is not None and self._is_first_stage:
                self._tables[start.slot] = table.digest, self._fetch(table)
            elif self._tables:
                self._tables.pop(start.slot, None)

    def virtual_rows(self, batch: ScheduledBatch) -> VirtualRows | None:
        """Return the batch's virtual tokens, with row indices in the order of `pack`; None if there are none."""
        found = list(self._find(batch)) if self._tables else []
        if not found:
            return None
        rows = upload(np.concatenate([rows for rows, _ in found]), self._device)
        return VirtualRows(rows, torch.cat([embeddings for _, embeddings in found]))

    def _find(self, batch: ScheduledBatch) -> Iterator[tuple[NDArray[np.int64], Tensor]]:
        """Yield for each chunk with virtual tokens the indices of their rows, and their embeddings."""
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

"""The rows of one batch's logits, with what their slots remember."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from inflight.decoding.slot_parameters import Needs
from inflight.decoding.transfer import upload


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of logits; arrays are on the host.

    Attributes:
        logits: [rows, vocab_size] float32, contiguous.
        slots: [rows].
        positions: [rows] absolute position of the token to be chosen.
        numbers: [rows] of PARAMETERS.
    """

    logits: Tensor
    slots: NDArray[np.int64]
    positions: NDArray[np.int64]
    numbers: NDArray

    @property
    def vocab_size(self) -> int:
        """Length of a row."""
        return self.logits.shape[-1]

    def needing(self, needs: Needs) -> NDArray[np.int64]:
        """Indices of the rows that ask for any of `needs`."""
        return np.flatnonzero(self.numbers["needs"] & int(needs))

    def select(self, indices: NDArray[np.int64]) -> Rows:
        """These rows in this order."""
        return Rows(
            take_rows(self.logits, indices),
            self.slots[indices],
            self.positions[indices],
            self.numbers[indices],
        )

    def upload(self, values: NDArray) -> Tensor:
        """A host array on the logits' device."""
        return upload(values, self.logits.device)


def take_rows(tensor: Tensor, indices: NDArray[np.int64]) -> Tensor:
    """tensor[indices]: a view where the indices are consecutive, else a copy."""
    if len(indices) and (np.diff(indices) == 1).all():
        return tensor[int(indices[0]) : int(indices[-1]) + 1]
    return tensor[upload(indices, tensor.device)]


class RawLogits:
    """The logits as the model made them, while the pipeline works on them in place.

    Copies the rows that are both about to be changed and asked for, and no others.
    """

    def __init__(self, rows: Rows) -> None:
        self._logits = rows.logits
        needs = rows.numbers["needs"]
        is_saved = (needs & int(Needs.CHANGES) != 0) & (needs & int(Needs.RAW_LOGITS) != 0)
        self._indices = np.flatnonzero(is_saved)
        self._saved = take_rows(rows.logits, self._indices).clone() if len(self._indices) else None

    def take(self, indices: NDArray[np.int64]) -> Tensor:
        """[n, vocab_size] of rows that ask for their raw logits; not to be changed."""
        rows = take_rows(self._logits, indices)
        is_saved = np.isin(indices, self._indices)
        if self._saved is None or not is_saved.any():
            return rows
        places = upload(np.searchsorted(self._indices, indices[is_saved]), rows.device)
        if is_saved.all():
            return self._saved[places]
        rows = rows.clone()
        rows[upload(np.flatnonzero(is_saved), rows.device)] = self._saved[places]
        return rows

    def restore(self) -> None:
        """Leave the logits to others as they came, where anybody asks for them."""
        if self._saved is not None:
            self._logits[upload(self._indices, self._logits.device)] = self._saved

"""What reads whole rows of logits, and so takes most of the time that choosing tokens takes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from inflight.decoding.draws import Drawn, draw
from inflight.decoding.history import History
from inflight.decoding.nan_check import Peaks, find_peaks
from inflight.decoding.penalties import penalize
from inflight.decoding.rows import Rows


class RowKernels:
    """In torch's operators, on any device. An engine may have faster ones for its own."""

    def find_peaks(self, logits: Tensor) -> Peaks:
        """As `usable.find_peaks`, given logits as the model made them."""
        return find_peaks(logits)

    def penalize(self, rows: Rows, indices: NDArray[np.int64], history: History) -> None:
        """As `penalties.penalize`."""
        penalize(rows, indices, history)

    def draw(self, rows: Rows, sampled: NDArray[np.int64], may_guess: bool = False) -> Iterator[Drawn]:
        """As `draws.draw`."""
        return draw(rows, sampled, may_guess)

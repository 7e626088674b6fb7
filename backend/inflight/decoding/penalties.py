"""Steps 3 to 5 of the pipeline: what the tokens that were seen lose."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inflight.decoding.bounds import bounded
from inflight.decoding.history import History
from inflight.decoding.rows import Rows


def penalize(rows: Rows, indices: NDArray[np.int64], history: History) -> None:
    """Take repetition, presence and frequency penalties from the rows `indices`, in place."""
    numbers = rows.numbers[indices]
    seen = history.before(rows.slots[indices], rows.positions[indices])
    where = rows.upload(indices)[seen.rows] * rows.vocab_size + seen.token_ids
    logits = rows.logits.view(-1)
    values = logits.take(where)
    impossible = values == -torch.inf

    def per_token(parameter: NDArray[np.float64]) -> Tensor:
        return rows.upload(parameter.astype(np.float32))[seen.rows]

    repetition = numbers["repetition_penalty"]
    if (repetition != 1.0).any():
        factor = per_token(repetition)
        values = torch.where(values < 0, values * factor, values / factor)
    presence = numbers["presence_penalty"] * numbers["temperature"]
    if presence.any():
        values -= per_token(presence)
    frequency = numbers["frequency_penalty"] * numbers["temperature"]
    if frequency.any():
        # The logits themselves are the table that the tokens are counted in. All values come back below.
        logits[where] = 0.0
        logits.scatter_add_(0, where, torch.ones_like(values))
        values -= per_token(frequency) * logits.take(where)
    # A token that was seen twice is written twice, the same value.
    logits[where] = bounded(values, impossible)

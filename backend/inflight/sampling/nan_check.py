"""The check that a token can be sampled from a row of logits: its highest value must be finite.

A model whose arithmetic overflows produces rows with NaN or inf. A token sampled from such a row would be
meaningless, so the batch fails with an error that names the faulty slots. Rows are independent, so no other row is
affected: the rest of the batch, run again without the faulty slots, gets its usual tokens. A logit of -inf in a
row with finite logits is valid: that token is impossible.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from inflight.sampling.argmax import first_highest


class Peaks(NamedTuple):
    """The highest logit of each row and its token: [rows] float32, [rows] int64. NaN if the row has any NaN."""

    highest: Tensor
    tokens: Tensor


def find_peaks(logits: Tensor) -> Peaks:
    """Return the peaks of the model's unchanged logits [rows, vocab_size]; ties go to the lower token id.

    Called before the rows are processed; peaks are copied to the host together with tokens, to wait only once.
    """
    tokens = first_highest(logits)
    return Peaks(logits.gather(-1, tokens[:, None]).squeeze(-1), tokens)


def check_peaks(
    highest: NDArray[np.float32], slots: Sequence[int] | NDArray[np.int64], positions: NDArray[np.int64]
) -> None:
    """Raise FloatingPointError if a row's highest logit is not finite, so that no token can be sampled from it.

    Args:
        highest: [rows] on the host, from `find_peaks`, for rows whose tokens are used.
        slots: [rows] the rows' slots.
        positions: [rows] absolute position of the token to be sampled.

    Raises:
        FloatingPointError: The message has slot, position and value of each such row.
    """
    if not all(map(math.isfinite, highest.tolist())):  # faster than numpy for few rows
        rows = np.flatnonzero(~np.isfinite(highest))
        found = ", ".join(
            f"{highest[row]} for position {positions[row]} of slot {slots[row]}" for row in rows
        )
        raise FloatingPointError(f"the model's highest logit is {found}; expected a number")

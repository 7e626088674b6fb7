"""The check that a row of logits has a token to choose at all: its highest value is finite.

A model whose arithmetic overflows makes rows of nan or inf. Any token taken from one would be an invention, so the
batch is refused, by an error that names the slots at fault. Rows are computed apart, so no other row is affected:
the rest of the batch, run again without those slots, gets the tokens that it always would have got. -inf beside
finite logits is fine: that token is impossible.
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
    """The highest logit of each row, nan where any of a row is, and its token: [rows] float32, [rows] int64."""

    highest: Tensor
    tokens: Tensor


def find_peaks(logits: Tensor) -> Peaks:
    """Find the peaks of logits [rows, vocab_size], as the model made them; of equal logits, the first token.

    Asked for before the rows are worked on, and read back with their tokens, so that nobody waits for it.
    """
    tokens = first_highest(logits)
    return Peaks(logits.gather(-1, tokens[:, None]).squeeze(-1), tokens)


def check_peaks(
    highest: NDArray[np.float32], slots: Sequence[int] | NDArray[np.int64], positions: NDArray[np.int64]
) -> None:
    """Raise for rows whose highest logit is not finite, from which no token can be chosen.

    Args:
        highest: [rows] on the host, what `find_peaks` returned, of rows whose tokens are used.
        slots: [rows].
        positions: [rows] absolute position of the token to be chosen.

    Raises:
        FloatingPointError: Names slot, position and value of each such row.
    """
    if not all(map(math.isfinite, highest.tolist())):  # of few rows quicker than numpy
        rows = np.flatnonzero(~np.isfinite(highest))
        found = ", ".join(
            f"{highest[row]} for position {positions[row]} of slot {slots[row]}" for row in rows
        )
        raise FloatingPointError(f"the model's highest logit is {found}; expected a number")

"""Operations on whole rows of logits, which take most of the time of sampling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inflight.sampling.argmax import first_highest
from inflight.sampling.history import History
from inflight.sampling.nan_check import Peaks, find_peaks
from inflight.sampling.rows import Needs, Rows, select_rows
from inflight.sampling.top_k_top_p import Drawn, draw
from inflight.sampling.transfer import as_array, as_tensor
from inflight.shared_constants import LARGEST_LOGIT, PENALTY_NAMES

PENALTIES = np.dtype([(name, np.float64) for name in PENALTY_NAMES])
"""The penalties of a row; presence and frequency penalties are multiplied by the temperature, as logits are
divided by it later."""

_UPPER_BOUNDS = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"),
    np.float32(np.inf),
    np.float32(-np.inf),
)
"""[256, 8]: for each value of a mask's byte, upper bounds of its eight tokens' logits: inf, or -inf if banned."""


class RowKernels:
    """The kernels in torch's operators, for any device. An engine may override them with faster ones for its
    device."""

    def find_peaks(self, logits: Tensor) -> Peaks:
        """Return the highest of the model's unchanged logits in each row, as `nan_check.find_peaks` does."""
        return find_peaks(logits)

    def penalize(self, rows: Rows, indices: NDArray[np.int64], history: History) -> None:
        """Apply repetition, presence and frequency penalties to the logits of the rows `indices`, in place."""
        penalties = penalties_of(rows, indices)
        seen = history.before(rows.slots[indices], rows.positions[indices])
        if (rows.numbers["needs"][indices] & int(Needs.PROMPT_TABLE)).any():
            seen = seen.below(rows.vocab_size)
        where = rows.upload(indices)[seen.rows] * rows.vocab_size + seen.token_ids
        logits = rows.logits.view(-1)
        values = logits.take(where)
        impossible = values == -torch.inf

        def per_token(name: str) -> Tensor:
            return rows.upload(penalties[name].astype(np.float32))[seen.rows]

        if (penalties["repetition"] != 1.0).any():
            factor = per_token("repetition")
            values = torch.where(values < 0, values * factor, values / factor)
        if penalties["presence"].any():
            values -= per_token("presence")
        if penalties["frequency"].any():
            # Tokens are counted in the memory of the logits; all values are restored below.
            logits[where] = 0.0
            logits.scatter_add_(0, where, torch.ones_like(values))
            values -= per_token("frequency") * logits.take(where)
        # A token that was seen twice is written twice, with equal values.
        logits[where] = bounded(values, impossible)

    def find_likeliest(self, rows: Rows, indices: NDArray[np.int64]) -> Tensor:
        """Return [n] int64 tokens with the highest logits of the rows `indices`; ties go to the lower id."""
        return first_highest(select_rows(rows.logits, indices))

    def apply_masks(self, rows: Rows, indices: NDArray[np.int64], masks: NDArray[np.int32]) -> Tensor:
        """Ban tokens outside of masks, in the logits of the rows `indices`, in place.

        Args:
            rows: The rows' logits.
            indices: [n].
            masks: [n, words] int32, contiguous; bit i of word w is 1 if token 32 * w + i may come. Bits beyond the
                vocabulary are ignored.

        Returns:
            [n] int64 allowed tokens with the highest logits, ties to the lower id; undefined where no token is
            allowed.

        Raises:
            ValueError: There is not one mask per row, or masks have fewer bits than the vocabulary has tokens.
        """
        check_shape(masks, len(indices), rows.vocab_size)
        if rows.logits.device.type == "cpu":
            return as_tensor(_apply_on_host(as_array(rows.logits), indices, masks))
        logits = select_rows(rows.logits, indices)
        logits.masked_fill_(banned_by(rows.upload(masks), rows.vocab_size), -torch.inf)
        # `logits` is a copy, as the rows are not consecutive.
        if logits.data_ptr() != rows.logits[int(indices[0])].data_ptr():
            rows.logits[rows.upload(indices)] = logits
        return first_highest(logits)

    def draw(self, rows: Rows, sampled: NDArray[np.int64], may_guess: bool = False) -> Iterator[Drawn]:
        """Sample tokens as `top_k_top_p.draw` does."""
        return draw(rows, sampled, may_guess)


def _apply_on_host(
    logits: NDArray[np.float32], indices: NDArray[np.int64], masks: NDArray[np.int32]
) -> NDArray[np.int64]:
    """Apply masks as `RowKernels.apply_masks` does, row by row, so that a row stays in the cache."""
    vocab_size = logits.shape[1]
    pieces = masks.view(np.uint8)[:, : -(-vocab_size // 8)]
    bounds = np.empty((pieces.shape[1], 8), dtype=np.float32)
    tokens = np.empty(len(indices), dtype=np.int64)
    for place, index in enumerate(indices.tolist()):
        np.take(_UPPER_BOUNDS, pieces[place], axis=0, out=bounds, mode="clip")  # other modes fill a copy
        np.minimum(logits[index], bounds.reshape(-1)[:vocab_size], out=logits[index])
        tokens[place] = logits[index].argmax()
    return tokens


def check_shape(masks: NDArray[np.int32], num_rows: int, vocab_size: int) -> None:
    """Raise ValueError unless there is one mask per row, [n, words], with a bit for each token."""
    if len(masks) != num_rows or 32 * masks.shape[1] < vocab_size:
        expected = f"[{num_rows}, at least {-(-vocab_size // 32)}]"
        raise ValueError(f"masks have shape {list(masks.shape)}, expected {expected}")


def banned_by(masks: Tensor, vocab_size: int) -> Tensor:
    """Return [n, vocab_size] bool, True for tokens outside of `masks` [n, words] int32, on the masks' device."""
    shifts = torch.arange(32, dtype=torch.int32, device=masks.device)
    bits = (masks[:, :, None] >> shifts) & 1
    return bits.view(len(masks), -1)[:, :vocab_size] == 0


def penalties_of(rows: Rows, indices: NDArray[np.int64]) -> NDArray[Any]:
    """Return the penalties of the rows `indices`, an array [n] with the dtype PENALTIES."""
    numbers = rows.numbers[indices]
    penalties = np.empty(len(indices), PENALTIES)
    penalties["repetition"] = numbers["repetition_penalty"]
    penalties["presence"] = numbers["presence_penalty"] * numbers["temperature"]
    penalties["frequency"] = numbers["frequency_penalty"] * numbers["temperature"]
    return penalties


def bounded(logits: Tensor, impossible: Tensor) -> Tensor:
    """Clamp logits to [-1e30, 1e30], except where `impossible` (bool, of the same shape) is True: there, set -inf.

    A bias may be infinite, and penalties multiply logits. If a logit overflowed, the difference of two logits
    would be NaN, and an unlikely token could not be distinguished from a banned one.
    """
    return logits.clamp(-LARGEST_LOGIT, LARGEST_LOGIT).masked_fill_(impossible, -torch.inf)

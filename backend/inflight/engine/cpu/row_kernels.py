"""RowKernels as compiled code for CPUs (source/peaks.h, masks.h, penalties.h and draw.h). Loop thread."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from weakref import ref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inflight.engine.cpu import layout
from inflight.engine.cpu.structs import Handle, MaskedRowsStruct, PenalizedRowsStruct
from inflight.sampling.history import History
from inflight.sampling.nan_check import Peaks
from inflight.sampling.rng import Purpose
from inflight.sampling.row_kernels import RowKernels, check_shape, penalties_of
from inflight.sampling.rows import Rows
from inflight.sampling.top_k_top_p import LIMITS, Drawn, limits_of, random_numbers
from inflight.sampling.transfer import as_tensor

_CHANCE = np.dtype([*LIMITS.descr, ("uniform", np.float64)])


class NativeRowKernels(RowKernels):
    """The kernels on a decoder's threads.

    Args:
        library: The compiled code.
        handle: The decoder.
    """

    def __init__(self, library: ctypes.CDLL, handle: Handle) -> None:
        self._library = library
        self._handle = handle
        self._found: tuple[ref[Tensor], Peaks] | None = None

    def note_peaks(self, logits: Tensor, peaks: Peaks) -> None:
        """Store the peaks that the forward pass found in these logits, for `find_peaks`; the logits must not
        change."""
        self._found = (ref(logits), peaks)

    def find_peaks(self, logits: Tensor) -> Peaks:
        """Find the highest logits as `RowKernels.find_peaks` does; among equal logits, the first."""
        if self._found is not None and self._found[0]() is logits:
            return self._found[1]
        return self._find_peaks(logits.contiguous(), len(logits))

    def find_likeliest(self, rows: Rows, indices: NDArray[np.int64]) -> Tensor:
        """Find tokens as `RowKernels.find_likeliest` does."""
        return self._find_peaks(rows.logits, len(indices), indices).tokens

    def apply_masks(self, rows: Rows, indices: NDArray[np.int64], masks: NDArray[np.int32]) -> Tensor:
        """Ban tokens, and find the most likely ones, as `RowKernels.apply_masks` does."""
        check_shape(masks, len(indices), rows.vocab_size)
        pieces = masks.view(np.uint16)
        tokens = torch.empty(len(indices), dtype=torch.int64)
        masked = MaskedRowsStruct(len(indices), indices.ctypes.data, pieces.ctypes.data, pieces.shape[1])
        self._library.apply_masks(
            self._handle, rows.logits.data_ptr(), rows.vocab_size, masked, tokens.data_ptr()
        )
        return tokens

    def penalize(self, rows: Rows, indices: NDArray[np.int64], history: History) -> None:
        """Penalize as `RowKernels.penalize` does."""
        penalties, table = penalties_of(rows, indices), history.table
        slots, lengths = rows.slots[indices], rows.positions[indices]
        penalized = PenalizedRowsStruct(
            len(indices),
            indices.ctypes.data,
            penalties.ctypes.data,
            table.data_ptr(),
            table.shape[1],
            slots.ctypes.data,
            lengths.ctypes.data,
        )
        status = self._library.penalize(self._handle, rows.logits.data_ptr(), rows.vocab_size, penalized)
        if status == layout.WRONG_TOKENS:
            raise IndexError(
                f"the penalized histories of slots {slots.tolist()}, {lengths.tolist()} tokens, are longer than "
                f"{table.shape[1]} or contain negative ids"
            )
        _check(status == layout.PENALIZED)

    def draw(self, rows: Rows, sampled: NDArray[np.int64], may_guess: bool = False) -> Iterator[Drawn]:
        """Draw tokens as `RowKernels.draw` does."""
        if not len(sampled):
            return
        limits = limits_of(rows, sampled)
        chances = np.empty(len(sampled), _CHANCE)
        for name in LIMITS.names or ():
            chances[name] = limits[name]
        chances["uniform"] = random_numbers(rows, Purpose.SAMPLE)[sampled]
        tokens = np.empty(len(sampled), dtype=np.int64)
        is_done = self._library.draw(
            self._handle,
            rows.logits.data_ptr(),
            rows.vocab_size,
            len(sampled),
            sampled.ctypes.data,
            chances.ctypes.data,
            tokens.ctypes.data,
        )
        _check(is_done)
        yield Drawn(sampled, as_tensor(tokens))

    def _find_peaks(self, logits: Tensor, count: int, indices: NDArray[np.int64] | None = None) -> Peaks:
        """Return the peaks of the rows `indices` [count], or of the first `count` rows."""
        peaks = Peaks(torch.empty(count), torch.empty(count, dtype=torch.int64))
        self._library.find_peaks(
            self._handle,
            logits.data_ptr(),
            logits.shape[1],
            count,
            None if indices is None else indices.ctypes.data,
            peaks.highest.data_ptr(),
            peaks.tokens.data_ptr(),
        )
        return peaks


def _check(is_done: bool) -> None:
    if not is_done:
        raise MemoryError("no memory for sampling tokens")

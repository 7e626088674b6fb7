"""What the engine remembers of each slot's SamplingConfig: arrays by slot, so that a batch is one index operation.

Host memory only: a batch's random numbers are made on the host, and greedy rows need none of this.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inflight.core.batch import SlotStart
from inflight.decoding.rng import Purpose, uniforms


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The rows of a batch that sample, one entry each; the other rows are greedy.

    Attributes:
        rows: Index of the row in the batch's logits, int64.
        temperature: float64, > 0.
        top_k: int64, 0: no limit.
        top_p: float64 in (0, 1]; 1: no limit.
        uniform: The draw's random number, float64 in [0, 1).
    """

    rows: NDArray[np.int64]
    temperature: NDArray[np.float64]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    uniform: NDArray[np.float64]


class SamplingTable:
    """Sampling parameters of every slot. Called by the loop thread."""

    def __init__(self, num_slots: int) -> None:
        self._samples = np.zeros(num_slots, dtype=bool)
        self._temperature = np.ones(num_slots, dtype=np.float64)
        self._top_k = np.zeros(num_slots, dtype=np.int64)
        self._top_p = np.ones(num_slots, dtype=np.float64)
        self._seed = np.zeros(num_slots, dtype=np.uint64)
        self._sequence_index = np.zeros(num_slots, dtype=np.int64)

    def start(self, start: SlotStart) -> None:
        """Remember how the sequence that takes a slot samples."""
        slot, sampling = start.slot, start.sampling
        self._samples[slot] = not sampling.greedy
        self._temperature[slot] = sampling.temperature
        self._top_k[slot] = sampling.top_k
        self._top_p[slot] = sampling.top_p or 1.0
        self._seed[slot] = sampling.random_seed
        self._sequence_index[slot] = start.sequence_index

    def rows(self, slots: NDArray[np.int64], positions: NDArray[np.int64]) -> SamplingRows | None:
        """Parameters and random numbers of a batch; None if all of it is greedy.

        Args:
            slots: Slot of each row of the logits.
            positions: Absolute position of the token each row is to get.
        """
        rows = np.flatnonzero(self._samples[slots])
        if rows.size == 0:
            return None
        slots = slots[rows]
        uniform = uniforms(self._seed[slots], self._sequence_index[slots], positions[rows], Purpose.SAMPLE)
        return SamplingRows(rows, self._temperature[slots], self._top_k[slots], self._top_p[slots], uniform)

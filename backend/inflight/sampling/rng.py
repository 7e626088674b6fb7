"""Counter-based random numbers: each number is a pure function of the decision for which it is used.

There is no generator state. A number depends on (seed, sequence index, position, purpose) alone, so a sequence
gets the same tokens whatever else is in its batch, however its prompt is chunked, and after a pause. The four
values are mixed one after the other into a 64-bit state with the finalizer of SplitMix64.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

GOLDEN_GAMMA = 0x9E3779B97F4A7C15


class Purpose(IntEnum):
    """The purpose of a random number, so that different decisions at one position are independent."""

    SAMPLE = 0
    ACCEPT = 1
    RESAMPLE = 2


def uniforms(
    seeds: NDArray[np.uint64],
    sequence_indices: NDArray[np.int64],
    positions: NDArray[np.int64],
    purpose: Purpose,
) -> NDArray[np.float64]:
    """Return one number in [0, 1) per row, float64 with 53 random bits; all arrays are [rows].

    `positions` are absolute positions of the tokens to be sampled; the prompt's first token has position 0.
    """
    state = _mix(seeds.astype(np.uint64))
    for value in (sequence_indices, positions, np.full_like(positions, purpose)):
        state = _mix(state ^ value.astype(np.uint64))
    return (state >> np.uint64(11)) * 2.0**-53


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply SplitMix64's step and finalizer, a bijection in which every input bit affects every output bit."""
    x = x + np.uint64(GOLDEN_GAMMA)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))

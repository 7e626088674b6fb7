"""Random numbers: a pure function of their key, uniform, and unrelated for related keys."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.sampling import reference
from inflight.sampling.rng import Purpose, uniforms

COUNT = 1 << 16


def _uniforms(seeds: object, indices: object, positions: object) -> np.ndarray:
    arrays = np.broadcast_arrays(*np.atleast_1d(seeds, indices, positions))
    kinds = (np.uint64, np.int64, np.int64)
    return uniforms(*(array.astype(kind) for array, kind in zip(arrays, kinds, strict=True)), Purpose.SAMPLE)


@settings(derandomize=True, deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31), st.integers(0, 2**31))
def test_random_numbers_are_the_same_by_arrays_and_by_integers(seed: int, index: int, position: int) -> None:
    expected = reference.uniform(seed, index, position, Purpose.SAMPLE)
    assert 0.0 <= expected < 1.0
    got = uniforms(np.array([seed], dtype=np.uint64), np.array([index]), np.array([position]), Purpose.SAMPLE)
    assert got.tolist() == [expected]


def test_random_numbers_are_fixed() -> None:
    """An update of the server must not change the tokens of a seed."""
    assert reference.uniform(0, 0, 0, Purpose.SAMPLE) == 0.1296456182997474
    assert reference.uniform(42, 1, 1000, Purpose.SAMPLE) == 0.046801124772484104


@pytest.mark.parametrize(
    "numbers",
    [
        _uniforms(0, 0, np.arange(COUNT)),
        _uniforms(np.arange(COUNT), 0, 7),
        _uniforms(3, np.arange(COUNT), 7),
        _uniforms(np.arange(COUNT), np.arange(COUNT), np.arange(COUNT)),
        _uniforms(2**63 + np.arange(COUNT, dtype=np.uint64), 0, 0),
    ],
    ids=["positions", "seeds", "sequences", "diagonal", "high seeds"],
)
def test_consecutive_keys_give_uniform_uncorrelated_numbers(numbers: np.ndarray) -> None:
    expected = COUNT / 256
    counts = np.bincount((numbers * 256).astype(int), minlength=256)
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert 165 < chi_square < 365, "255 degrees of freedom, probability 1e-5 at each end"
    for lag in (1, 2, 64):
        correlation = np.corrcoef(numbers[:-lag], numbers[lag:])[0, 1]
        assert abs(correlation) < 5 / COUNT**0.5
    assert len(set(numbers.tolist())) == COUNT


def test_swapped_key_parts_give_other_numbers() -> None:
    keys = [(1, 2, 3), (1, 3, 2), (2, 1, 3), (3, 2, 1), (2, 3, 1), (1, 1, 3), (2, 2, 3)]
    assert len({_uniforms(*key).item() for key in keys}) == len(keys)

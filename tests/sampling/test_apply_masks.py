"""Masks on rows of logits, by torch's operators and by compiled code, compared with plain numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from inflight.sampling.row_kernels import RowKernels
from inflight.sampling.rows import PARAMETERS, Rows
from tests.tiers import examples

NUM_ROWS = 9
SIZES = [1, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 77, 96, 127, 128, 1000, 4096, 50_257]
SUBSETS = {
    "all": range(NUM_ROWS),
    "one": [4],
    "neighbours": [2, 3, 4, 5],
    "others between": [0, 2, 3, 7, 8],
    "any order": [6, 1, 3],
}
KINDS = ("all", "none", "first", "last", "dense", "sparse", "runs", "half")
Mask = NDArray[np.bool_]


def make_allowed(kind: str, size: int, numbers: np.random.Generator) -> Mask:
    """Draw allowed tokens, [size] bool."""
    places = np.arange(size)
    return {
        "all": places >= 0,
        "none": places < 0,
        "first": places == 0,
        "last": places == size - 1,
        "dense": numbers.random(size) < 0.9,
        "sparse": numbers.random(size) < 0.01,
        "runs": np.repeat(numbers.random(size // 48 + 1) < 0.5, 48)[:size],  # whole registers, and half ones
        "half": places % 2 == 1,
    }[kind]


def pack(allowed: Mask, numbers: np.random.Generator, num_words: int) -> NDArray[np.int32]:
    """Pack masks into words for `apply_masks`, with random bits after the vocabulary."""
    bits = numbers.random((len(allowed), 32 * num_words)) < 0.5
    bits[:, : allowed.shape[1]] = allowed
    return np.packbits(bits, axis=1, bitorder="little").view(np.int32)


def make_logits(size: int, numbers: np.random.Generator) -> NDArray[np.float32]:
    """Draw rows of logits with some -inf and many equal values."""
    logits = numbers.normal(size=(NUM_ROWS, size)).astype(np.float32)
    logits[::2] = np.round(logits[::2])
    logits[1::3][numbers.random(logits[1::3].shape) < 0.3] = -np.inf
    logits[5] = -np.inf
    return logits


def expect(
    logits: NDArray[np.float32], indices: list[int], allowed: Mask
) -> tuple[NDArray[np.float32], list[int | None]]:
    """Return the expected logits, and for each masked row the first token with the highest logit; None if all
    are -inf."""
    logits, tokens = logits.copy(), []
    for index, of_row in zip(indices, allowed):
        logits[index, ~of_row] = -np.inf
        highest = logits[index].max()
        tokens.append(None if highest == -np.inf else int(np.flatnonzero(logits[index] == highest)[0]))
    return logits, tokens


def as_rows(logits: NDArray[np.float32], offset: int = 0) -> Rows:
    """Copy rows to memory that begins `offset` floats after a 64-byte boundary."""
    memory = torch.zeros(logits.size + 32)
    first = -memory.data_ptr() // 4 % 16 + offset
    placed = memory[first : first + logits.size].view(logits.shape)
    placed.copy_(torch.from_numpy(logits))
    slots = np.arange(len(logits))
    return Rows(placed, slots, np.ones_like(slots), np.zeros(len(logits), PARAMETERS))


def check(row_kernels: RowKernels, size: int, indices: list[int], seed: int, offset: int = 0) -> None:
    numbers = np.random.default_rng(seed)
    logits = make_logits(size, numbers)
    allowed = np.stack([make_allowed(str(numbers.choice(KINDS)), size, numbers) for _ in indices])
    masks = pack(allowed, numbers, num_words=size // 32 + 1 + seed % 2)
    expected, likeliest = expect(logits, indices, allowed)
    rows = as_rows(logits, offset)
    tokens = row_kernels.apply_masks(rows, np.array(indices), masks).tolist()
    assert np.array_equal(rows.logits.numpy(), expected)
    for token, expected_token in zip(tokens, likeliest, strict=True):
        assert token == expected_token if expected_token is not None else 0 <= token < size


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("subset", SUBSETS)
def test_exactly_the_tokens_outside_the_masks_are_banned(
    row_kernels: RowKernels, subset: str, size: int
) -> None:
    for seed in range(examples(fast=4, all=12)):
        check(row_kernels, size, list(SUBSETS[subset]), seed)


@pytest.mark.parametrize("offset", [0, 1, 4, 15])
def test_rows_may_begin_anywhere_in_memory(row_kernels: RowKernels, offset: int) -> None:
    for size in (64, 77, 4096):
        check(row_kernels, size, list(range(NUM_ROWS)), offset, offset)


@pytest.mark.parametrize("kind", KINDS)
def test_masks_of_every_kind_ban_exactly_their_tokens(row_kernels: RowKernels, kind: str) -> None:
    numbers = np.random.default_rng(3)
    allowed = np.stack([make_allowed(kind, 333, numbers) for _ in range(NUM_ROWS)])
    logits = make_logits(333, numbers)
    expected, likeliest = expect(logits, list(range(NUM_ROWS)), allowed)
    rows = as_rows(logits)
    tokens = row_kernels.apply_masks(rows, np.arange(NUM_ROWS), pack(allowed, numbers, 11)).tolist()
    assert np.array_equal(rows.logits.numpy(), expected)
    possible = [place for place, token in enumerate(likeliest) if token is not None]
    assert [tokens[place] for place in possible] == [likeliest[place] for place in possible]


@pytest.mark.parametrize("spare", [0, 1, 5])
def test_masks_may_end_with_the_vocabulary_or_later(row_kernels: RowKernels, spare: int) -> None:
    numbers = np.random.default_rng(spare)
    allowed = numbers.random((3, 64)) < 0.5
    logits = np.ones((NUM_ROWS, 64), np.float32)
    expected, _ = expect(logits, [0, 4, 8], allowed)
    rows = as_rows(logits)
    row_kernels.apply_masks(rows, np.array([0, 4, 8]), pack(allowed, numbers, 2 + spare))
    assert np.array_equal(rows.logits.numpy(), expected)


@pytest.mark.parametrize("shape", [(3, 2), (2, 3), (4, 3)])
def test_masks_of_another_shape_are_an_error_and_change_nothing(
    row_kernels: RowKernels, shape: tuple[int, int]
) -> None:
    """Compiled code would otherwise read outside of the masks."""
    rows = as_rows(np.ones((NUM_ROWS, 77), np.float32))
    with pytest.raises(
        ValueError, match=rf"masks have shape \[{shape[0]}, {shape[1]}\], expected \[3, at least 3\]"
    ):
        row_kernels.apply_masks(rows, np.array([0, 4, 8]), np.zeros(shape, np.int32))
    assert (rows.logits == 1).all()


@pytest.mark.parametrize("indices", [[0], [8, 0, 3], list(range(NUM_ROWS))])
def test_the_likeliest_tokens_of_selected_rows_equal_numpys(
    row_kernels: RowKernels, indices: list[int]
) -> None:
    for size in SIZES:
        logits = make_logits(size, np.random.default_rng(size))
        found = row_kernels.find_likeliest(as_rows(logits), np.array(indices)).tolist()
        assert found == [int(np.flatnonzero(logits[index] == logits[index].max())[0]) for index in indices]
        peaks = row_kernels.find_peaks(torch.from_numpy(logits))
        assert peaks.highest.tolist() == logits.max(axis=1).tolist()
        assert [peaks.tokens[index] for index in indices] == found

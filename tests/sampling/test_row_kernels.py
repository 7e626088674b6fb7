"""Compiled code compared with torch's operators, on vocabularies of realistic size."""

from __future__ import annotations

import random

import pytest
import torch

from inflight.sampling.row_kernels import RowKernels
from tests.engine.kernels import needs_native
from tests.sampling import factories
from tests.sampling.factories import Row, choose_tokens, make_request

NATIVE = pytest.mark.parametrize("row_kernels", [pytest.param("native", marks=needs_native)], indirect=True)
NUM_ROWS = 96


def _choices(numbers: random.Random) -> dict[str, float]:
    """Draw parameters of a row, several at a time."""
    possible = {
        "temperature": [0.0, 0.3, 0.8, 1.5],
        "top_k": [0, 0, 1, 5, 50, 128, 129, 1000, 10**6],
        "top_p": [0.0, 0.2, 0.9, 0.999, 1.0],
        "min_p": [0.0, 0.0, 0.02, 0.5],
        "repetition_penalty": [1.0, 0.7, 1.3],
        "presence_penalty": [0.0, 0.0, 0.5],
        "frequency_penalty": [0.0, 0.0, 0.25],
    }
    return {name: numbers.choice(values) for name, values in possible.items()}


@NATIVE
@pytest.mark.parametrize("scale", [0.2, 1.0, 6.0])
@pytest.mark.parametrize("vocab_size", [1, 63, 64, 65, 127, 8191, 50_257])
def test_compiled_kernels_choose_the_tokens_of_torch(
    row_kernels: RowKernels, vocab_size: int, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = random.Random(vocab_size)
    logits = torch.randn(NUM_ROWS, vocab_size, generator=torch.Generator().manual_seed(1)) * scale
    logits[::3] = logits[::3].bfloat16().float()  # many are equal
    rows = []
    for seed in range(NUM_ROWS):
        seen = numbers.choices(range(min(vocab_size, 400)), k=numbers.randint(1, 300))
        request = make_request(seen[:50], random_seed=seed, **_choices(numbers))
        rows.append(Row(request, tuple(seen[50:])))
    compiled = choose_tokens(logits.clone(), rows)
    monkeypatch.setattr(factories, "ROW_KERNELS", [RowKernels()])
    assert choose_tokens(logits, rows) == compiled


@NATIVE
def test_a_history_with_negative_ids_is_an_error_and_changes_no_row(row_kernels: RowKernels) -> None:
    """Otherwise compiled code would write outside of its memory."""
    row = Row(make_request([5, -1, 8], repetition_penalty=1.2))
    logits = torch.randn(1, 100)
    before = logits.clone()
    with pytest.raises(IndexError, match=r"histories of slots \[0\], \[3\] tokens"):
        choose_tokens(logits, [row])
    assert torch.equal(logits, before)

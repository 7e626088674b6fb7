"""What is drawn, and how often: chi-square with fixed seeds, and the distributions transformers filters to."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from inflight.core.sampling_config import SamplingConfig
from inflight.decoding import reference
from tests.decoding.factories import sample_rows

VOCAB_SIZE = 12
DRAWS = 20_000


def _logits(seed: int, size: int) -> torch.Tensor:
    return torch.randn(1, size, generator=torch.Generator().manual_seed(seed)) * 2


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingConfig(top_p=1.0, random_seed=1),
        SamplingConfig(temperature=2.5, top_p=1.0, random_seed=2),
        SamplingConfig(top_k=6, random_seed=3),
        SamplingConfig(temperature=1.5, top_k=8, top_p=0.9, random_seed=4),
        SamplingConfig(temperature=1.5, top_p=0.95, random_seed=5),
    ],
    ids=str,
)
def test_frequencies_are_the_probabilities(sampling: SamplingConfig) -> None:
    logits = _logits(sampling.random_seed, VOCAB_SIZE)
    probabilities = reference.filtered_probabilities(logits[0].tolist(), sampling)
    # Every row is another sequence and position of the same request.
    drawn = sample_rows(logits.expand(DRAWS, -1), [sampling] * DRAWS, list(range(DRAWS)))

    counts = {token: drawn.count(token) for token in set(drawn)}
    assert set(counts) <= set(probabilities)
    chi_square = sum(
        (counts.get(token, 0) - DRAWS * p) ** 2 / (DRAWS * p) for token, p in probabilities.items()
    )
    degrees = len(probabilities) - 1
    # Wilson and Hilferty's approximation of the quantile at which a right sampler fails once in 30,000 times.
    limit = degrees * (1 - 2 / (9 * degrees) + 4 * math.sqrt(2 / (9 * degrees))) ** 3
    assert chi_square < limit


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize(
    ("top_k", "top_p"), [(0, 0.35), (0, 0.83), (5, 0.0), (5, 0.83), (40, 0.0), (40, 0.35), (40, 0.83)]
)
def test_filtered_distributions_are_those_of_transformers(
    temperature: float, top_k: int, top_p: float
) -> None:
    """transformers: temperature, top-k, top-p; its top-p keeps a token if those after it do not reach 1 - p."""
    warpers = [TemperatureLogitsWarper(temperature)]
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p else []
    for seed in range(10):
        logits = _logits(seed, 100)
        warped = logits
        for warper in warpers:
            warped = warper(None, warped)
        expected = warped.double().softmax(-1)[0]

        got = reference.filtered_probabilities(logits[0].tolist(), SamplingConfig(temperature, top_k, top_p))

        dense = torch.zeros(100, dtype=torch.float64)
        dense[list(got)] = torch.tensor(list(got.values()), dtype=torch.float64)
        torch.testing.assert_close(dense, expected, rtol=0, atol=1e-6)

"""Frequencies of drawn tokens: chi-square over 100,000 draws with fixed seeds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

import numpy as np
import pytest
import torch

from inflight.core.request.request import Request
from inflight.core.schedule.batch import SlotStart
from inflight.sampling import reference
from inflight.sampling.drafts import weigh
from inflight.sampling.rows import Rows, SlotParameters
from tests.sampling.factories import Row, make_request, make_sampler, start_batch
from tests.tiers import with_all

pytestmark = pytest.mark.usefixtures("row_kernels")

VOCAB_SIZE = 12
DRAWS = 100_000
SLOTS = 1000


def _logits(seed: int, size: int = VOCAB_SIZE) -> torch.Tensor:
    return torch.randn(1, size, generator=torch.Generator().manual_seed(seed)) * 2


def _check_frequencies(drawn: Iterable[int], probabilities: dict[int, float]) -> None:
    counts = Counter(drawn)
    total = sum(counts.values())
    assert set(counts) <= set(probabilities)
    chi_square = sum((counts[token] - total * p) ** 2 / (total * p) for token, p in probabilities.items())
    degrees = len(probabilities) - 1
    # Wilson and Hilferty's approximation; a correct sampler exceeds this quantile once in 30,000 times.
    limit = degrees * (1 - 2 / (9 * degrees) + 4 * math.sqrt(2 / (9 * degrees))) ** 3
    assert chi_square < limit


@pytest.mark.parametrize(
    "sampling",
    with_all(
        [
            {"top_p": 1.0},
            {"top_p": 1.0, "temperature": 2.5},
            {"top_k": 6},
            {"top_k": 8, "top_p": 0.9, "temperature": 1.5},
            {"top_p": 0.95, "temperature": 1.5},
            {"min_p": 0.1},
            {"min_p": 0.05, "top_k": 9, "temperature": 1.5},
        ],
        [
            {"top_p": 1.0},
            {"top_k": 8, "top_p": 0.9, "temperature": 1.5},
            {"min_p": 0.05, "top_k": 9, "temperature": 1.5},
        ],
    ),
    ids=str,
)
def test_frequencies_of_sampled_tokens_are_their_probabilities(sampling: dict[str, float]) -> None:
    """Rows are different sequences and positions of the same request."""
    request = make_request(random_seed=len(sampling), **sampling)
    logits = _logits(1)
    sampler = make_sampler(SLOTS, VOCAB_SIZE)
    batch, _ = start_batch([Row(request, sequence_index=index) for index in range(SLOTS)])
    sampler.apply(batch)
    drawn: list[int] = []
    for position in range(1, 1 + DRAWS // SLOTS):
        output = sampler.decode(batch, logits.repeat(SLOTS, 1), np.full(SLOTS, position))
        drawn += [token for (token,) in output.token_ids]
    _check_frequencies(drawn, reference.filtered_probabilities(_divided(logits, request), request.sampling))


def _divided(logits: torch.Tensor, request: Request) -> list[float]:
    return [logit / request.sampling.temperature for logit in logits[0].tolist()]


@pytest.mark.parametrize(
    "sampling",
    with_all([{"top_p": 1.0}, {"top_p": 0.95, "temperature": 3.0}], [{"top_p": 0.95, "temperature": 3.0}]),
    ids=str,
)
def test_frequencies_over_a_long_row_are_the_probabilities(sampling: dict[str, float]) -> None:
    """Tokens are drawn by block, then within it.

    They are counted by remainders of ids, so that every count is large.
    """
    size, draws = 3000, 20_000
    request = make_request(**sampling)
    logits = _logits(2, size)
    sampler = make_sampler(SLOTS, size)
    batch, _ = start_batch([Row(request, sequence_index=index) for index in range(SLOTS)])
    sampler.apply(batch)
    rows = logits.repeat(SLOTS, 1)
    drawn: list[int] = []
    for position in range(1, 1 + draws // SLOTS):
        output = sampler.decode(batch, rows, np.full(SLOTS, position))
        drawn += [token % 40 for (token,) in output.token_ids]
    expected: dict[int, float] = dict.fromkeys(range(40), 0.0)
    probabilities = reference.filtered_probabilities(_divided(logits, request), request.sampling)
    for token, probability in probabilities.items():
        expected[token % 40] += probability
    _check_frequencies(drawn, expected)


@pytest.mark.parametrize(
    ("sampling", "closeness"),
    with_all(
        [
            pytest.param({"top_p": 1.0}, 0.0, id="unrelated draft"),
            pytest.param({"top_p": 1.0}, 0.8, id="good draft"),
            pytest.param({"top_k": 5, "top_p": 0.9, "temperature": 1.5}, 0.3, id="draft of banned tokens"),
        ],
        [({"top_p": 1.0}, 0.8), ({"top_k": 5, "top_p": 0.9, "temperature": 1.5}, 0.3)],
    ),
)
def test_rejection_sampling_leaves_the_distribution_unchanged(
    sampling: dict[str, float], closeness: float
) -> None:
    """Drafts drawn from one distribution become tokens of the other, for near and distant distributions."""
    target = _logits(1)
    proposed = closeness * target + (1 - closeness) * _logits(8)
    request = make_request(**sampling)
    slots = SlotParameters(1, target.device)
    slots.start(SlotStart(0, request))
    # Rows are different positions of one request.
    rows = Rows(
        target.repeat(DRAWS, 1),
        np.zeros(DRAWS, dtype=np.int64),
        np.arange(DRAWS),
        slots.numbers.repeat(DRAWS),
    )
    numbers = torch.rand(DRAWS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drafts = torch.searchsorted(proposed[0].double().softmax(-1).cumsum(-1), numbers).clamp(
        max=VOCAB_SIZE - 1
    )

    accepted, others = weigh(rows, drafts.numpy(), proposed.repeat(DRAWS, 1), None)

    assert 0.1 < accepted.mean() < 0.95
    probabilities = reference.filtered_probabilities(_divided(target, request), request.sampling)
    _check_frequencies(np.where(accepted, drafts.numpy(), others).tolist(), probabilities)

"""Checks that rounding cannot change a row's token, as it may at ties, filters and draws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from inflight.core.request.request import Request
from inflight.core.request.sampling_config import SamplingConfig
from inflight.sampling import reference
from inflight.sampling.rng import Purpose

MARGIN = 1e-5


def is_decided(
    logits: Sequence[float], request: Request, tokens: Sequence[int], sequence_index: int = 0
) -> bool:
    """Whether rounding of the reference's arithmetic cannot lead to another token."""
    sampling = request.sampling
    row = reference.process(logits, request, tokens)
    if max(row) == reference.BANNED:
        return True
    if not all(is_apart(a, b) for a, b in pairwise(sorted(row))):
        return False
    if sampling.greedy:
        return True
    generated = tokens[request.prompt_length :]
    number = reference.uniform(sampling.random_seed, sequence_index, len(tokens), Purpose.SAMPLE)
    return _edges_are_clear(row, sampling, generated) and draw_is_clear(
        reference.filtered_probabilities(row, sampling, generated), number
    )


def is_apart(a: float, b: float) -> bool:
    """Whether two values are equal or clearly different."""
    return a == b or math.isinf(a) or math.isinf(b) or abs(a - b) > MARGIN * max(1.0, abs(a), abs(b))


def draw_is_clear(probabilities: dict[int, float], number: float) -> bool:
    """Whether a draw is not near the border between two tokens."""
    cumulative = 0.0
    for _, probability in sorted(probabilities.items()):
        cumulative += probability
        if abs(cumulative - number) < MARGIN:
            return False
    return True


def _edges_are_clear(row: list[float], sampling: SamplingConfig, generated: Sequence[int]) -> bool:
    unlimited = replace(sampling, top_p=1.0, top_p_decay=1.0, min_p=0.0)
    probabilities = reference.filtered_probabilities(row, unlimited)
    top_p = reference.top_p_now(sampling, generated) if sampling.top_p else 1.0
    highest, cumulative = max(probabilities.values()), 0.0
    for probability in probabilities.values():
        cumulative += probability
        if 0 < top_p < 1 and abs(cumulative - top_p) < MARGIN:
            return False
        ratio = probability / highest
        if sampling.min_p > 0 and ratio != 1.0 and abs(ratio - sampling.min_p) < MARGIN:
            return False
    return True

"""The sampling pipeline once more: one row at a time, plain Python, nothing clever.

This is what `inflight.decoding.sampler` and `inflight.decoding.rng` are tested against, and the place to read what
they compute. No torch, no numpy; a few milliseconds a token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from inflight.core.sampling_config import SamplingConfig
from inflight.decoding.rng import GOLDEN_GAMMA, Purpose

_MASK = 2**64 - 1


def uniform(seed: int, sequence_index: int, position: int, purpose: Purpose) -> float:
    """The random number in [0, 1) that belongs to one decision."""
    state = _mix(seed)
    for value in (sequence_index, position, int(purpose)):
        state = _mix(state ^ value)
    return (state >> 11) / 2**53


def _mix(x: int) -> int:
    x = (x + GOLDEN_GAMMA) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def filtered_probabilities(logits: Sequence[float], sampling: SamplingConfig) -> dict[int, float]:
    """Token ids that a sampling row can get, with their probabilities."""
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if sampling.top_k > 0:
        ranked = ranked[: sampling.top_k]
    highest = logits[ranked[0]]
    weights = {token: math.exp((logits[token] - highest) / sampling.temperature) for token in ranked}
    if 0.0 < sampling.top_p < 1.0:
        weights = _smallest_set(weights, sampling.top_p)
    total = sum(weights.values())
    return {token: weight / total for token, weight in weights.items()}


def _smallest_set(weights: dict[int, float], top_p: float) -> dict[int, float]:
    """The first of `weights`, likeliest first, whose share of the total reaches `top_p`."""
    needed = top_p * sum(weights.values())
    kept: dict[int, float] = {}
    reached = 0.0
    for token, weight in weights.items():
        if reached >= needed:
            break
        kept[token] = weight
        reached += weight
    return kept


def next_token(logits: Sequence[float], sampling: SamplingConfig, sequence_index: int, position: int) -> int:
    """The token that a sequence gets at `position`, from the logits of the token before it."""
    if sampling.greedy:
        return max(range(len(logits)), key=lambda token: (logits[token], -token))
    probabilities = filtered_probabilities(logits, sampling)
    number = uniform(sampling.random_seed, sequence_index, position, Purpose.SAMPLE)
    cumulative = 0.0
    for token in sorted(probabilities):
        cumulative += probabilities[token]
        if cumulative > number:
            return token
    return max(probabilities)  # the probabilities add up to a hair less than 1

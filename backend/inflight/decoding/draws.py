"""Drawing a token for sampling rows: by inverse CDF from what they keep, with a random number of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inflight.decoding.rng import Purpose, uniforms
from inflight.decoding.rows import Rows
from inflight.decoding.top_k_top_p import BLOCK, Kept, block_sums, kept_tokens


class Drawn(NamedTuple):
    """Tokens of some rows.

    Attributes:
        rows: [n] which rows, on the host.
        tokens: [n] int64 on the device.
        is_final: [n] bool on the device, where these are a guess: whether a row's is right; None: all are.
    """

    rows: NDArray[np.int64]
    tokens: Tensor
    is_final: Tensor | None = None


def draw(rows: Rows, sampled: NDArray[np.int64], may_guess: bool = False) -> Iterator[Drawn]:
    """A token for each of the rows `sampled` (ascending indices), which are processed, some rows at a time."""
    if not len(sampled):
        return
    numbers = random_numbers(rows, Purpose.SAMPLE)
    for kept in kept_tokens(rows, sampled, may_guess):
        yield Drawn(kept.rows, _draw(kept, rows.upload(numbers[kept.rows, None])), kept.is_all)


def random_numbers(rows: Rows, purpose: Purpose) -> NDArray[np.float64]:
    """The rows' numbers in [0, 1), [rows]."""
    numbers = rows.numbers
    return uniforms(numbers["seed"], numbers["sequence_index"], rows.positions, purpose)


def inverse_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """Index [n, 1] at which the sum of [n, size] float64 weights exceeds `uniform` [n, 1] of the total."""
    cumulative = weights.cumsum(dim=-1)
    return _first_beyond(cumulative, uniform * cumulative[:, -1:])


def _draw(kept: Kept, uniform: Tensor) -> Tensor:
    """[n] tokens for [n, 1] float64 numbers; 0 for rows that keep nothing."""
    if kept.ids is None:
        return _draw_from_vocabulary(kept.weights, uniform)
    chosen = kept.ids.gather(-1, inverse_cdf(kept.weights, uniform))
    return torch.where(kept.weights.sum(dim=-1) > 0, chosen.squeeze(-1), 0)


def _draw_from_vocabulary(weights: Tensor, uniform: Tensor) -> Tensor:
    """First the block, then the token in it."""
    sums = block_sums(weights)
    cumulative = sums.cumsum(dim=-1)
    total = cumulative[:, -1:]
    block = _first_beyond(cumulative, uniform * total)
    before = (cumulative - sums).gather(-1, block)
    ids = block * BLOCK + torch.arange(BLOCK, device=weights.device)
    beyond_row = ids >= weights.shape[-1]
    ids.clamp_(max=weights.shape[-1] - 1)
    inside = weights.gather(-1, ids).double().masked_fill_(beyond_row, 0.0).cumsum(dim=-1)
    chosen = ids.gather(-1, _first_beyond(inside, uniform * total - before))
    return torch.where(total > 0, chosen, 0).squeeze(-1)


def _first_beyond(cumulative: Tensor, target: Tensor) -> Tensor:
    """Index [n, 1] of the first sum beyond `target`; rounding may not lead to an index that adds nothing."""
    below_total = torch.nextafter(cumulative[:, -1:], torch.zeros_like(target))
    target = torch.minimum(target, below_total).clamp_(min=0.0)
    index = torch.searchsorted(cumulative, target, right=True)
    return index.clamp_(max=cumulative.shape[-1] - 1)  # only logits that are no numbers get there

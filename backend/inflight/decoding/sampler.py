"""The sampling pipeline over a batch that mixes greedy and sampling rows.

For each row, in this order:

1. Greedy rows take the token with the highest logit, the lowest id of several.
2. Temperature divides the logits.
3. Top-k keeps the k highest logits; of equal ones, the lower ids.
4. Top-p keeps, of what is left, the smallest set of the likeliest tokens whose share reaches p; of equally likely
   tokens the lower ids, and always at least one.
5. The token is drawn by inverse CDF: one uniform number, the kept tokens in ascending order of id, the first token
   whose cumulative probability exceeds it.

Steps 2 to 5 run on the rows that sample and no others; a batch without any costs one argmax. Probabilities are
float64 and added up in a fixed order, so a row's token does not depend on its batch. Rows are grouped by what they
need: with a top-k or a top-p the vocabulary is searched for candidates, and only those are sorted; with neither it
is only added up.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from inflight.decoding.sampling_table import SamplingRows


def sample(logits: Tensor, sampling: SamplingRows | None) -> Tensor:
    """One token a row.

    Args:
        logits: [rows, vocab_size] float32, not changed.
        sampling: The rows that sample; None: all are greedy.

    Returns:
        Token ids, [rows] int64 on the logits' device.
    """
    tokens = logits.argmax(dim=-1)
    if sampling is None:
        return tokens
    has_top_k = (sampling.top_k > 0) & (sampling.top_k < logits.shape[-1])
    has_top_p = (sampling.top_p < 1.0) & ~has_top_k
    for chosen, draw in (
        (has_top_k, _draw_top_k),
        (has_top_p, _draw_top_p),
        (~has_top_k & ~has_top_p, _draw_any),
    ):
        if chosen.any():
            rows = _Rows(logits, sampling, chosen)
            tokens[rows.index] = draw(rows)
    return tokens


class _Rows:
    """The chosen sampling rows on the device; parameters are [rows, 1] float64."""

    def __init__(self, logits: Tensor, sampling: SamplingRows, chosen: NDArray[np.bool_]) -> None:
        columns = (sampling.rows, sampling.temperature, sampling.top_k, sampling.top_p, sampling.uniform)
        packed = np.stack([column[chosen].astype(np.float64) for column in columns])
        on_device = torch.from_numpy(packed).to(logits.device)  # one copy to the device
        self.index = on_device[0].long()
        self.temperature, self.top_k, self.top_p, self.uniform = on_device[1:, :, None]
        self.max_top_k = int(sampling.top_k[chosen].max())
        self.logits = logits if self.index.shape[0] == logits.shape[0] else logits[self.index]


def _draw_top_k(rows: _Rows) -> Tensor:
    ids = _likeliest(rows.logits, rows.max_top_k)
    weights = _weights(rows.logits.gather(-1, ids), rows)
    weights.masked_fill_(_ranks(weights) >= rows.top_k, 0.0)
    return _draw_in_nucleus(ids, weights, _total(weights), rows)


def _draw_top_p(rows: _Rows) -> Tensor:
    weights = _weights(rows.logits, rows)
    total = _total(weights)
    # Tokens that have less than (1 - p) / vocab_size each have less than 1 - p together, so the set that reaches p
    # is among the others; half of that leaves room for rounding.
    likely = weights >= total * (1.0 - rows.top_p) * (0.5 / weights.shape[-1])
    count = max(1, int(likely.sum(dim=-1).max()))
    ids = _likeliest(rows.logits, count)
    return _draw_in_nucleus(ids, weights.gather(-1, ids), total, rows)


def _draw_any(rows: _Rows) -> Tensor:
    return _inverse_cdf(_weights(rows.logits, rows), rows.uniform).squeeze(-1)


def _draw_in_nucleus(ids: Tensor, weights: Tensor, total: Tensor, rows: _Rows) -> Tensor:
    """Apply top-p to candidates in descending order of weight, then draw."""
    before = F.pad(weights.cumsum(dim=-1)[:, :-1], (1, 0))
    weights = weights.masked_fill(before >= rows.top_p * total, 0.0)
    ids, order = ids.sort(dim=-1)
    return ids.gather(-1, _inverse_cdf(weights.gather(-1, order), rows.uniform)).squeeze(-1)


def _weights(logits: Tensor, rows: _Rows) -> Tensor:
    """Unnormalized probabilities at the rows' temperature, the likeliest 1."""
    logits = logits.double()
    return logits.sub_(logits.amax(dim=-1, keepdim=True)).div_(rows.temperature).exp_()


def _total(weights: Tensor) -> Tensor:
    """[rows, 1], added up in order: a parallel sum would round differently with the shape of the batch."""
    return weights.cumsum(dim=-1)[:, -1:]


def _inverse_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """Index [rows, 1] of the first weight at which the cumulative sum exceeds `uniform` of the total."""
    cumulative = weights.cumsum(dim=-1)
    index = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
    return index.clamp_(max=weights.shape[-1] - 1)  # only logits that are no numbers get there


def _ranks(weights: Tensor) -> Tensor:
    return torch.arange(weights.shape[-1], device=weights.device)


def _likeliest(logits: Tensor, count: int) -> Tensor:
    """Ids [rows, count] of the highest logits in descending order, equal ones in ascending order of id."""
    keys = _sort_keys(logits).topk(count, dim=-1).values
    return (2**32 - 1) - (keys & (2**32 - 1))


def _sort_keys(logits: Tensor) -> Tensor:
    """Distinct int64 keys in the order of the float32 logits, equal logits in descending order of id.

    The upper half is the float's bits, turned so that they compare like the float; the lower half counts ids down.
    """
    bits = (logits + 0.0).view(torch.int32)  # adding 0 makes -0.0 the 0.0 it is equal to
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return bits.long().mul_(2**32).add_(2**32 - 1 - _ranks(logits))

"""Which tokens a sampling row keeps, and with which weights: top-k, top-p and min_p.

Rows are grouped by what they need. With a top-k, or a top-p that few tokens reach, those tokens are found without
putting the vocabulary in order, and only they are sorted; weights are float64 then. Where many tokens reach the
top-p, or all are kept, weights are float32 over the vocabulary. Which of the two it is depends on the row alone,
and sums are taken in an order that does not depend on the batch, so neither does a row's token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from inflight.decoding.argmax import likeliest, reduce_blocks
from inflight.decoding.rows import Rows, take_rows
from inflight.decoding.transfer import to_host

BLOCK = 64
"""Weights over a vocabulary are added up in float32 inside blocks of so many, and in float64 beyond."""
_FEW = 128
"""So many of the likeliest tokens are tried before a top-p is looked for in the whole vocabulary."""
_CHUNK_BYTES = 1 << 20
"""On a CPU, rows that are looked at as a whole are taken a few at a time, so that they stay in its cache."""
_DIGITS = ((20, 1 << 12), (10, 1 << 10), (0, 1 << 10))
"""(lowest bit, number of values) of the digits that a float32's bits are read by, highest first."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What some rows keep.

    Attributes:
        rows: [n] which rows, on the host.
        ids: [n, candidates] int64 in ascending order; None: the whole vocabulary.
        weights: [n, candidates], not normalized, 0 for what is not kept.
        is_all: [n] bool on the device, where these are a guess: whether a row keeps no more; None: none does.
    """

    rows: NDArray[np.int64]
    ids: Tensor | None
    weights: Tensor
    is_all: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows that are treated alike; parameters are [n, 1] float64 on the device."""

    rows: NDArray[np.int64]
    logits: Tensor
    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    top_k: Tensor
    uses_temperature: bool
    uses_min_p: bool

    @property
    def vocab_size(self) -> int:
        return self.logits.shape[-1]

    def select(self, indices: NDArray[np.int64]) -> _Group:
        """These of the rows."""
        tensors = (self.logits, self.temperature, self.top_p, self.min_p, self.top_k)
        parts = [take_rows(tensor, indices) for tensor in tensors]
        return _Group(self.rows[indices], *parts, self.uses_temperature, self.uses_min_p)


def kept_tokens(rows: Rows, sampled: NDArray[np.int64], may_guess: bool = False) -> Iterator[Kept]:
    """What each of the rows `sampled` (ascending indices) keeps, a few rows at a time.

    Whether a top-p is reached by few tokens is known to the device. Who may not wait for that takes it for granted
    and looks at `is_all` later.
    """
    top_k = rows.numbers["top_k"][sampled]
    top_p = effective_top_p(rows)[sampled]
    has_top_k = (top_k > 0) & (top_k < rows.vocab_size)
    has_top_p = (top_p < 1.0) & ~has_top_k
    for chosen in (has_top_k & (top_k <= _FEW), has_top_k & (top_k > _FEW)):
        if chosen.any():
            yield _keep_top_k(_group(rows, sampled[chosen], top_p[chosen]), int(top_k[chosen].max()))
    size = len(sampled)
    if rows.logits.device.type == "cpu":
        size = max(1, _CHUNK_BYTES // (rows.logits.element_size() * rows.vocab_size))
    keep_top_p = _guess_top_p if may_guess else _keep_top_p
    for chosen, keep in ((has_top_p, keep_top_p), (~has_top_k & ~has_top_p, _keep_all)):
        indices = np.flatnonzero(chosen)
        for start in range(0, len(indices), size):
            part = indices[start : start + size]
            yield from keep(_group(rows, sampled[part], top_p[part]))


def block_sums(weights: Tensor) -> Tensor:
    """[rows, blocks] float64 of float32 weights over a vocabulary."""
    return reduce_blocks(weights, BLOCK, torch.sum).double()


def effective_top_p(rows: Rows) -> NDArray[np.float64]:
    """[rows] top_p after one decay for each token generated since the start or the last reset."""
    numbers = rows.numbers
    top_p, decay = numbers["top_p"], numbers["top_p_decay"]
    if (decay == 1.0).all():
        return top_p
    count = rows.positions - numbers["top_p_since"]
    decayed = np.maximum(top_p * decay**count, numbers["top_p_min"])
    now = np.where((count > 0) & (decay < 1.0), decayed, top_p)
    return np.maximum(now, np.finfo(np.float64).tiny)  # the likeliest token is always kept


def _group(rows: Rows, indices: NDArray[np.int64], top_p: NDArray[np.float64]) -> _Group:
    selected = rows.select(indices)
    numbers = selected.numbers
    columns = (numbers["temperature"], top_p, numbers["min_p"], numbers["top_k"].astype(np.float64))
    return _Group(
        indices,
        selected.logits,
        *rows.upload(np.stack(columns)[:, :, None]),  # one copy to the device
        uses_temperature=bool((numbers["temperature"] != 1.0).any()),
        uses_min_p=bool((numbers["min_p"] > 0.0).any()),
    )


def _keep_top_k(group: _Group, count: int) -> Kept:
    ids = likeliest(group.logits, count)
    logits = group.logits.gather(-1, ids)
    weights = _weights(logits, logits[:, :1], group)
    weights.masked_fill_(torch.arange(count, device=ids.device) >= group.top_k, 0.0)
    return _keep_nucleus(group.rows, ids, weights, weights.cumsum(dim=-1)[:, -1:], group)


def _keep_top_p(group: _Group) -> Iterator[Kept]:
    found = _Likeliest.of(group)
    (is_all,) = to_host(found.is_all)
    few, many = np.flatnonzero(is_all), np.flatnonzero(~is_all)
    if len(few):
        yield found.keep(few)
    if len(many):
        part = group.select(many)
        yield _keep_large_nucleus(part, take_rows(found.everywhere, many), take_rows(found.total, many))


def _guess_top_p(group: _Group) -> Iterator[Kept]:
    found = _Likeliest.of(group)
    yield replace(found.keep(np.arange(len(group.rows))), is_all=found.is_all)


@dataclass(frozen=True, slots=True)
class _Likeliest:
    """The few likeliest tokens of rows with a top-p.

    Attributes:
        group: The rows.
        ids: [n, count] in descending order.
        weights: [n, count] float64.
        everywhere: [n, vocab_size] float32 weights.
        total: [n, 1] float64, the sum over the vocabulary.
        is_all: [n] whether these tokens reach the top-p.
    """

    group: _Group
    ids: Tensor
    weights: Tensor
    everywhere: Tensor
    total: Tensor
    is_all: Tensor

    @classmethod
    def of(cls, group: _Group) -> _Likeliest:
        count = min(_FEW, group.vocab_size)
        ids = likeliest(group.logits, count)
        logits = group.logits.gather(-1, ids)
        weights = _weights(logits, logits[:, :1], group)
        sums = weights.cumsum(dim=-1)[:, -1:]
        everywhere = _weights_everywhere(group, logits[:, :1])
        if count == group.vocab_size:
            return cls(group, ids, weights, everywhere, sums, torch.ones_like(sums[:, 0], dtype=torch.bool))
        total = block_sums(everywhere).cumsum(dim=-1)[:, -1:]
        return cls(group, ids, weights, everywhere, total, (sums >= group.top_p * total).squeeze(-1))

    def keep(self, indices: NDArray[np.int64]) -> Kept:
        """What those of the rows keep that keep no other tokens."""
        part = self.group.select(indices)
        return _keep_nucleus(
            part.rows, *(take_rows(of, indices) for of in (self.ids, self.weights, self.total)), part
        )


def _keep_all(group: _Group) -> Iterator[Kept]:
    weights = _weights_everywhere(group, group.logits.amax(dim=-1, keepdim=True))
    yield Kept(group.rows, None, _without_unlikely(weights, group))


def _keep_nucleus(
    rows: NDArray[np.int64], ids: Tensor, weights: Tensor, total: Tensor, group: _Group
) -> Kept:
    """Top-p and min_p on candidates in descending order; `total` is the weight that top-p is a share of."""
    before = F.pad(weights.cumsum(dim=-1)[:, :-1], (1, 0))
    weights = weights.masked_fill(before >= group.top_p * total, 0.0)
    ids, order = ids.sort(dim=-1)
    return Kept(rows, ids, _without_unlikely(weights.gather(-1, order), group))


def _keep_large_nucleus(group: _Group, weights: Tensor, total: Tensor) -> Kept:
    """Top-p where it takes too many tokens to sort: the least weight that is needed is found digit by digit.

    The bits of floats from 0 to 1 are in the order of the floats. Weights are added up by their highest digit,
    then those that share the highest digit of the weight looked for by their next one, and so on.
    """
    num_rows, needed = len(group.rows), group.top_p * total
    bits = weights.view(torch.int32)
    digits = _digits(bits, *_DIGITS[0])
    sums = _zeros(num_rows, _DIGITS[0][1], weights).scatter_add_(-1, digits.long(), weights.double())
    least, above = _next_digit(sums, needed, torch.zeros_like(needed))
    rows, columns = (digits == least.int()).nonzero(as_tuple=True)
    for shift, size in _DIGITS[1:]:
        shared = bits[rows, columns]
        digits = _digits(shared, shift, size)
        sums = _zeros(1, num_rows * size, weights)[0]
        sums.scatter_add_(0, rows * size + digits, shared.view(torch.float32).double())
        digit, above = _next_digit(sums.view(num_rows, size), needed, above)
        least = least * size + digit
        sharing = digits == digit[rows, 0]
        rows, columns = rows[sharing], columns[sharing]
    least = least.int().view(torch.float32)
    weights = _where_at_least(weights, least)
    # The tokens that are left have the least weight itself, and the first of them are kept.
    first = torch.searchsorted(rows, torch.arange(num_rows, device=rows.device))
    rank = torch.arange(len(rows), device=rows.device) - first[rows]
    superfluous = above[rows, 0] + rank * least[rows, 0].double() >= needed[rows, 0]
    weights[rows[superfluous], columns[superfluous]] = 0.0
    return Kept(group.rows, None, _without_unlikely(weights, group))


def _digits(bits: Tensor, shift: int, size: int) -> Tensor:
    return (bits >> shift).bitwise_and_(size - 1)  # within bounds even for what is no number


def _zeros(rows: int, size: int, like: Tensor) -> Tensor:
    return torch.zeros(rows, size, dtype=torch.float64, device=like.device)


def _next_digit(sums: Tensor, needed: Tensor, above: Tensor) -> tuple[Tensor, Tensor]:
    """The digit at which sums [rows, digits], from the highest down, reach `needed`, and what is above it then."""
    sums = sums.flip(-1)
    from_above = sums.cumsum(dim=-1) + above
    index = (from_above < needed).sum(dim=-1, keepdim=True).clamp_(max=sums.shape[-1] - 1)
    return sums.shape[-1] - 1 - index, (from_above - sums).gather(-1, index)


def _without_unlikely(weights: Tensor, group: _Group) -> Tensor:
    """min_p: the likeliest token's weight is 1."""
    return _where_at_least(weights, group.min_p.to(weights.dtype)) if group.uses_min_p else weights


def _where_at_least(weights: Tensor, least: Tensor) -> Tensor:
    """`weights` with zeros for what is less, in place; several times as fast as filling by a mask."""
    return weights.mul_(weights.clone().ge_(least))


def _weights(logits: Tensor, highest: Tensor, group: _Group) -> Tensor:
    """Unnormalized probabilities in float64, the likeliest 1."""
    return logits.double().sub_(highest).div_(group.temperature).exp_()


def _weights_everywhere(group: _Group, highest: Tensor) -> Tensor:
    """The same in float32, of the whole vocabulary."""
    weights = group.logits - highest
    if group.uses_temperature:
        weights.div_(group.temperature.float())
    return weights.exp_()

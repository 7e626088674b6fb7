"""Sampling a token by inverse CDF from the tokens that top-k, top-p and min-p leave.

Rows are grouped by their limits. With a top-k, or a top-p that few tokens reach, the candidates are found without
sorting the vocabulary, only the candidates are sorted, and weights are float64. If many tokens are needed to reach
top-p, or all tokens are possible, weights are float32 over the vocabulary. The choice between these two ways
depends on the row alone, and sums are taken in an order independent of the batch, so a row's token does not
depend on the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from inflight.sampling.argmax import reduce_blocks, top_indices
from inflight.sampling.rng import Purpose, uniforms
from inflight.sampling.rows import Needs, Rows, select_rows
from inflight.sampling.transfer import to_host
from inflight.shared_constants import FEW_CANDIDATES, LOW_DIGIT_BITS, WEIGHTS_PER_BLOCK

_CHUNK_BYTES = 1 << 20
"""On a CPU, rows are processed in groups of at most this size, or singly, so that they stay in its cache."""
_DIGITS = (
    (2 * LOW_DIGIT_BITS, 1 << (32 - 2 * LOW_DIGIT_BITS)),
    (LOW_DIGIT_BITS, 1 << LOW_DIGIT_BITS),
    (0, 1 << LOW_DIGIT_BITS),
)
"""(lowest bit, number of values) of the digits into which a float32's bits are divided, highest first."""


LIMITS = np.dtype([(name, np.float64) for name in ("temperature", "top_k", "top_p", "min_p")])
"""The limits of a row's tokens: a top_k of 0 and a top_p of 1 mean no limit."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """The tokens that some rows may sample.

    Attributes:
        rows: [n] indices of the rows, on the host.
        ids: [n, candidates] int64 in ascending order; None: the whole vocabulary.
        weights: [n, candidates] unnormalized probabilities, 0 for excluded tokens.
        are_all: [n] bool on the device, if the candidates are a guess: whether `ids` has all candidates of the
            row; None: it has.
    """

    rows: NDArray[np.int64]
    ids: Tensor | None
    weights: Tensor
    are_all: Tensor | None = None


class Drawn(NamedTuple):
    """The tokens sampled for some rows.

    Attributes:
        rows: [n] indices of the rows, on the host.
        tokens: [n] int64 on the device.
        is_final: If the tokens are guesses, [n] bool on the device: whether the token is right; None: all
            are right.
    """

    rows: NDArray[np.int64]
    tokens: Tensor
    is_final: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows processed together; limits are [n, 1] float64 on the device."""

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
        """Return the group's rows `indices`."""
        tensors = {
            name: select_rows(getattr(self, name), indices)
            for name in ("logits", "temperature", "top_p", "min_p", "top_k")
        }
        return replace(self, rows=self.rows[indices], **tensors)


def draw(rows: Rows, sampled: NDArray[np.int64], may_guess: bool = False) -> Iterator[Drawn]:
    """Sample a token for each of the processed rows `sampled` (ascending indices), some rows at a time."""
    if not len(sampled):
        return
    numbers = random_numbers(rows, Purpose.SAMPLE)
    for found in find_candidates(rows, sampled, may_guess):
        yield Drawn(found.rows, _draw(found, rows.upload(numbers[found.rows, None])), found.are_all)


def random_numbers(rows: Rows, purpose: Purpose) -> NDArray[np.float64]:
    """Return the rows' random numbers in [0, 1), [rows]."""
    numbers = rows.numbers
    return uniforms(numbers["random_seed"], numbers["sequence_index"], rows.positions, purpose)


def inverse_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """Return the first index [n, 1] at which the cumulative sum of [n, size] float64 weights exceeds the fraction
    `uniform` [n, 1] of the total."""
    cumulative = weights.cumsum(dim=-1)
    return _first_beyond(cumulative, uniform * cumulative[:, -1:])


def distribution(rows: Rows) -> Tensor:
    """Return the sampling distributions, [rows, vocab_size] float64; a greedy row's token has probability 1.

    If every token is banned, all probabilities are 0.
    """
    result = torch.zeros(rows.logits.shape, dtype=torch.float64, device=rows.logits.device)
    samples = samples_of(rows)
    for row in np.flatnonzero(~samples):
        result[row, rows.logits[row].argmax()] = 1.0
    for found in find_candidates(rows, np.flatnonzero(samples)):
        for index, row in enumerate(found.rows):
            ids = slice(None) if found.ids is None else found.ids[index]
            result[row, ids] = found.weights[index].double()
    total = result.sum(dim=-1, keepdim=True)
    result /= total
    result[~(total.squeeze(-1) > 0)] = 0.0
    result[rows.logits.amax(dim=-1) == -torch.inf] = 0.0
    return result


def samples_of(rows: Rows) -> NDArray[np.bool_]:
    """Return for each row whether it is sampled, [rows]; the other rows are greedy."""
    return rows.numbers["needs"] & int(Needs.SAMPLE) != 0


def find_candidates(rows: Rows, sampled: NDArray[np.int64], may_guess: bool = False) -> Iterator[Candidates]:
    """Yield the candidates of the rows `sampled` (ascending indices), a few rows at a time.

    Only the device knows whether few tokens reach a top-p. With `may_guess` this is assumed, and `are_all`
    contains whether the assumption was right.
    """
    limits = limits_of(rows, sampled)
    top_k = limits["top_k"]
    has_top_k = top_k > 0
    has_top_p = (limits["top_p"] < 1.0) & ~has_top_k
    for chosen in (has_top_k & (top_k <= FEW_CANDIDATES), has_top_k & (top_k > FEW_CANDIDATES)):
        if chosen.any():
            yield _keep_top_k(_group(rows, sampled[chosen], limits[chosen]), int(top_k[chosen].max()))
    size = len(sampled)
    if rows.logits.device.type == "cpu":
        size = max(1, _CHUNK_BYTES // (rows.logits.element_size() * rows.vocab_size))
    keep_top_p = _guess_top_p if may_guess else _keep_top_p
    for chosen, keep in ((has_top_p, keep_top_p), (~has_top_k & ~has_top_p, _keep_all)):
        indices = np.flatnonzero(chosen)
        for start in range(0, len(indices), size):
            part = indices[start : start + size]
            yield from keep(_group(rows, sampled[part], limits[part]))


def limits_of(rows: Rows, indices: NDArray[np.int64]) -> NDArray[Any]:
    """Return the limits of the rows `indices`, an array [n] with the dtype LIMITS, with top_p after its decay."""
    numbers = rows.numbers[indices]
    limits = np.empty(len(indices), LIMITS)
    limits["temperature"] = numbers["temperature"]
    limits["top_k"] = np.where(numbers["top_k"] < rows.vocab_size, numbers["top_k"], 0)
    limits["top_p"] = _decayed_top_p(numbers, rows.positions[indices])
    limits["min_p"] = numbers["min_p"]
    return limits


def _decayed_top_p(numbers: NDArray[Any], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return top_p [n] after one decay per token generated since the start or the last reset."""
    top_p, decay = numbers["top_p"], numbers["top_p_decay"]
    if (decay == 1.0).all():
        return top_p
    count = positions - numbers["top_p_since"]
    decayed = np.maximum(top_p * decay**count, numbers["top_p_min"])
    now = np.where((count > 0) & (decay < 1.0), decayed, top_p)
    return np.maximum(now, np.finfo(np.float64).tiny)  # the most likely token is always kept


def _group(rows: Rows, indices: NDArray[np.int64], limits: NDArray[Any]) -> _Group:
    columns = [limits[name] for name in ("temperature", "top_p", "min_p", "top_k")]
    return _Group(
        indices,
        select_rows(rows.logits, indices),
        *rows.upload(np.stack(columns)[:, :, None]),  # a single copy to the device
        uses_temperature=bool((limits["temperature"] != 1.0).any()),
        uses_min_p=bool((limits["min_p"] > 0.0).any()),
    )


def _keep_top_k(group: _Group, count: int) -> Candidates:
    ids = top_indices(group.logits, count)
    logits = group.logits.gather(-1, ids)
    weights = _weights(logits, logits[:, :1], group)
    weights.masked_fill_(torch.arange(count, device=ids.device) >= group.top_k, 0.0)
    return _keep_nucleus(group.rows, ids, weights, weights.cumsum(dim=-1)[:, -1:], group)


def _keep_top_p(group: _Group) -> Iterator[Candidates]:
    found = _TopTokens.find(group)
    (are_all,) = to_host(found.are_all)
    few, many = np.flatnonzero(are_all), np.flatnonzero(~are_all)
    if len(few):
        yield found.keep(few)
    if len(many):
        part = group.select(many)
        yield _keep_large_nucleus(part, select_rows(found.everywhere, many), select_rows(found.total, many))


def _guess_top_p(group: _Group) -> Iterator[Candidates]:
    found = _TopTokens.find(group)
    yield replace(found.keep(np.arange(len(group.rows))), are_all=found.are_all)


@dataclass(frozen=True, slots=True)
class _TopTokens:
    """The few most likely tokens of rows with a top-p.

    Attributes:
        group: The rows.
        ids: [n, count] in descending order.
        weights: [n, count] float64.
        everywhere: [n, vocab_size] float32 weights over the vocabulary.
        total: [n, 1] float64, the sum of weights over the vocabulary.
        are_all: [n] whether the tokens `ids` reach the top-p.
    """

    group: _Group
    ids: Tensor
    weights: Tensor
    everywhere: Tensor
    total: Tensor
    are_all: Tensor

    @classmethod
    def find(cls, group: _Group) -> _TopTokens:
        count = min(FEW_CANDIDATES, group.vocab_size)
        ids = top_indices(group.logits, count)
        logits = group.logits.gather(-1, ids)
        weights = _weights(logits, logits[:, :1], group)
        sums = weights.cumsum(dim=-1)[:, -1:]
        everywhere = _weights_everywhere(group, logits[:, :1])
        if count == group.vocab_size:
            return cls(group, ids, weights, everywhere, sums, torch.ones_like(sums[:, 0], dtype=torch.bool))
        total = _block_sums(everywhere).cumsum(dim=-1)[:, -1:]
        return cls(group, ids, weights, everywhere, total, (sums >= group.top_p * total).squeeze(-1))

    def keep(self, indices: NDArray[np.int64]) -> Candidates:
        """Return the candidates of the rows `indices`, in which the tokens `ids` reach the top-p."""
        part = self.group.select(indices)
        ids, weights, total = (select_rows(each, indices) for each in (self.ids, self.weights, self.total))
        return _keep_nucleus(part.rows, ids, weights, total, part)


def _keep_all(group: _Group) -> Iterator[Candidates]:
    weights = _weights_everywhere(group, group.logits.amax(dim=-1, keepdim=True))
    yield Candidates(group.rows, None, _without_unlikely(weights, group))


def _keep_nucleus(
    rows: NDArray[np.int64], ids: Tensor, weights: Tensor, total: Tensor, group: _Group
) -> Candidates:
    """Apply top-p and min-p to candidates, which are in descending order; top-p is a share of `total`."""
    before = F.pad(weights.cumsum(dim=-1)[:, :-1], (1, 0))
    weights = weights.masked_fill(before >= group.top_p * total, 0.0)
    ids, order = ids.sort(dim=-1)
    return Candidates(rows, ids, _without_unlikely(weights.gather(-1, order), group))


def _keep_large_nucleus(group: _Group, weights: Tensor, total: Tensor) -> Candidates:
    """Apply a top-p that needs too many tokens to sort: find the smallest weight that is needed digit by digit.

    Floats from 0 to 1 are ordered like their bits. Weights are added up by their highest digit, which gives the
    highest digit of the smallest needed weight; then weights with this digit are added up by the next digit,
    and so on.
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
    # The remaining tokens have exactly the smallest needed weight; as many as needed are kept, lowest ids first.
    first = torch.searchsorted(rows, torch.arange(num_rows, device=rows.device))
    rank = torch.arange(len(rows), device=rows.device) - first[rows]
    superfluous = above[rows, 0] + rank * least[rows, 0].double() >= needed[rows, 0]
    weights[rows[superfluous], columns[superfluous]] = 0.0
    return Candidates(group.rows, None, _without_unlikely(weights, group))


def _digits(bits: Tensor, shift: int, size: int) -> Tensor:
    return (bits >> shift).bitwise_and_(size - 1)  # in range even for NaN


def _zeros(rows: int, size: int, like: Tensor) -> Tensor:
    return torch.zeros(rows, size, dtype=torch.float64, device=like.device)


def _next_digit(sums: Tensor, needed: Tensor, above: Tensor) -> tuple[Tensor, Tensor]:
    """Return the digit at which cumulative sums of `sums` [rows, digits], highest digit first, reach `needed`,
    and the sum over higher digits."""
    sums = sums.flip(-1)
    from_above = sums.cumsum(dim=-1) + above
    index = (from_above < needed).sum(dim=-1, keepdim=True).clamp_(max=sums.shape[-1] - 1)
    return sums.shape[-1] - 1 - index, (from_above - sums).gather(-1, index)


def _without_unlikely(weights: Tensor, group: _Group) -> Tensor:
    """Apply min-p, given that the most likely token's weight is 1."""
    return _where_at_least(weights, group.min_p.to(weights.dtype)) if group.uses_min_p else weights


def _where_at_least(weights: Tensor, least: Tensor) -> Tensor:
    """Set weights below `least` to 0, in place; several times as fast as torch's masked_fill_."""
    return weights.mul_(weights.clone().ge_(least))


def _weights(logits: Tensor, highest: Tensor, group: _Group) -> Tensor:
    """Return unnormalized float64 probabilities, 1 for the most likely token."""
    return logits.double().sub_(highest).div_(group.temperature).exp_()


def _weights_everywhere(group: _Group, highest: Tensor) -> Tensor:
    """Return unnormalized float32 probabilities over the whole vocabulary, 1 for the most likely token."""
    weights = group.logits - highest
    if group.uses_temperature:
        weights.div_(group.temperature.float())
    return weights.exp_()


def _block_sums(weights: Tensor) -> Tensor:
    """Return sums [rows, blocks] float64 of float32 weights over a vocabulary."""
    return reduce_blocks(weights, WEIGHTS_PER_BLOCK, torch.sum).double()


def _draw(candidates: Candidates, uniform: Tensor) -> Tensor:
    """Sample [n] tokens with [n, 1] float64 random numbers; 0 for rows without candidates."""
    if candidates.ids is None:
        return _draw_from_vocabulary(candidates.weights, uniform)
    chosen = candidates.ids.gather(-1, inverse_cdf(candidates.weights, uniform))
    return torch.where(candidates.weights.sum(dim=-1) > 0, chosen.squeeze(-1), 0)


def _draw_from_vocabulary(weights: Tensor, uniform: Tensor) -> Tensor:
    """Find the block of the sampled token, then the token in it."""
    sums = _block_sums(weights)
    cumulative = sums.cumsum(dim=-1)
    total = cumulative[:, -1:]
    block = _first_beyond(cumulative, uniform * total)
    before = (cumulative - sums).gather(-1, block)
    ids = block * WEIGHTS_PER_BLOCK + torch.arange(WEIGHTS_PER_BLOCK, device=weights.device)
    beyond_row = ids >= weights.shape[-1]
    ids.clamp_(max=weights.shape[-1] - 1)
    inside = weights.gather(-1, ids).double().masked_fill_(beyond_row, 0.0).cumsum(dim=-1)
    chosen = ids.gather(-1, _first_beyond(inside, uniform * total - before))
    return torch.where(total > 0, chosen, 0).squeeze(-1)


def _first_beyond(cumulative: Tensor, target: Tensor) -> Tensor:
    """Return the index [n, 1] of the first cumulative sum beyond `target`; never the index of a token of weight 0,
    even after rounding."""
    below_total = torch.nextafter(cumulative[:, -1:], torch.zeros_like(target))
    target = torch.minimum(target, below_total).clamp_(min=0.0)
    index = torch.searchsorted(cumulative, target, right=True)
    return index.clamp_(max=cumulative.shape[-1] - 1)  # only NaN weights get there

"""Step 9 of the pipeline for greedy and sampling rows: the token, or the distribution that it is drawn from."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inflight.decoding.kept import BLOCK, Kept, block_sums, kept_tokens
from inflight.decoding.rng import Purpose, uniforms
from inflight.decoding.rows import Rows, take_rows
from inflight.decoding.slot_parameters import Needs
from inflight.decoding.transfer import to_host


def choose(
    rows: Rows, wanted: NDArray[np.int64], beside: Tensor
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """A token for each of the rows `wanted`, and `beside` [rows] float32, on the host; steps 1 to 8 are done.

    Returns:
        [rows] tokens, 0 for rows that are not wanted, and `beside`. All of it comes back in one copy, unless a
        row's top_p takes many tokens: then it is drawn for again.
    """
    on_device, guesses = _choose(rows, wanted, may_guess=rows.logits.device.type != "cpu")
    tokens, beside, *are_all = to_host(on_device, beside, *(kept.is_all for kept in guesses))
    again = [kept.rows[~is_all] for kept, is_all in zip(guesses, are_all, strict=True)]
    for kept, drawn in itertools.chain.from_iterable(_drawn(rows, part) for part in again):
        tokens[kept.rows] = drawn.cpu().numpy()
    return tokens, beside


def choose_on_device(rows: Rows) -> Tensor:
    """A token for each row, [rows] int64, that the device will know; only a top_p alone is waited for."""
    return _choose(rows, np.arange(len(rows.slots)), may_guess=False)[0]


def _choose(rows: Rows, wanted: NDArray[np.int64], may_guess: bool) -> tuple[Tensor, list[Kept]]:
    """[rows] tokens on the device, 0 for rows that are not wanted; and what of it is a guess."""
    samples = _samples(rows)[wanted]
    greedy, sampled = wanted[~samples], wanted[samples]
    if len(greedy) == len(rows.slots):
        return rows.logits.argmax(dim=-1), []
    tokens = torch.zeros(len(rows.slots), dtype=torch.int64, device=rows.logits.device)
    if len(greedy):
        tokens[rows.upload(greedy)] = take_rows(rows.logits, greedy).argmax(dim=-1)
    guesses = []
    for kept, drawn in _drawn(rows, sampled, may_guess):
        tokens[rows.upload(kept.rows)] = drawn
        if kept.is_all is not None:
            guesses.append(kept)
    return tokens, guesses


def _drawn(rows: Rows, sampled: NDArray[np.int64], may_guess: bool = False) -> Iterator[tuple[Kept, Tensor]]:
    """What the rows `sampled` keep, and the tokens that are drawn from it."""
    if not len(sampled):
        return
    numbers = random_numbers(rows, Purpose.SAMPLE)
    for kept in kept_tokens(rows, sampled, may_guess):
        yield kept, _draw(kept, rows.upload(numbers[kept.rows, None]))


def distribution(rows: Rows) -> Tensor:
    """The probabilities that tokens are drawn from, [rows, vocab_size] float64; 1 for a greedy row's token."""
    result = torch.zeros(rows.logits.shape, dtype=torch.float64, device=rows.logits.device)
    samples = _samples(rows)
    for row in np.flatnonzero(~samples):
        result[row, rows.logits[row].argmax()] = 1.0
    for kept in kept_tokens(rows, np.flatnonzero(samples)):
        for index, row in enumerate(kept.rows):
            ids = slice(None) if kept.ids is None else kept.ids[index]
            result[row, ids] = kept.weights[index].double()
    total = result.sum(dim=-1, keepdim=True)
    result /= total
    result[~(total.squeeze(-1) > 0)] = 0.0
    result[:, 0] += (~(total > 0)).squeeze(-1)
    return result


def random_numbers(rows: Rows, purpose: Purpose) -> NDArray[np.float64]:
    """The rows' numbers in [0, 1), [rows]."""
    numbers = rows.numbers
    return uniforms(numbers["seed"], numbers["sequence_index"], rows.positions, purpose)


def inverse_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """Index [n, 1] at which the sum of [n, size] float64 weights exceeds `uniform` [n, 1] of the total."""
    cumulative = weights.cumsum(dim=-1)
    return _first_beyond(cumulative, uniform * cumulative[:, -1:])


def _samples(rows: Rows) -> NDArray[np.bool_]:
    return rows.numbers["needs"] & int(Needs.SAMPLE) != 0


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

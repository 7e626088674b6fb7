"""Step 9 of the pipeline for greedy and sampling rows: the token, or the distribution that it is drawn from."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inflight.decoding.draws import Drawn
from inflight.decoding.row_kernels import RowKernels
from inflight.decoding.rows import Rows, take_rows
from inflight.decoding.slot_parameters import Needs
from inflight.decoding.top_k_top_p import kept_tokens
from inflight.decoding.transfer import to_host

NO_TOKEN = -1
"""What a row has chosen that has every token banned."""


def choose(
    rows: Rows, wanted: NDArray[np.int64], beside: Tensor, kernels: RowKernels
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """A token for each of the rows `wanted`, and `beside` [rows] float32, on the host; steps 1 to 8 are done.

    Returns:
        [rows] tokens, NO_TOKEN where all are banned, anything for rows that are not wanted; and `beside`. All of
        it comes back in one copy, unless a row's top_p takes many tokens: then it is drawn for again.
    """
    on_device, guesses = _choose(rows, wanted, kernels, may_guess=rows.logits.device.type != "cpu")
    tokens, beside, *are_final = to_host(on_device, beside, *(guess.is_final for guess in guesses))
    again = [
        guess.rows[~is_final & (tokens[guess.rows] != NO_TOKEN)]
        for guess, is_final in zip(guesses, are_final, strict=True)
    ]
    for drawn in itertools.chain.from_iterable(kernels.draw(rows, part) for part in again):
        tokens[drawn.rows] = drawn.tokens.cpu().numpy()
    return tokens, beside


def choose_on_device(rows: Rows, kernels: RowKernels) -> Tensor:
    """A token for each row, [rows] int64, that the device will know; NO_TOKEN where all are banned.

    Only a top_p alone is waited for.
    """
    return _choose(rows, np.arange(len(rows.slots)), kernels, may_guess=False)[0]


def _choose(
    rows: Rows, wanted: NDArray[np.int64], kernels: RowKernels, may_guess: bool
) -> tuple[Tensor, list[Drawn]]:
    """[rows] tokens on the device, as `choose` returns them; and what of it is a guess."""
    tokens, guesses = _likely(rows, wanted, kernels, may_guess)
    if len(rows.needing(Needs.BANS)):
        chosen = rows.logits.gather(-1, tokens[:, None]).squeeze(-1)
        tokens.masked_fill_(chosen == -torch.inf, NO_TOKEN)  # then no other is possible either
    return tokens, guesses


def _likely(
    rows: Rows, wanted: NDArray[np.int64], kernels: RowKernels, may_guess: bool
) -> tuple[Tensor, list[Drawn]]:
    """As `_choose`, but any token where all are banned."""
    samples = _samples(rows)[wanted]
    greedy, sampled = wanted[~samples], wanted[samples]
    if len(greedy) == len(rows.slots):
        return rows.logits.argmax(dim=-1), []
    tokens = torch.zeros(len(rows.slots), dtype=torch.int64, device=rows.logits.device)
    if len(greedy):
        tokens[rows.upload(greedy)] = take_rows(rows.logits, greedy).argmax(dim=-1)
    guesses = []
    for drawn in kernels.draw(rows, sampled, may_guess):
        tokens[rows.upload(drawn.rows)] = drawn.tokens
        if drawn.is_final is not None:
            guesses.append(drawn)
    return tokens, guesses


def distribution(rows: Rows) -> Tensor:
    """The probabilities that tokens are drawn from, [rows, vocab_size] float64; 1 for a greedy row's token.

    All are 0 where every token is banned.
    """
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
    result[rows.logits.amax(dim=-1) == -torch.inf] = 0.0
    return result


def _samples(rows: Rows) -> NDArray[np.bool_]:
    return rows.numbers["needs"] & int(Needs.SAMPLE) != 0

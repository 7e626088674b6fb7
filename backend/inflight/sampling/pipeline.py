"""The steps from a model's logits to a token, vectorized over the rows of a batch of different requests.

First the steps of `pipeline_steps` change a row's logits, in this order: logits post-processor, allowed tokens,
biases, penalties, bans, guide, and top_n_sigma for rows that are sampled. A token banned by one step stays banned.
The pass over a row that applies a guide's mask also finds the highest logit, which no later step may change.

Then a greedy row takes the token with the highest logit. For a sampled row, logits are divided by the temperature,
and three limits apply in turn: the top_k highest are kept; of these the smallest set of the most likely tokens
whose probability reaches top_p (after decay); of these the tokens of at least min-p times the highest
probability. A token is sampled by inverse CDF: one uniform number, over the remaining tokens in ascending order
of id (`top_k_top_p.py`). Rows of a beam search take log_softmax instead (`details.py`). Then draft tokens are
accepted or rejected (`drafts.py`). The scheduler handles end ids, stop words and lengths.

Ties between logits always go to the lower id. If all tokens of a row are banned, no token is sampled, and the
row's request ends with an error. A row whose highest logit in the model's output is not finite fails the batch
(`nan_check.py`). Biases and penalties keep a logit within bounds (`bounded`); only bans and a bias of -inf make
it -inf.

TensorRT-LLM divides by the temperature after the biases. This package divides last, when few tokens are left, and
multiplies presence and frequency penalties by the temperature before, which gives equal probabilities. A step runs
only on the rows that use it, and touches only tokens that were seen, named or banned; only embedding_bias,
allowed_token_ids and guides touch the whole vocabulary.

A new control is a field of `SamplingConfig` and, if it changes logits, a step in this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inflight.core.request.request import Request
from inflight.errors import InflightError
from inflight.sampling.guides import Guides, guide_of
from inflight.sampling.history import History, repeated
from inflight.sampling.logits_post_processors import LogitsPostProcessors
from inflight.sampling.post_processor_step import PostProcessorStep
from inflight.sampling.row_kernels import RowKernels, bounded
from inflight.sampling.rows import Failures, Rows, SlotParameters, Step, host_tensor
from inflight.sampling.transfer import as_array, upload

_LARGEST_FLOAT = float(np.finfo(np.float32).max)

Ids = NDArray[np.int64]


def pipeline_steps(
    history: History, kernels: RowKernels, processors: LogitsPostProcessors, guides: Guides
) -> tuple[Step, ...]:
    """Return the steps in order; `history` has the tokens of each slot so far."""
    return (
        PostProcessorStep(processors, history).step,
        Step(_allowed_token_ids, _ban_others),
        Step(_embedding_bias, _add_embedding_bias),
        Step(_logit_bias, _add_logit_bias),
        Step(_penalizes, lambda rows, indices, _: kernels.penalize(rows, indices, history), bans=False),
        Step(_min_length, _ban_early_ends),
        Step(_bad_words, partial(_ban_words, history)),
        Step(_no_repeat_ngram_size, partial(_ban_repeats, history)),
        Step(guide_of, lambda rows, indices, _: guides.mask(rows, indices, kernels)),
        Step(_top_n_sigma, _keep_near_highest, bans=False),
    )


def process(rows: Rows, slots: SlotParameters) -> Failures:
    """Apply all steps that rows use to their logits, in place; return the rows that have failed.

    Later steps skip a failed row. Its logits are set to 0, so that sampling from it is possible.
    """
    used = rows.numbers["steps"]
    used_by_any = int(np.bitwise_or.reduce(used))
    failures: dict[int, InflightError] = {}
    for index, step in enumerate(slots.steps):
        if used_by_any >> index & 1:
            indices = np.flatnonzero(used >> index & 1)
            if failures:
                indices = np.setdiff1d(indices, list(failures))
            failed = step.apply(
                rows, indices, [slots[slot].prepared[index] for slot in rows.slots[indices].tolist()]
            )
            if failed:
                failures.update(failed)
                rows.logits.index_fill_(0, rows.upload(_ids(list(failed))), 0.0)
    return failures


# ------------------------------------------------------------------------------ allowed tokens

# Allowed tokens and logit_bias are stored as ids and uploaded with the batch: a row of numbers per slot would take
# 600 KB with a vocabulary of 150,000.


def _allowed_token_ids(request: Request, _: torch.device) -> Ids | None:
    ids = request.sampling.allowed_token_ids
    return np.unique(_ids(ids)) if ids else None


def _ban_others(rows: Rows, indices: Ids, allowed: Sequence[Ids]) -> None:
    where, logits = _cells(rows, indices, allowed), rows.logits.view(-1)
    allowed_logits = logits.take(where)
    rows.logits.index_fill_(0, rows.upload(indices), -torch.inf)
    logits[where] = allowed_logits


# ------------------------------------------------------------------------------ biases


def _embedding_bias(request: Request, device: torch.device) -> Tensor | None:
    """Return the request's embedding bias [vocab_size] float32 on the device; None without one."""
    bias = request.embedding_bias
    return None if bias is None else upload(as_array(host_tensor(bias)), device)


def _add_embedding_bias(rows: Rows, indices: Ids, biases: Sequence[Tensor]) -> None:
    for index, bias in zip(indices, biases, strict=True):
        biased = rows.logits[index].add_(bias)
        rows.logits[index] = bounded(biased, ~(biased > -torch.inf))  # -inf + inf is impossible too


def _logit_bias(request: Request, _: torch.device) -> tuple[Ids, NDArray[np.float32]] | None:
    """Return distinct token ids, and the bias of each."""
    sampling = request.sampling
    if not sampling.logit_bias_ids:
        return None
    ids, places = np.unique(_ids(sampling.logit_bias_ids), return_inverse=True)
    sums = np.bincount(places, weights=np.array(sampling.logit_bias_values, dtype=np.float64))
    return ids, np.where(np.isneginf(sums), sums, np.clip(sums, -_LARGEST_FLOAT, _LARGEST_FLOAT)).astype(
        np.float32
    )


def _add_logit_bias(rows: Rows, indices: Ids, biases: Sequence[tuple[Ids, NDArray[np.float32]]]) -> None:
    where, logits = _cells(rows, indices, [ids for ids, _ in biases]), rows.logits.view(-1)
    biased = logits.take(where) + rows.upload(np.concatenate([values for _, values in biases]))
    logits[where] = bounded(biased, biased == -torch.inf)


# ------------------------------------------------------------------------------ penalties


def _penalizes(request: Request, _: torch.device) -> bool | None:
    return request.sampling.penalizes or None


# ------------------------------------------------------------------------------ bans


def _min_length(request: Request, _: torch.device) -> Ids | None:
    """Return the end ids of a request that has end ids and a minimum length."""
    return _ids(request.end_ids) if request.sampling.min_length > 0 and request.end_ids else None


def _ban_early_ends(rows: Rows, indices: Ids, end_ids: Sequence[Ids]) -> None:
    numbers = rows.numbers[indices]
    early = np.flatnonzero(rows.positions[indices] - numbers["prompt_length"] < numbers["min_length"])
    if len(early):
        _ban(rows, _cells(rows, indices[early], [end_ids[int(index)] for index in early]))


@dataclass(frozen=True, slots=True)
class BadWords:
    """Bad words as arrays. The last token of a word of several tokens is banned where its other tokens come
    before.

    Attributes:
        single: [n] tokens that are always banned.
        last: [words] last token of each word of several tokens.
        word: [parts] for each other token of these words, the index of its word.
        back: [parts] the token's distance from the row's position, 1 or more.
        token: [parts] the token's id.
    """

    single: Ids
    last: Ids
    word: Ids
    back: Ids
    token: Ids


def _bad_words(request: Request, _: torch.device) -> BadWords | None:
    words = request.bad_words
    if not words:
        return None
    long = [word for word in words if len(word) > 1]
    parts = [
        (index, len(word) - 1 - place, token)
        for index, word in enumerate(long)
        for place, token in enumerate(word[:-1])
    ]
    return BadWords(
        _ids([word[0] for word in words if len(word) == 1]),
        _ids([word[-1] for word in long]),
        *_ids(parts).reshape(-1, 3).T,
    )


def _ban_words(history: History, rows: Rows, indices: Ids, words: Sequence[BadWords]) -> None:
    _ban(rows, _cells(rows, indices, [word.single for word in words]))
    counts = [len(word.last) for word in words]
    if not any(counts):
        return
    # Only the device knows which words match, so a ban (-inf) or 0 is added for every word.
    first_words = np.cumsum(counts) - counts
    parts = [len(word.token) for word in words]
    owners = np.repeat(indices, parts)
    columns = rows.positions[owners] - np.concatenate([word.back for word in words])
    part_of = np.concatenate([word.word for word in words]) + np.repeat(first_words, parts)
    slot, column, token, word_of = rows.upload(
        np.stack([rows.slots[owners], columns, np.concatenate([word.token for word in words]), part_of])
    )
    differs = (column < 0) | (history.at(slot, column.clamp(min=0)) != token)
    mismatches = torch.zeros(sum(counts), dtype=rows.logits.dtype, device=slot.device)
    mismatches.scatter_add_(0, word_of, differs.to(mismatches.dtype))
    added = torch.zeros_like(mismatches).masked_fill_(mismatches == 0, -torch.inf)
    rows.logits.view(-1).index_add_(0, _cells(rows, indices, [word.last for word in words]), added)


def _no_repeat_ngram_size(request: Request, _: torch.device) -> bool | None:
    return request.sampling.uses("no_repeat_ngram_size") or None


def _ban_repeats(history: History, rows: Rows, indices: Ids, _: Sequence[Any]) -> None:
    sizes = rows.numbers["no_repeat_ngram_size"]
    indices = indices[sizes[indices] <= rows.positions[indices]]
    if len(indices):
        slots, lengths = rows.slots[indices], rows.positions[indices]
        row, token = repeated(history, slots, lengths, sizes[indices], rows.vocab_size)
        _ban(rows, rows.upload(indices)[row] * rows.vocab_size + token)


# ------------------------------------------------------------------------------ standard deviations


def _top_n_sigma(request: Request, _: torch.device) -> bool | None:
    """Whether top_n_sigma applies to a request; it has no effect on greedy requests and beam searches."""
    sampling = request.sampling
    return (sampling.top_n_sigma > 0.0 and not sampling.greedy and not sampling.uses_beams) or None


def _keep_near_highest(rows: Rows, indices: Ids, _: Sequence[Any]) -> None:
    """Ban logits that are more than top_n_sigma standard deviations (of the possible logits) below the highest.

    The temperature makes no difference, as it scales differences and standard deviation by the same factor.
    """
    limits = rows.upload(rows.numbers["top_n_sigma"][indices])
    # One row at a time, as sums must depend on the row alone.
    for index, limit in zip(indices.tolist(), limits, strict=True):
        row = rows.logits[index]
        logits, possible = row.double(), row > -torch.inf
        count = possible.sum().clamp_(min=1)
        mean = torch.where(possible, logits, 0.0).sum() / count
        variance = torch.where(possible, (logits - mean).square(), 0.0).sum() / count
        row.masked_fill_(logits < logits.max() - limit * variance.sqrt(), -torch.inf)


def _ban(rows: Rows, where: Tensor) -> None:
    rows.logits.view(-1).index_fill_(0, where, -torch.inf)


def _cells(rows: Rows, indices: Ids, tokens: Sequence[Ids]) -> Tensor:
    """Return indices into the flattened logits: of `tokens[i]` in the row `indices[i]`, for each i."""
    owners = np.repeat(indices, [len(ids) for ids in tokens])
    return rows.upload(owners * rows.vocab_size + np.concatenate(tokens))


def _ids(values: Sequence[Any]) -> Ids:
    return np.array(values, dtype=np.int64)

"""The one way from a model's logits to a token, vectorised over the rows of a batch that mixes requests.

For each row, in this order, which is TensorRT-LLM's:

 1. embedding_bias is added.
 2. temperature divides; 0 counts as 1.
 3. repetition_penalty p: l < 0 ? l * p : l / p for every token seen, in the prompt or since.
 4. presence_penalty is taken once from every token seen.
 5. frequency_penalty is taken from a token for every time it was seen.
 6. min_length: while fewer tokens are generated, end ids are banned.
 7. Bad words: a single token is banned always, the last of several where the others stand before it.
 8. no_repeat_ngram_size n: a token is banned that would complete an n-gram which has occurred.
 9. A greedy row takes the highest logit. A sampling row keeps the top_k highest; of those the smallest set of the
    likeliest whose share reaches top_p (after decay); of those the ones with at least min_p times the largest
    probability; and draws by inverse CDF: one uniform number, kept tokens in ascending order of id. Rows of a beam
    search take log_softmax instead (`beams.py`); draft tokens are then accepted or not (`drafts.py`).
10. End ids, stop words and length are the scheduler's.

Of equal logits the lower id comes first, everywhere. A row that has every token banned gets none, which ends its
request with an error; one whose logits are no numbers fails its batch (`usable.py`). What steps 1 and 3 to 5 make
of a logit stays within bounds (`bounds.py`), and only bans and a bias of -inf make one -inf.

A batch pays for what its rows use: each step runs on the rows that ask for it, and touches the tokens seen or
banned and not the vocabulary. To that end step 2 comes last: what is taken in steps 4 and 5 is multiplied by the
temperature instead, which the few tokens that are left in step 9 are divided by. That changes no probability.

This module is steps 1 to 8, `penalties.py` the third to the fifth; `sampler.py` is step 9.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inflight.decoding.bounds import bounded
from inflight.decoding.history import History
from inflight.decoding.ngrams import repeated
from inflight.decoding.row_kernels import RowKernels
from inflight.decoding.rows import Rows
from inflight.decoding.slot_parameters import Needs, SlotParameters


def process(rows: Rows, slots: SlotParameters, history: History, kernels: RowKernels) -> None:
    """Steps 1 to 8 on the logits, in place, but for the division by the temperature."""
    for index in rows.needing(Needs.BIAS):
        bias = slots.of(rows.slots[index]).bias
        biased = rows.logits[index].add_(bias)
        rows.logits[index] = bounded(biased, ~(biased > -torch.inf))  # nor is -inf + inf possible
    penalized = rows.needing(Needs.PENALTIES)
    if len(penalized):
        kernels.penalize(rows, penalized, history)
    banned = [*_early_ends(rows, slots), *_bad_tokens(rows, slots), *_repeats(rows, history)]
    if banned:
        rows.logits.view(-1).index_fill_(0, torch.cat(banned), -torch.inf)
    _ban_ends_of_words(rows, slots, history)


def _early_ends(rows: Rows, slots: SlotParameters) -> Iterator[Tensor]:
    generated = rows.positions - rows.numbers["prompt_length"]
    indices = rows.needing(Needs.MIN_LENGTH)
    indices = indices[generated[indices] < rows.numbers["min_length"][indices]]
    if len(indices):
        yield _cells(rows, indices, [slots.of(slot).end_ids for slot in rows.slots[indices]])


def _bad_tokens(rows: Rows, slots: SlotParameters) -> Iterator[Tensor]:
    indices = rows.needing(Needs.BAD_WORDS)
    if len(indices):
        yield _cells(rows, indices, [slots.of(slot).bad_words.single for slot in rows.slots[indices]])


def _ban_ends_of_words(rows: Rows, slots: SlotParameters, history: History) -> None:
    """In place, since which words are begun is known to the device alone, and their number too."""
    indices = rows.needing(Needs.BAD_WORDS)
    words = [slots.of(slot).bad_words for slot in rows.slots[indices]]
    counts = [len(word.last) for word in words]
    if not any(counts):
        return
    first_words = np.cumsum(counts) - counts
    parts = [len(word.token) for word in words]
    owners = np.repeat(indices, parts)
    columns = rows.positions[owners] - np.concatenate([word.back for word in words])
    word = np.concatenate([word.word for word in words]) + np.repeat(first_words, parts)
    slot, column, token, word_of = rows.upload(
        np.stack([rows.slots[owners], columns, np.concatenate([word.token for word in words]), word])
    )
    differs = (column < 0) | (history.at(slot, column.clamp(min=0)) != token)
    mismatches = torch.zeros(sum(counts), dtype=rows.logits.dtype, device=slot.device)
    mismatches.scatter_add_(0, word_of, differs.to(mismatches.dtype))
    added = torch.zeros_like(mismatches).masked_fill_(mismatches == 0, -torch.inf)
    rows.logits.view(-1).index_add_(0, _cells(rows, indices, [word.last for word in words]), added)


def _repeats(rows: Rows, history: History) -> Iterator[Tensor]:
    sizes = rows.numbers["no_repeat_ngram_size"]
    indices = rows.needing(Needs.NO_REPEAT)
    indices = indices[sizes[indices] <= rows.positions[indices]]
    if len(indices):
        row, token = repeated(history, rows.slots[indices], rows.positions[indices], sizes[indices])
        yield rows.upload(indices)[row] * rows.vocab_size + token


def _cells(rows: Rows, indices: NDArray[np.int64], tokens: list[NDArray[np.int64]]) -> Tensor:
    """Where in the flattened logits the tokens of each of the rows `indices` are."""
    owners = np.repeat(indices, [len(ids) for ids in tokens])
    return rows.upload(owners * rows.vocab_size + np.concatenate(tokens))

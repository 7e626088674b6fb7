"""Log probabilities and logits beside chosen tokens, for rows that ask: of the model's logits as they came.

`with_drawn_log_probs` alone is about what became of them: the distributions that tokens were drawn from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inflight.core.request.request import OutputConfig
from inflight.core.request.response import TopLogProbs
from inflight.core.schedule.batch import TokenDetails
from inflight.decoding.argmax import likeliest
from inflight.decoding.rows import Rows, take_rows
from inflight.decoding.sampler import distribution


def token_details(logits: Tensor, token_ids: Tensor, outputs: Sequence[OutputConfig]) -> list[TokenDetails]:
    """Details of one token a row.

    Args:
        logits: [rows, vocab_size] float32.
        token_ids: [rows] int64 on the same device: the chosen tokens.
        outputs: [rows] what is wanted.
    """
    log_probs: list[tuple[float, ...]] = [()] * len(outputs)
    top: list[tuple[TopLogProbs, ...]] = [()] * len(outputs)
    wanted = _which(output.return_log_probs or output.num_top_log_probs > 0 for output in outputs)
    if len(wanted):
        counts = [outputs[row].num_top_log_probs for row in wanted]
        chosen, likely = log_probs_of(
            take_rows(logits, wanted), take_rows(token_ids, wanted)[:, None], counts
        )
        for row, values, top_log_probs in zip(wanted, chosen.tolist(), likely, strict=True):
            log_probs[row] = tuple(values) if outputs[row].return_log_probs else ()
            top[row] = top_log_probs
    raw = logits_of(logits, [output.return_generation_logits for output in outputs])
    return [TokenDetails(*parts) for parts in zip(log_probs, top, raw, strict=True)]


def with_drawn_log_probs(
    details: Sequence[TokenDetails], rows: Rows, chosen: NDArray[np.int64]
) -> list[TokenDetails]:
    """The details, those with log probabilities with the tokens' in the distributions they were drawn from too.

    Args:
        details: One per row.
        rows: Processed.
        chosen: [rows] the chosen tokens.
    """
    wanted = _which(bool(each.log_probs) for each in details)
    result = list(details)
    if len(wanted):
        shares = distribution(rows.select(wanted)).gather(-1, rows.upload(chosen[wanted])[:, None])
        for row, value in zip(wanted, shares.log()[:, 0].tolist(), strict=True):
            result[row] = replace(details[row], drawn_log_probs=(value,))
    return result


def join_details(first: TokenDetails, then: TokenDetails) -> TokenDetails:
    """Details of consecutive tokens of one sequence."""
    return TokenDetails(
        first.log_probs + then.log_probs,
        first.top_log_probs + then.top_log_probs,
        first.logits + then.logits,
        first.drawn_log_probs + then.drawn_log_probs,
    )


def log_probs_of(
    logits: Tensor, token_ids: Tensor, counts: Sequence[int]
) -> tuple[Tensor, list[tuple[TopLogProbs, ...]]]:
    """Log probabilities, float32, of tokens and of the likeliest tokens.

    Args:
        logits: [rows, vocab_size] float32.
        token_ids: [rows, n] int64 on the same device.
        counts: [rows] how many of the likeliest tokens; of equally likely ones the lower ids come first.

    Returns:
        [rows, n], and for each row its likeliest tokens, () where their count is 0.
    """
    num_tokens, most = token_ids.shape[-1], max(counts)
    if most:
        token_ids = torch.cat([token_ids, likeliest(logits, most)], dim=-1)
    found = logits.log_softmax(dim=-1).gather(-1, token_ids)
    likely = zip(counts, token_ids[:, num_tokens:].tolist(), found[:, num_tokens:].tolist(), strict=True)
    return found[:, :num_tokens], [
        (TopLogProbs(tuple(ids[:count]), tuple(values[:count])),) if count else ()
        for count, ids, values in likely
    ]


def logits_of(logits: Tensor, wanted: Sequence[bool]) -> list[tuple[bytes, ...]]:
    """Per row its logits; () where they are not wanted."""
    copies: list[tuple[bytes, ...]] = [()] * len(wanted)
    indices = _which(wanted)
    if len(indices):
        for row, values in zip(indices, take_rows(logits, indices).cpu().numpy()):
            copies[row] = (values.tobytes(),)
    return copies


def _which(wanted: Sequence[bool]) -> NDArray[np.int64]:
    return np.flatnonzero(np.fromiter(wanted, dtype=bool))

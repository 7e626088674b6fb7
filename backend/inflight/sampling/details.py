"""The values returned beside chosen tokens, for rows that ask; and the candidates of beam searches.

Log probabilities and logits are of the model's logits as they came. `with_drawn_log_probs` alone is about what
became of them: the distributions that tokens were drawn from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inflight.core.request.beam_search import BeamCandidates
from inflight.core.request.guide import GUIDE_END
from inflight.core.request.request import OutputOptions, Request
from inflight.core.request.response import TopLogProbs
from inflight.core.schedule.batch import BeamGroup, TokenDetails
from inflight.sampling.argmax import top_indices
from inflight.sampling.rows import Rows, select_rows
from inflight.sampling.top_k_top_p import distribution
from inflight.sampling.transfer import as_array, to_list, upload


def token_details(logits: Tensor, token_ids: Tensor, outputs: Sequence[OutputOptions]) -> list[TokenDetails]:
    """The details that each row's request wants about its token.

    Args:
        logits: [rows, vocab_size] float32.
        token_ids: [rows] int64 on the same device: the chosen tokens.
        outputs: [rows] what is wanted.
    """
    log_probs: list[tuple[float, ...]] = [()] * len(outputs)
    top: list[tuple[TopLogProbs, ...]] = [()] * len(outputs)
    wanted = _which(output.return_log_probs or output.num_top_log_probs > 0 for output in outputs)
    if len(wanted):
        counts = [outputs[row].num_top_log_probs for row in map(int, wanted)]
        chosen, likely = find_log_probs(
            select_rows(logits, wanted), select_rows(token_ids, wanted)[:, None], counts
        )
        for row, values, top_log_probs in zip(map(int, wanted), to_list(chosen), likely, strict=True):
            log_probs[row] = tuple(values) if outputs[row].return_log_probs else ()
            top[row] = top_log_probs
    raw = copy_logits(logits, [output.return_generation_logits for output in outputs])
    return [TokenDetails(*parts) for parts in zip(log_probs, top, raw, strict=True)]


def with_drawn_log_probs(
    details: Sequence[TokenDetails], rows: Rows, chosen: NDArray[np.int64]
) -> list[TokenDetails]:
    """Add to details with log probabilities those in the distributions that the tokens were drawn from.

    Args:
        details: One per row.
        rows: Processed.
        chosen: [rows] the chosen tokens.
    """
    wanted = _which(bool(each.log_probs) for each in details)
    result = list(details)
    if len(wanted):
        shares = distribution(rows.select(wanted)).gather(-1, rows.upload(chosen[wanted])[:, None])
        for row, value in zip(map(int, wanted), to_list(shares.log()[:, 0]), strict=True):
            result[row] = replace(details[row], drawn_log_probs=(value,))
    return result


def join_details(first: TokenDetails, then: TokenDetails) -> TokenDetails:
    """The details of consecutive tokens of one sequence, in one."""
    return TokenDetails(
        first.log_probs + then.log_probs,
        first.top_log_probs + then.top_log_probs,
        first.logits + then.logits,
        first.drawn_log_probs + then.drawn_log_probs,
    )


def find_log_probs(
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
        token_ids = torch.cat([token_ids, top_indices(logits, most)], dim=-1)
    found = logits.log_softmax(dim=-1).gather(-1, token_ids)
    likely = zip(counts, to_list(token_ids[:, num_tokens:]), to_list(found[:, num_tokens:]), strict=True)
    return found[:, :num_tokens], [
        (TopLogProbs(tuple(ids[:count]), tuple(values[:count])),) if count else ()
        for count, ids, values in likely
    ]


def copy_logits(logits: Tensor, wanted: Sequence[bool]) -> list[tuple[bytes, ...]]:
    """The bytes of each row's logits; () where they are not wanted."""
    copies: list[tuple[bytes, ...]] = [()] * len(wanted)
    indices = _which(wanted)
    if len(indices):
        for row, values in zip(indices, as_array(select_rows(logits, indices).cpu())):
            copies[row] = (values.tobytes(),)
    return copies


def beam_candidates(
    group: BeamGroup,
    request: Request,
    logits: Tensor,
    raw_logits: Tensor | None,
    ends: NDArray[np.bool_],
) -> BeamCandidates:
    """The candidates of a beam search, with what its request wants to know of them.

    Args:
        group: The search's rows.
        request: Whose search it is.
        logits: [rows, vocab_size] float32, processed.
        raw_logits: [rows, vocab_size] float32, as the model made them; None if nothing is wanted of them.
        ends: [rows] whether a row's guide can only end, and the request has no end id: its only candidate, for
            certain, is GUIDE_END. Its logits are changed.
    """
    if ends.any():
        logits[upload(np.flatnonzero(ends), logits.device), 0] = (
            0.0  # stands for the end; the others are -inf
        )
    rows, token_ids, scores = _best_continuations(group, request, logits)
    of, tokens = to_list(rows), to_list(token_ids)
    shown = [GUIDE_END if ends[row] else token for row, token in zip(of, tokens)] if ends.any() else tokens
    found = tuple(of), tuple(shown), tuple(to_list(scores))
    if raw_logits is None:
        return BeamCandidates(*found)
    output, count = request.output, len(group.slots)
    # Of each row all the candidates' tokens, and then of each candidate its own.
    of_rows, top = find_log_probs(raw_logits, token_ids.expand(count, -1), [output.num_top_log_probs] * count)
    log_probs = tuple(to_list(of_rows.gather(0, rows[None])[0])) if output.return_log_probs else ()
    raw = copy_logits(raw_logits, [output.return_generation_logits] * count)
    return BeamCandidates(*found, log_probs, tuple(chain(*top)), tuple(chain(*raw)))


def _best_continuations(group: BeamGroup, request: Request, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rank what a search may go on with: rows, token ids (int64) and scores (float32), [n] each, best first.

    Scores are added up in float32, as transformers does.
    """
    sampling, vocab_size = request.sampling, logits.shape[-1]
    if sampling.temperature not in (0.0, 1.0):
        # Quotients of differences cannot overflow to +inf, as those of logits can.
        logits = (logits - logits.amax(dim=-1, keepdim=True)) / sampling.temperature
    # Where every token is banned, all are as impossible as the others.
    totals = logits.log_softmax(dim=-1).nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    totals += torch.tensor(group.scores, dtype=torch.float32, device=logits.device)[:, None]
    ranked = totals
    if sampling.beam_search_diversity_rate:
        indices = torch.arange(len(group.slots), device=logits.device)[:, None]
        ranked = totals + sampling.beam_search_diversity_rate * indices
    best = top_indices(ranked.view(1, -1), group.num_candidates)[0]
    return best // vocab_size, best % vocab_size, totals.view(-1)[best]


def _which(wanted: Iterable[bool]) -> NDArray[np.int64]:
    return np.flatnonzero(np.fromiter(wanted, dtype=bool))

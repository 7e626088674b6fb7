"""Log probabilities and logits of sampled tokens, for rows that ask for them, and the candidates of beam searches.

Details are computed from the model's unchanged logits, except in `with_drawn_log_probs`, which uses the
distributions from which tokens were sampled.
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
    """Return the details that each row's request asks for about its token.

    Args:
        logits: [rows, vocab_size] float32.
        token_ids: [rows] int64 on the logits' device: the sampled tokens.
        outputs: [rows] the output options of each row's request.
    """
    log_probs: list[tuple[float, ...]] = [()] * len(outputs)
    top: list[tuple[TopLogProbs, ...]] = [()] * len(outputs)
    wanted = _true_indices(output.return_log_probs or output.num_top_log_probs > 0 for output in outputs)
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
    """Add log probabilities in the distributions from which tokens were sampled, to details with log
    probabilities.

    Args:
        details: One per row.
        rows: The processed rows.
        chosen: [rows] the sampled tokens.
    """
    wanted = _true_indices(bool(each.log_probs) for each in details)
    result = list(details)
    if len(wanted):
        shares = distribution(rows.select(wanted)).gather(-1, rows.upload(chosen[wanted])[:, None])
        for row, value in zip(map(int, wanted), to_list(shares.log()[:, 0]), strict=True):
            result[row] = replace(details[row], drawn_log_probs=(value,))
    return result


def join_details(first: TokenDetails, then: TokenDetails) -> TokenDetails:
    """Join the details of consecutive tokens of one sequence."""
    return TokenDetails(
        first.log_probs + then.log_probs,
        first.top_log_probs + then.top_log_probs,
        first.logits + then.logits,
        first.drawn_log_probs + then.drawn_log_probs,
    )


def find_log_probs(
    logits: Tensor, token_ids: Tensor, counts: Sequence[int]
) -> tuple[Tensor, list[tuple[TopLogProbs, ...]]]:
    """Return float32 log probabilities of the given tokens and of the most likely ones.

    Args:
        logits: [rows, vocab_size] float32.
        token_ids: [rows, n] int64 on the logits' device.
        counts: [rows] numbers of most likely tokens to return; ties by ascending id.

    Returns:
        Log probabilities [rows, n], and each row's most likely tokens; () for a row whose count is 0.
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
    """Return the bytes of each row's logits; () for a row whose logits are not wanted."""
    copies: list[tuple[bytes, ...]] = [()] * len(wanted)
    indices = _true_indices(wanted)
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
    """Return the candidates of a beam search, with the details that its request asks for.

    Args:
        group: The search's rows.
        request: The search's request.
        logits: [rows, vocab_size] float32, processed.
        raw_logits: [rows, vocab_size] float32, the model's unchanged logits; None if no details are wanted.
        ends: [rows] whether a row's guide allows only the end and the request has no end id. GUIDE_END is then the
            row's only candidate, with probability 1, and its logits are changed.
    """
    if ends.any():
        logits[upload(np.flatnonzero(ends), logits.device), 0] = (
            0.0  # token 0 stands for the end; all other logits are -inf
        )
    rows, token_ids, scores = _best_continuations(group, request, logits)
    of, tokens = to_list(rows), to_list(token_ids)
    shown = [GUIDE_END if ends[row] else token for row, token in zip(of, tokens)] if ends.any() else tokens
    found = tuple(of), tuple(shown), tuple(to_list(scores))
    if raw_logits is None:
        return BeamCandidates(*found)
    output, count = request.output, len(group.slots)
    # The log probabilities of all candidates' tokens in every row, of which each candidate needs its own row's.
    of_rows, top = find_log_probs(raw_logits, token_ids.expand(count, -1), [output.num_top_log_probs] * count)
    log_probs = tuple(to_list(of_rows.gather(0, rows[None])[0])) if output.return_log_probs else ()
    raw = copy_logits(raw_logits, [output.return_generation_logits] * count)
    return BeamCandidates(*found, log_probs, tuple(chain(*top)), tuple(chain(*raw)))


def _best_continuations(group: BeamGroup, request: Request, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rank the continuations of a search; return rows and token ids (int64) and scores (float32), each [n],
    best first.

    Scores are added up in float32, as in transformers.
    """
    sampling, vocab_size = request.sampling, logits.shape[-1]
    if sampling.temperature not in (0.0, 1.0):
        # Unlike logits, differences from the maximum cannot overflow to +inf when divided.
        logits = (logits - logits.amax(dim=-1, keepdim=True)) / sampling.temperature
    # If every token is banned, all log probabilities are -inf.
    totals = logits.log_softmax(dim=-1).nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    totals += torch.tensor(group.scores, dtype=torch.float32, device=logits.device)[:, None]
    ranked = totals
    if sampling.beam_search_diversity_rate:
        indices = torch.arange(len(group.slots), device=logits.device)[:, None]
        ranked = totals + sampling.beam_search_diversity_rate * indices
    best = top_indices(ranked.view(1, -1), group.num_candidates)[0]
    return best // vocab_size, best % vocab_size, totals.view(-1)[best]


def _true_indices(wanted: Iterable[bool]) -> NDArray[np.int64]:
    return np.flatnonzero(np.fromiter(wanted, dtype=bool))

"""Step 9 of the pipeline for beam searches: the best continuations of each search's rows."""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor

from inflight.core.request.beam_search import BeamCandidates
from inflight.core.request.request import Request
from inflight.core.schedule.batch import BeamGroup
from inflight.decoding.argmax import likeliest
from inflight.decoding.details import log_probs_of, logits_of


def beam_candidates(
    group: BeamGroup, request: Request, logits: Tensor, raw_logits: Tensor | None
) -> BeamCandidates:
    """A search's candidates, with what its request wants to know of them.

    Args:
        group: The search's rows.
        request: Whose search it is.
        logits: [rows, vocab_size] float32, processed.
        raw_logits: [rows, vocab_size] float32, as the model made them; None if nothing is wanted of them.
    """
    rows, token_ids, scores = best_continuations(group, request, logits)
    found = tuple(rows.tolist()), tuple(token_ids.tolist()), tuple(scores.tolist())
    if raw_logits is None:
        return BeamCandidates(*found)
    output, count = request.output, len(group.slots)
    # Of each row all the candidates' tokens, and then of each candidate its own.
    of_rows, top = log_probs_of(raw_logits, token_ids.expand(count, -1), [output.num_top_log_probs] * count)
    log_probs = tuple(of_rows.gather(0, rows[None])[0].tolist()) if output.return_log_probs else ()
    raw = logits_of(raw_logits, [output.return_generation_logits] * count)
    return BeamCandidates(*found, log_probs, tuple(chain(*top)), tuple(chain(*raw)))


def best_continuations(group: BeamGroup, request: Request, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, token ids (int64) and scores (float32) of the candidates, [num_candidates] each, best first.

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
    best = likeliest(ranked.view(1, -1), group.num_candidates)[0]
    return best // vocab_size, best % vocab_size, totals.view(-1)[best]

"""Acceptance of draft tokens, and the token after them.

Without draft logits, each row samples its token as in a run without drafts, with the same random number, and
drafts are accepted as long as they equal these tokens. So the output equals the output of a run without drafts.
With draft logits, drafts are accepted by rejection sampling: the output has the target's distribution, whatever
the draft's is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inflight.core.request.request import ExternalDraft, Request
from inflight.core.schedule.batch import ContextChunk
from inflight.sampling.rng import Purpose
from inflight.sampling.rows import Rows, host_tensor, select_rows
from inflight.sampling.top_k_top_p import distribution, inverse_cdf, random_numbers
from inflight.sampling.transfer import as_array

NO_TOKEN = -1
"""The token of a row whose tokens are all banned."""


def drafts_of(chunk: ContextChunk) -> tuple[int, ...]:
    """Return the draft tokens at the end of a chunk."""
    return chunk.token_ids[len(chunk.token_ids) - chunk.num_draft_tokens :]


def weighed_draft(request: Request, chunk: ContextChunk, first_position: int) -> ExternalDraft | None:
    """Return the request's own draft, if the chunk verifies it and it has logits."""
    draft, tokens = request.draft, drafts_of(chunk)
    if draft is None or draft.logits is None or chunk.is_generation:
        return None
    is_own = first_position == request.prompt_length and tokens == draft.token_ids[: len(tokens)]
    return draft if is_own and tokens else None


def accept_equal(drafts: Sequence[int], chosen: Sequence[int]) -> list[int]:
    """Return the accepted drafts, which equal the sampled tokens up to the first difference, followed by the
    next token.

    The next token may be NO_TOKEN.

    Args:
        drafts: [d].
        chosen: [d + 1].
    """
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == chosen[accepted]:
        accepted += 1
    return list(chosen[: accepted + 1])


def accept_by_chance(drafts: Sequence[int], rows: Rows, draft: ExternalDraft, bonus: int) -> list[int]:
    """Return the new tokens by rejection sampling: the accepted drafts and one more.

    Args:
        drafts: [d].
        rows: The d processed rows at the positions of the drafts.
        draft: The draft's logits, and optionally a threshold to use instead of chance.
        bonus: The token sampled from the row after the last draft.
    """
    assert draft.logits is not None, "a draft that is accepted by chance has logits"
    proposed = host_tensor(draft.logits)[: len(drafts)].to(rows.logits.device)
    accepted, others = weigh(rows, np.array(drafts, dtype=np.int64), proposed, draft.acceptance_threshold)
    count = len(drafts) if accepted.all() else int(accepted.argmin())
    return [*drafts[:count], bonus if count == len(drafts) else int(others[count])]


def weigh(
    rows: Rows, drafts: NDArray[np.int64], draft_logits: Tensor, threshold: float | None
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Return whether each row's draft token is accepted, and the replacement of each rejected one, maybe NO_TOKEN.

    Args:
        rows: [n] processed rows.
        drafts: [n] token ids.
        draft_logits: [n, vocab_size]; softmax of a row is the distribution of its draft token.
        threshold: A token is accepted if target / draft is at least the threshold; None: by chance.
    """
    target, proposed = distribution(rows), draft_logits.double().softmax(dim=-1)
    tokens = rows.upload(drafts[:, None])
    shares = torch.cat([target.gather(-1, tokens), proposed.gather(-1, tokens)], dim=-1)
    of_target, of_draft = as_array(shares.cpu()).T
    if threshold is None:
        accepted = of_target > of_draft * random_numbers(rows, Purpose.ACCEPT)
    else:
        accepted = of_target >= of_draft * threshold
    accepted &= of_target > 0.0  # a banned token is never accepted, whatever the threshold
    others = np.zeros_like(drafts)
    refused = np.flatnonzero(~accepted)
    if len(refused):
        others[refused] = _resample(target, proposed, rows, refused)
    return accepted, others


def _resample(target: Tensor, proposed: Tensor, rows: Rows, refused: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sample replacements of rejected drafts from the normalized max(target - proposed, 0)."""
    target = select_rows(target, refused)
    rest = (target - select_rows(proposed, refused)).clamp_(min=0.0)
    # If the distributions are equal, so that the difference is 0, only a threshold above 1 rejects a token.
    rest = torch.where(rest.sum(dim=-1, keepdim=True) > 0.0, rest, target)
    numbers = random_numbers(rows, Purpose.RESAMPLE)[refused, None]
    tokens = inverse_cdf(rest, rows.upload(numbers)).squeeze(-1)
    return as_array(tokens.masked_fill_(rest.sum(dim=-1) == 0.0, NO_TOKEN).cpu())

"""The acceptance of draft tokens, and the token that follows them.

Without the draft's own logits each row has chosen its token as in a run without drafts, with the same random
number; drafts are accepted while they are that token, so the output is that of such a run. With them it is
rejection sampling: the output's distribution is the target's, whatever the draft's.
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
"""What a row has chosen that has every token banned."""


def drafts_of(chunk: ContextChunk) -> tuple[int, ...]:
    """The draft tokens that a chunk ends with."""
    return chunk.token_ids[len(chunk.token_ids) - chunk.num_draft_tokens :]


def weighed_draft(request: Request, chunk: ContextChunk, first_position: int) -> ExternalDraft | None:
    """The request's own draft, if the chunk verifies it and it came with logits."""
    draft, tokens = request.draft, drafts_of(chunk)
    if draft is None or draft.logits is None or chunk.is_generation:
        return None
    is_own = first_position == request.prompt_length and tokens == draft.token_ids[: len(tokens)]
    return draft if is_own and tokens else None


def accept_equal(drafts: Sequence[int], chosen: Sequence[int]) -> list[int]:
    """New tokens: the drafts that are the chosen tokens, and the first chosen one that is not, or the last.

    The last of them may be NO_TOKEN.

    Args:
        drafts: [d].
        chosen: [d + 1].
    """
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == chosen[accepted]:
        accepted += 1
    return list(chosen[: accepted + 1])


def accept_by_chance(drafts: Sequence[int], rows: Rows, draft: ExternalDraft, bonus: int) -> list[int]:
    """New tokens by rejection sampling.

    Args:
        drafts: [d].
        rows: The d rows whose tokens the drafts are a guess at, processed.
        draft: Its logits, and maybe a threshold to accept by instead of by chance.
        bonus: The token chosen from the row after the last draft.
    """
    assert draft.logits is not None, "a draft that is accepted by chance has logits"
    proposed = host_tensor(draft.logits)[: len(drafts)].to(rows.logits.device)
    accepted, others = weigh(rows, np.array(drafts, dtype=np.int64), proposed, draft.acceptance_threshold)
    count = len(drafts) if accepted.all() else int(accepted.argmin())
    return [*drafts[:count], bonus if count == len(drafts) else int(others[count])]


def weigh(
    rows: Rows, drafts: NDArray[np.int64], draft_logits: Tensor, threshold: float | None
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Whether each row's draft token is accepted, and the token in its place if it is not, maybe NO_TOKEN.

    Args:
        rows: [n] processed.
        drafts: [n] token ids.
        draft_logits: [n, vocab_size]; softmax of a row is what the draft token was drawn from.
        threshold: Accept where target / draft reaches it; None: by chance.
    """
    target, proposed = distribution(rows), draft_logits.double().softmax(dim=-1)
    tokens = rows.upload(drafts[:, None])
    shares = torch.cat([target.gather(-1, tokens), proposed.gather(-1, tokens)], dim=-1)
    of_target, of_draft = as_array(shares.cpu()).T
    if threshold is None:
        accepted = of_target > of_draft * random_numbers(rows, Purpose.ACCEPT)
    else:
        accepted = of_target >= of_draft * threshold
    accepted &= of_target > 0.0  # no threshold lets a banned token pass
    others = np.zeros_like(drafts)
    refused = np.flatnonzero(~accepted)
    if len(refused):
        others[refused] = _resample(target, proposed, rows, refused)
    return accepted, others


def _resample(target: Tensor, proposed: Tensor, rows: Rows, refused: NDArray[np.int64]) -> NDArray[np.int64]:
    """Tokens of what the draft gave too little: norm(max(target - proposed, 0))."""
    target = select_rows(target, refused)
    rest = (target - select_rows(proposed, refused)).clamp_(min=0.0)
    # Where the two are equal, only a threshold above 1 refuses a token.
    rest = torch.where(rest.sum(dim=-1, keepdim=True) > 0.0, rest, target)
    numbers = random_numbers(rows, Purpose.RESAMPLE)[refused, None]
    tokens = inverse_cdf(rest, rows.upload(numbers)).squeeze(-1)
    return as_array(tokens.masked_fill_(rest.sum(dim=-1) == 0.0, NO_TOKEN).cpu())

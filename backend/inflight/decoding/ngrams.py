"""Which tokens would complete an n-gram that a sequence has had before."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inflight.decoding.history import History

_STEP = 32


def repeated(
    history: History, slots: NDArray[np.int64], lengths: NDArray[np.int64], sizes: NDArray[np.int64]
) -> tuple[Tensor, Tensor]:
    """Tokens that would repeat an n-gram; all arrays are [rows].

    Args:
        history: Where the sequences are.
        slots: Whose sequence a row looks at.
        lengths: How much of it: the tokens before this position.
        sizes: n, at least 1 and at most the length.

    Returns:
        Row and token id of each find, [n] int64 both; a token may be found more than once.
    """
    seen = history.before(slots, lengths)
    device = seen.token_ids.device
    slot, length, size = torch.from_numpy(np.stack([slots, lengths, sizes])).to(device)
    # A find is a token whose n - 1 predecessors are the sequence's last n - 1 tokens. Few tokens come after the
    # last one, so the tokens before those are compared for what is left only.
    candidates = seen.columns >= (size - 1)[seen.rows]
    before = torch.roll(seen.token_ids, 1)
    candidates &= (size == 1)[seen.rows] | (before == history.at(slot, length - 1)[seen.rows])
    found = candidates.nonzero().squeeze(-1)
    rows, columns = seen.rows[found], seen.columns[found]
    for start in range(2, int(sizes.max()), _STEP):
        back = torch.arange(start, min(start + _STEP, int(sizes.max())), device=device)
        beyond = back >= size[rows][:, None]
        there = (columns[:, None] - back).clamp_(min=0)
        here = (length[rows][:, None] - back).clamp_(min=0)
        of = slot[rows][:, None]
        same = (beyond | (history.at(of, there) == history.at(of, here))).all(dim=-1)
        rows, columns = rows[same], columns[same]
    return rows, history.at(slot[rows], columns)

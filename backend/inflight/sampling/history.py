"""The tokens before each row: what penalties, bad words and n-grams look back at. Kept on the device, by slot.

A prompt may have ids beyond the vocabulary, for rows of a prompt table. They are kept as they are, for logits
post-processors; everything else takes them for no tokens: nothing is equal to one, and none has a logit.

A row looks at the tokens before its position and at nothing else, so draft tokens can be written ahead of their
verification: those that are not accepted are overwritten before a later row can see them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inflight.sampling.transfer import upload

_LENGTHS_AT_A_TIME = 32


@dataclass(frozen=True, slots=True)
class Seen:
    """The tokens before each of some rows, one row after another.

    Attributes:
        token_ids: [n] int64.
        rows: [n] int64: which of the rows asked for.
        columns: [n] int64: the token's position in its sequence.
    """

    token_ids: Tensor
    rows: Tensor
    columns: Tensor

    def below(self, vocab_size: int) -> Seen:
        """The tokens that are in the vocabulary; on a GPU the host waits for their number."""
        kept = (self.token_ids < vocab_size).nonzero().squeeze(-1)
        return Seen(self.token_ids[kept], self.rows[kept], self.columns[kept])


class History:
    """Token ids by slot and position. Called by the loop thread.

    Attributes:
        table: [slots, max_sequence_length] int32 on the device; what was never written may be anything.
    """

    def __init__(self, num_slots: int, max_sequence_length: int, device: torch.device) -> None:
        # Never read before it is written, so it may hold anything, and on a CPU takes no memory until used.
        self.table = torch.empty(num_slots, max_sequence_length, dtype=torch.int32, device=device)
        self._lengths = np.zeros(num_slots, dtype=np.int64)

    def start(self, slot: int, token_ids: Sequence[int]) -> None:
        """Write down all tokens that are known of a sequence that gets a slot."""
        self.table[slot, : len(token_ids)] = self._upload(token_ids).int()
        self._lengths[slot] = len(token_ids)

    def move(self, slots: Sequence[int], parents: Sequence[int], token_ids: Sequence[int]) -> None:
        """Give each slot its parent's tokens, all at once, and append one to each."""
        lengths = self._lengths[list(parents)]
        longest = int(lengths.max())
        target, source = self._upload([slots, parents])
        self.table[target, :longest] = self.table[source, :longest]
        self.write(np.array(slots), lengths, np.array(token_ids))

    def write(
        self, slots: NDArray[np.int64], positions: NDArray[np.int64], token_ids: NDArray[np.int64]
    ) -> None:
        """Put tokens in their places, [n] each, each position the last of its slot or one of several in order."""
        within = positions < self.table.shape[1]  # what is beyond the longest sequence nobody looks back at
        slot, position, token = self._upload(np.stack([slots, positions, token_ids])[:, within])
        self.table[slot, position] = token.int()
        self._lengths[slots] = positions + 1

    def length(self, slot: int) -> int:
        """How many tokens of a slot there are, as far as they were written; drafts count until they are."""
        return int(self._lengths[slot])

    def before(self, slots: NDArray[np.int64], positions: NDArray[np.int64]) -> Seen:
        """The tokens before `positions` [rows] of `slots` [rows]."""
        slot, length = self._upload(np.stack([slots, positions]))
        total = int(positions.sum())
        rows = torch.repeat_interleave(
            torch.arange(len(slots), device=slot.device), length, output_size=total
        )
        starts = length.cumsum(0) - length
        columns = torch.arange(total, device=slot.device) - starts[rows]
        return Seen(self.at(slot[rows], columns), rows, columns)

    def at(self, slots: Tensor, columns: Tensor) -> Tensor:
        """Token ids [n] int64 at the positions `columns` [n] of `slots` [n]."""
        return self.table.view(-1).take(slots * self.table.shape[1] + columns).long()

    def _upload(self, values: Sequence[Any] | NDArray[np.int64]) -> Tensor:
        return upload(np.asarray(values, dtype=np.int64), self.table.device)


def repeated(
    history: History,
    slots: NDArray[np.int64],
    lengths: NDArray[np.int64],
    sizes: NDArray[np.int64],
    vocab_size: int,
) -> tuple[Tensor, Tensor]:
    """The tokens that would complete an n-gram which a sequence has had before; all arrays are [rows].

    Args:
        history: Where the sequences are.
        slots: Whose sequence a row looks at.
        lengths: How much of it: the tokens before this position.
        sizes: n, at least 1 and at most the length.
        vocab_size: Ids from there on are no tokens, and no part of an n-gram.

    Returns:
        Row and token id of each find, [n] int64 both; a token may be found more than once.
    """
    seen = history.before(slots, lengths)
    device = seen.token_ids.device
    slot, length, size = upload(np.stack([slots, lengths, sizes]), device)
    # A find is a token whose n - 1 predecessors are the sequence's last n - 1 tokens. Few tokens come after the
    # last one, so the tokens before those are compared for what is left only.
    candidates = (seen.columns >= (size - 1)[seen.rows]) & (seen.token_ids < vocab_size)
    before = torch.roll(seen.token_ids, 1)
    is_last = (before == history.at(slot, length - 1)[seen.rows]) & (before < vocab_size)
    candidates &= (size == 1)[seen.rows] | is_last
    found = candidates.nonzero().squeeze(-1)
    rows, columns = seen.rows[found], seen.columns[found]
    for start in range(2, int(sizes.max()), _LENGTHS_AT_A_TIME):
        back = torch.arange(start, min(start + _LENGTHS_AT_A_TIME, int(sizes.max())), device=device)
        beyond = back >= size[rows][:, None]
        there = (columns[:, None] - back).clamp_(min=0)
        here = (length[rows][:, None] - back).clamp_(min=0)
        owner = slot[rows][:, None]
        token_ids = history.at(owner, here)
        same = (beyond | ((history.at(owner, there) == token_ids) & (token_ids < vocab_size))).all(dim=-1)
        rows, columns = rows[same], columns[same]
    return rows, history.at(slot[rows], columns)

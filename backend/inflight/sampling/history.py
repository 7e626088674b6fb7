"""The tokens before each row, for penalties, bad words and n-grams. Stored on the device, by slot.

A prompt may have ids beyond the vocabulary, for rows of a prompt table. They are stored for logits
post-processors; all other code ignores them.

A row uses only tokens before its position, so draft tokens can be written before their verification: rejected
drafts are overwritten before a later row can see them.
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
    """The tokens before each of some rows, row after row.

    Attributes:
        token_ids: [n] int64.
        rows: [n] int64: for each token, the index of the row to whose history it belongs.
        columns: [n] int64: the token's position in its sequence.
    """

    token_ids: Tensor
    rows: Tensor
    columns: Tensor

    def below(self, vocab_size: int) -> Seen:
        """Return the tokens within the vocabulary; on a GPU the host waits for their number."""
        in_vocabulary = (self.token_ids < vocab_size).nonzero().squeeze(-1)
        return Seen(self.token_ids[in_vocabulary], self.rows[in_vocabulary], self.columns[in_vocabulary])


class History:
    """Token ids by slot and position. Used on the loop thread.

    Attributes:
        table: [slots, max_sequence_length] int32 on the device; entries never written are undefined.
    """

    def __init__(self, num_slots: int, max_sequence_length: int, device: torch.device) -> None:
        # Uninitialized, as entries are never read before they are written; on a CPU, pages that are never written
        # take no memory.
        self.table = torch.empty(num_slots, max_sequence_length, dtype=torch.int32, device=device)
        self._lengths = np.zeros(num_slots, dtype=np.int64)

    def start(self, slot: int, token_ids: Sequence[int]) -> None:
        """Write all known tokens of a sequence that gets a slot."""
        self.table[slot, : len(token_ids)] = self._upload(token_ids).int()
        self._lengths[slot] = len(token_ids)

    def move(self, slots: Sequence[int], parents: Sequence[int], token_ids: Sequence[int]) -> None:
        """Give each slot its parent's tokens, all at once, and append a token to each."""
        lengths = self._lengths[list(parents)]
        longest = int(lengths.max())
        target, source = self._upload([slots, parents])
        self.table[target, :longest] = self.table[source, :longest]
        self.write(np.array(slots), lengths, np.array(token_ids))

    def write(
        self, slots: NDArray[np.int64], positions: NDArray[np.int64], token_ids: NDArray[np.int64]
    ) -> None:
        """Write tokens at positions, each [n].

        Positions of a slot are consecutive, and the last one becomes the slot's last position.
        """
        within = positions < self.table.shape[1]  # positions beyond the longest sequence are never read
        slot, position, token = self._upload(np.stack([slots, positions, token_ids])[:, within])
        self.table[slot, position] = token.int()
        self._lengths[slots] = positions + 1

    def length(self, slot: int) -> int:
        """Return the number of tokens written for a slot; drafts count until they are overwritten."""
        return int(self._lengths[slot])

    def before(self, slots: NDArray[np.int64], positions: NDArray[np.int64]) -> Seen:
        """Return for each row the tokens of its slot before its position; `slots` and `positions` are [rows]."""
        slot, length = self._upload(np.stack([slots, positions]))
        total = int(positions.sum())
        rows = torch.repeat_interleave(
            torch.arange(len(slots), device=slot.device), length, output_size=total
        )
        starts = length.cumsum(0) - length
        columns = torch.arange(total, device=slot.device) - starts[rows]
        return Seen(self.at(slot[rows], columns), rows, columns)

    def at(self, slots: Tensor, columns: Tensor) -> Tensor:
        """Return the token ids [n] int64 at the positions `columns` [n] in the sequences of `slots` [n]."""
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
    """Return the tokens that would repeat an n-gram of the sequence; array arguments are [rows].

    Args:
        history: The sequences' tokens.
        slots: The slot of each row's sequence.
        lengths: The number of tokens of the sequence that are searched.
        sizes: n, at least 1 and at most the length.
        vocab_size: Ids >= vocab_size are not tokens, and not part of an n-gram.

    Returns:
        Row and token id of each match, both [n] int64; a token may occur more than once.
    """
    seen = history.before(slots, lengths)
    device = seen.token_ids.device
    slot, length, size = upload(np.stack([slots, lengths, sizes]), device)
    # A match is a token whose n - 1 predecessors are equal to the sequence's last n - 1 tokens. Candidates are
    # first filtered by their direct predecessor; the others are compared only for the few that remain.
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

"""Guides in the pipeline: the state of each slot's sequence in its guide, and the masks of allowed tokens.

A step of `pipeline.py` fills the masks of all rows with guides at once, and bans the other tokens. A request's end
ids are allowed exactly where its guide may end. Where a guide allows only the end and the request has no end id,
the row gets GUIDE_END. A matcher, which tracks the state, advances by the sampled tokens, in a beam search by the
moves of beams. Runs on the host, on the loop thread; with a GPU, while the GPU computes the forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inflight.core.request.guide import Guide
from inflight.core.request.request import Request
from inflight.core.schedule.batch import ScheduledBatch, SlotStart
from inflight.errors import InflightError, Name, StepFailed
from inflight.guided.budget import BudgetedMatcher
from inflight.guided.grammars import Grammars, MaskRows
from inflight.sampling.drafts import drafts_of
from inflight.sampling.row_kernels import RowKernels
from inflight.sampling.rows import Failures, Rows


@dataclass(frozen=True, slots=True)
class Masked:
    """The rows of a batch to which masks were applied.

    Attributes:
        indices: [n] indices of the rows.
        likeliest: [n] int64 on the logits' device: the allowed token with the highest logit; undefined if
            there is none.
        ends: [n] whether a row allows only the end, without an end id.
    """

    indices: NDArray[np.int64]
    likeliest: Tensor
    ends: NDArray[np.bool_]


@dataclass(slots=True)
class _Guided:
    """A slot whose sequence has a guide.

    Attributes:
        matcher: The matcher, in the state after the last token that is not a draft; None if the guide cannot be
            followed (then `error` is set), or if the guide allows no token.
        end_ids: The request's end ids, which the matcher does not know.
        drafts: The draft tokens that the batch verifies.
        error: The reason why the guide cannot be followed; None if it can.
    """

    matcher: BudgetedMatcher | None
    end_ids: tuple[int, ...]
    drafts: tuple[int, ...] = ()
    error: InflightError | None = None

    def consume(self, token_ids: Sequence[int]) -> None:
        """Advance by new tokens, up to the first that ends the sequence."""
        last = next((place for place, token in enumerate(token_ids) if token in self.end_ids), len(token_ids))
        try:
            if self.matcher is not None:
                self.matcher.consume(token_ids[:last])
        except InflightError as error:
            self.matcher, self.error = None, error

    def fork(self) -> _Guided:
        return _Guided(self.matcher and self.matcher.fork(), self.end_ids, error=self.error)


class Guides:
    """The guides of all slots.

    Args:
        grammars: Makes matchers; None: rows with guides fail.
        vocab_size: Number of logits in a row.
    """

    def __init__(self, grammars: Grammars | None, vocab_size: int) -> None:
        self._grammars = grammars
        self._vocab_size = vocab_size
        self._slots: dict[int, _Guided] = {}
        self._masked: Masked | None = None
        self._masks = np.zeros((0, vocab_size // 32 + 1), dtype=np.int32)

    def apply(self, batch: ScheduledBatch) -> None:
        """Apply a batch's releases, starts and moves."""
        for slot in batch.released_slots:
            self._slots.pop(slot, None)
        for start in batch.starts:
            self._slots.pop(start.slot, None)
            if start.request.guide is not None:
                self._slots[start.slot] = self._start(start, start.request.guide)
        if self._slots:
            self._move(batch)

    def apply_drafts(self, batch: ScheduledBatch) -> None:
        """Apply the drafts of a batch's chunks."""
        for chunk in batch.context if self._slots else ():
            if chunk.is_last and (guided := self._slots.get(chunk.slot)) is not None:
                guided.drafts = drafts_of(chunk)

    def mask(self, rows: Rows, indices: NDArray[np.int64], kernels: RowKernels) -> Failures:
        """Ban tokens that the guides of the rows `indices` do not allow; return the rows whose guides fail."""
        slots = rows.slots[indices]
        firsts = np.flatnonzero(np.diff(slots, prepend=-1)).tolist()
        guided = [self._slots[slot] for slot in slots[firsts].tolist()]
        masks = self._all_allowed(len(indices))
        failed = self._fill(guided, firsts, masks)
        ends = self._allow_ends(guided, firsts, masks)
        self._masked = Masked(indices, kernels.apply_masks(rows, indices, masks), ends)
        for each in guided:
            each.drafts = ()
        return {int(indices[firsts[place]]): error for place, error in failed.items()}

    def take_masked(self) -> Masked | None:
        """Return, once, the rows that `mask` changed in this batch; None if no row has a guide."""
        masked, self._masked = self._masked, None
        return masked

    def accept(self, slots: NDArray[np.int64], chosen: NDArray[np.int64]) -> None:
        """Advance the guides of `slots` [n] by the sampled tokens `chosen` [n].

        A slot that occurs several times has its tokens in the order of its sequence.
        """
        tokens: dict[int, list[int]] = {}
        for slot, token in zip(slots.tolist(), chosen.tolist()):
            tokens.setdefault(slot, []).append(token)
        for slot, new in tokens.items():
            self._slots[slot].consume(new)

    def _start(self, start: SlotStart, guide: Guide) -> _Guided:
        """Return the guide of a starting sequence, in its state after the tokens generated before a pause."""
        request = start.request
        if self._grammars is None:
            error = StepFailed(
                Name("guided_decoding_guide"), ": the rank that chooses tokens follows no guides"
            )
            return _Guided(None, request.end_ids, error=error)
        try:
            guided = _Guided(self._grammars.matcher(guide), request.end_ids)
        except InflightError as error:
            return _Guided(None, request.end_ids, error=error)
        guided.consume(start.token_ids[request.prompt_length :])
        return guided

    def _move(self, batch: ScheduledBatch) -> None:
        """Give each beam a copy of its parent's state, all at once, and advance it by the beam's new token."""
        moves = [move for move in batch.moves if move.parent_slot in self._slots]
        moved = [(move, self._slots[move.parent_slot].fork()) for move in moves]
        for move, guided in moved:
            guided.consume((move.token_id,))
            guided.error = None  # beams that only fill a row continue with banned tokens
            self._slots[move.slot] = guided

    def _all_allowed(self, num_rows: int) -> NDArray[np.int32]:
        """Return masks [num_rows, words] that allow all tokens, in reused memory to avoid page faults."""
        if num_rows > len(self._masks):
            self._masks = np.zeros((num_rows, self._masks.shape[1]), dtype=np.int32)
        masks = self._masks[:num_rows]
        masks.fill(-1)
        return masks

    def _fill(
        self, guided: Sequence[_Guided], firsts: Sequence[int], masks: NDArray[np.int32]
    ) -> dict[int, InflightError]:
        """Fill the masks of each slot's rows; return the errors by the slot's index in `guided`."""
        failed = {place: each.error for place, each in enumerate(guided) if each.error is not None}
        mask_rows_by_slot = {
            place: MaskRows(each.matcher, first, each.drafts[: last - first - 1])
            for place, (each, first, last) in enumerate(zip(guided, firsts, [*firsts[1:], len(masks)]))
            if each.matcher is not None
        }
        for each, first, last in zip(guided, firsts, [*firsts[1:], len(masks)]):
            if each.matcher is None:
                masks[first:last] = 0
        if mask_rows_by_slot and self._grammars is not None:
            places = list(mask_rows_by_slot)
            errors = self._grammars.fill(list(mask_rows_by_slot.values()), masks)
            failed |= {places[index]: error for index, error in errors.items()}
        return failed

    def _allow_ends(
        self, guided: Sequence[_Guided], firsts: Sequence[int], masks: NDArray[np.int32]
    ) -> NDArray[np.bool_]:
        """Add the requests' end ids to the masks; return [rows] whether a row allows only the end and has no
        end id."""
        bits = masks.view(np.uint32)
        word, bit = divmod(self._vocab_size, 32)
        may_end = (bits[:, word] >> np.uint32(bit)) & np.uint32(1) != 0
        bits[:, word] &= np.uint32((1 << bit) - 1)
        ends = may_end.copy()
        ends[may_end] = ~bits[may_end].any(axis=1)
        lasts = [*firsts[1:], len(masks)]
        for each, first, last in zip(guided, firsts, lasts):
            for end_id in each.end_ids:
                word, bit = divmod(end_id, 32)
                flag = np.uint32(1 << bit)
                part = bits[first:last, word]
                part[:] = np.where(may_end[first:last], part | flag, part & ~flag)
            if each.end_ids:
                ends[first:last] = False
        return ends


def guide_of(request: Request, _: torch.device) -> Any:
    """Return the slot's state for this step: the request's guide, or None."""
    return request.guide

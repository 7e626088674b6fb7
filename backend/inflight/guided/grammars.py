"""The guides on the rank that samples: for each guide a matcher at its beginning, to be forked per sequence.

All masks are filled here, each within its sequence's budget, whichever library follows the guides.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from inflight.core.request.guide import Guide
from inflight.errors import InvalidArgument
from inflight.guided.backend import GuideBackend, MaskJob, Matcher, over_budget
from inflight.guided.budget import Budget, BudgetedMatcher
from inflight.guided.vocabulary import GuideVocabulary
from inflight.processors import Processors

_MOST_KEPT = 256
_FEW_MASKS = 8
"""Filling this many masks takes no longer than waking other threads for it, tens of microseconds each."""


@dataclass(frozen=True, slots=True)
class MaskRows:
    """The masks of one sequence in one step: of the next token and after each draft token.

    Attributes:
        matcher: The sequence's matcher, whose state is unchanged afterwards.
        row: Row of the first mask; the others follow below it.
        drafts: The draft tokens. Masks after a draft token that is not allowed are left unchanged, allowing
            everything.
    """

    matcher: BudgetedMatcher
    row: int
    drafts: tuple[int, ...] = ()


class Grammars:
    """A cache of matchers by guide. Pinned guides are kept, and the most recently used of the others.

    Attributes:
        vocabulary: The vocabulary of the masks.
    """

    def __init__(
        self, backend: GuideBackend, vocabulary: GuideVocabulary, max_guides: int = _MOST_KEPT
    ) -> None:
        self.vocabulary = vocabulary
        self._backend = backend
        self._max_guides = max_guides
        self._stored: OrderedDict[Guide, Matcher] = OrderedDict()
        self._pins: Counter[Guide] = Counter()
        self._lock = threading.Lock()
        self._budget = Budget.of_vocabulary(vocabulary)
        self._num_threads = Processors.here().num_threads
        self._is_to_measure = False

    def add(self, guide: Guide, compiled: bytes) -> None:
        """Store a guide compiled by another process; any thread. Raises InvalidArgument as `GuideBackend.load`."""
        matcher = self._backend.load(guide, compiled)
        with self._lock:
            self._stored[guide] = matcher
            self._stored.move_to_end(guide)
            self._drop_oldest()

    def pin(self, guide: Guide) -> None:
        """Keep a guide, from now or from when it is added, until every pin is removed. Any thread."""
        with self._lock:
            self._pins[guide] += 1

    def unpin(self, guide: Guide) -> None:
        """Remove a pin. Any thread."""
        with self._lock:
            self._pins[guide] -= 1
            if not self._pins[guide]:
                del self._pins[guide]
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        """Drop the least recently used guides, except pinned ones, down to the limit."""
        excess = len(self._stored) - self._max_guides
        if excess > 0:
            unpinned = (guide for guide in self._stored if guide not in self._pins)
            for guide in list(islice(unpinned, excess)):
                del self._stored[guide]

    def __contains__(self, guide: Guide) -> bool:
        """Whether a guide is stored and can be followed at once; counts as a use. Any thread."""
        with self._lock:
            if guide in self._stored:
                self._stored.move_to_end(guide)
            return guide in self._stored

    def matcher(self, guide: Guide) -> BudgetedMatcher:
        """Return a new matcher at the beginning of a guide.

        A guide that is not stored, because another rank compiled it, is compiled here; it is known to compile in
        bounded time. Raises InvalidArgument as `add`.
        """
        with self._lock:
            stored = self._stored.get(guide)
        if stored is None:
            compiled = self._backend.compile(guide)
            self.add(guide, compiled)
            return BudgetedMatcher(self._backend.load(guide, compiled), self._budget)
        return BudgetedMatcher(stored.fork(), self._budget)

    def fill(self, mask_rows: Sequence[MaskRows], masks: NDArray[np.int32]) -> Mapping[int, InvalidArgument]:
        """Fill the masks of several sequences; `masks` is as in `GuideBackend.fill`.

        When many masks are filled together, the time of each one is unknown. If together they take long, the next
        ones are filled and measured one by one; few masks, and those of sequences with draft tokens, always are.

        Returns:
            By index, the error of a guide that cannot be followed any further or has exceeded its budget.
        """
        errors: dict[int, InvalidArgument] = {}
        together = [index for index, each in enumerate(mask_rows) if not each.drafts]
        measured: Iterable[int] = range(len(mask_rows))
        if len(together) > _FEW_MASKS and not self._is_to_measure:
            began_s = monotonic()
            jobs = [MaskJob(mask_rows[index].matcher.matcher, mask_rows[index].row) for index in together]
            failed = self._backend.fill(jobs, masks)
            expected_s = self._budget.token_s * (1 + len(together) / self._num_threads / _FEW_MASKS)
            self._is_to_measure = monotonic() - began_s > expected_s
            errors |= {together[index]: error for index, error in failed.items()}
            measured = (index for index, each in enumerate(mask_rows) if each.drafts)
        else:
            self._is_to_measure = False
        for index in measured:
            rows = mask_rows[index]
            if error := rows.matcher.fill(self._backend, rows.row, rows.drafts, masks):
                errors[index] = error
        for index, each in enumerate(mask_rows):
            if each.matcher.is_over:
                errors.setdefault(index, over_budget())
        return errors

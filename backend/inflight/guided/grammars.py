"""The guides on the rank that samples: each has a matcher at its beginning, which is forked for every sequence.

All masks are filled here, within the sequences' budgets.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
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

_MAX_KEPT = 256
_FEW_MASKS = 8
"""Number of masks, of some tens of microseconds each, for which it is not worth waking other threads."""


@dataclass(frozen=True, slots=True)
class MaskRows:
    """The masks of one sequence in one step: one for the next token, and one after each draft token.

    Attributes:
        matcher: The sequence's matcher. Filling the masks does not change its state.
        row: Row of the first mask; the other masks are in the following rows.
        drafts: The draft tokens. Masks after a draft token that is not allowed are not written; they allow
            every token.
    """

    matcher: BudgetedMatcher
    row: int
    drafts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GrammarLibrary:
    """A grammar library that was set up with a vocabulary."""

    backend: GuideBackend
    vocabulary: GuideVocabulary

    @property
    def budget(self) -> Budget:
        """The budget of each sequence."""
        return Budget.of_vocabulary(self.vocabulary)


class Grammars:
    """A cache of matchers by guide. It keeps pinned guides, and the most recently used guides of all others.

    Args:
        set_up: Function that sets up the grammar library, which takes a second with a large vocabulary. It is
            called once, by the first use of a guide or by `library`. It raises Unsupported if guides cannot be
            followed.
        max_guides: Maximum number of guides that are kept, except for pinned ones.
    """

    def __init__(self, set_up: Callable[[], GrammarLibrary], max_guides: int = _MAX_KEPT) -> None:
        self._set_up = set_up
        self._library: Future[GrammarLibrary] = Future()
        self._library_lock = threading.Lock()
        self._max_guides = max_guides
        self._stored: OrderedDict[Guide, Matcher] = OrderedDict()
        self._pins: Counter[Guide] = Counter()
        self._lock = threading.Lock()
        self._num_threads = Processors.here().num_threads
        self._is_to_measure = False

    def library(self) -> GrammarLibrary:
        """Return the grammar library; the first call sets it up, and other threads wait for it. Any thread.

        Raises what `set_up` raised.
        """
        with self._library_lock:
            if not self._library.done():
                try:
                    self._library.set_result(self._set_up())
                except Exception as error:
                    self._library.set_exception(error)
        return self._library.result()

    def add(self, guide: Guide, compiled: bytes) -> None:
        """Store a guide that another process compiled.

        Any thread. Raises InvalidArgument like `GuideBackend.load`.
        """
        matcher = self.library().backend.load(guide, compiled)
        with self._lock:
            self._stored[guide] = matcher
            self._stored.move_to_end(guide)
            self._drop_oldest()

    def pin(self, guide: Guide) -> None:
        """Keep a guide until every pin is removed. The guide may be added later. Any thread."""
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
        """Drop the least recently used guides that are not pinned, until the limit is met."""
        excess = len(self._stored) - self._max_guides
        if excess > 0:
            unpinned = (guide for guide in self._stored if guide not in self._pins)
            for guide in list(islice(unpinned, excess)):
                del self._stored[guide]

    def __contains__(self, guide: Guide) -> bool:
        """Return whether a guide is stored; if so, mark it as used. Any thread."""
        with self._lock:
            if guide in self._stored:
                self._stored.move_to_end(guide)
            return guide in self._stored

    def matcher(self, guide: Guide) -> BudgetedMatcher:
        """Return a new matcher at the beginning of a guide.

        If the guide is not stored, because another rank compiled it, it is compiled here; the other rank has
        proved that this is possible within the limits. Raises InvalidArgument like `add`, or Unsupported if guides
        cannot be followed.
        """
        with self._lock:
            stored = self._stored.get(guide)
        library = self.library()
        if stored is None:
            compiled = library.backend.compile(guide)
            self.add(guide, compiled)
            return BudgetedMatcher(library.backend.load(guide, compiled), library.budget)
        return BudgetedMatcher(stored.fork(), library.budget)

    def fill(self, mask_rows: Sequence[MaskRows], masks: NDArray[np.int32]) -> Mapping[int, InvalidArgument]:
        """Fill the masks of several sequences; `masks` is as in `GuideBackend.fill`.

        When many masks are filled together, the time of each is not known. If they take long together, the
        masks of the next calls are filled one by one and measured. A few masks, and masks of sequences with
        draft tokens, are always filled one by one.

        Returns:
            By index into `mask_rows`, the error of each guide that no longer works or has exceeded its
            budget.
        """
        library, errors = self.library(), dict[int, InvalidArgument]()
        together = [index for index, each in enumerate(mask_rows) if not each.drafts]
        measured: Iterable[int] = range(len(mask_rows))
        if len(together) > _FEW_MASKS and not self._is_to_measure:
            began_s = monotonic()
            jobs = [MaskJob(mask_rows[index].matcher.matcher, mask_rows[index].row) for index in together]
            failed = library.backend.fill(jobs, masks)
            expected_s = library.budget.token_s * (1 + len(together) / self._num_threads / _FEW_MASKS)
            self._is_to_measure = monotonic() - began_s > expected_s
            errors |= {together[index]: error for index, error in failed.items()}
            measured = (index for index, each in enumerate(mask_rows) if each.drafts)
        else:
            self._is_to_measure = False
        for index in measured:
            rows = mask_rows[index]
            if error := rows.matcher.fill(library.backend, rows.row, rows.drafts, masks):
                errors[index] = error
        for index, each in enumerate(mask_rows):
            if each.matcher.is_over:
                errors.setdefault(index, over_budget())
        return errors

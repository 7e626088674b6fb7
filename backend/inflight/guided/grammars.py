"""The guides on the rank that samples: for each guide a matcher at its beginning, to be forked.

All masks are filled here, each sequence's within its budget, whichever library follows the guides.
"""

from __future__ import annotations

import os
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

_MOST_KEPT = 256
_FEW_MASKS = 8
"""Filling so many takes no longer than to wake other threads for it, tens of microseconds each."""


@dataclass(frozen=True, slots=True)
class MaskRows:
    """The masks of one sequence in one step: of the next token, and of those behind each draft token.

    Attributes:
        matcher: As it was, afterwards.
        row: Of the first mask; the others go below it.
        drafts: The draft tokens; the masks behind one that may not come allow everything, as they did before.
    """

    matcher: BudgetedMatcher
    row: int
    drafts: tuple[int, ...] = ()


class Grammars:
    """Matchers of guides, by a backend. Pinned guides are kept, and the latest used of the others.

    Attributes:
        vocabulary: Of the masks.
    """

    def __init__(
        self, backend: GuideBackend, vocabulary: GuideVocabulary, most_kept: int = _MOST_KEPT
    ) -> None:
        self.vocabulary = vocabulary
        self._backend = backend
        self._most_kept = most_kept
        self._kept: OrderedDict[Guide, Matcher] = OrderedDict()
        self._pins: Counter[Guide] = Counter()
        self._lock = threading.Lock()
        self._budget = Budget.of_vocabulary(vocabulary)
        self._num_threads = len(os.sched_getaffinity(0))
        self._is_to_measure = False

    def add(self, guide: Guide, compiled: bytes) -> None:
        """Keep what another process has compiled; any thread. Raises InvalidArgument as `GuideBackend.load`."""
        matcher = self._backend.load(guide, compiled)
        with self._lock:
            self._kept[guide] = matcher
            self._kept.move_to_end(guide)
            self._drop_oldest()

    def pin(self, guide: Guide) -> None:
        """Keep a guide, now or when it is added, until each of its pins is taken out. Any thread."""
        with self._lock:
            self._pins[guide] += 1

    def unpin(self, guide: Guide) -> None:
        """Take out a pin. Any thread."""
        with self._lock:
            self._pins[guide] -= 1
            if not self._pins[guide]:
                del self._pins[guide]
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        """Forget the guides used longest ago, except pinned ones, down to what is kept."""
        excess = len(self._kept) - self._most_kept
        if excess > 0:
            loose = (guide for guide in self._kept if guide not in self._pins)
            for guide in list(islice(loose, excess)):
                del self._kept[guide]

    def __contains__(self, guide: Guide) -> bool:
        """Whether a guide is kept, and so can be followed at once; then it counts as used. Any thread."""
        with self._lock:
            if guide in self._kept:
                self._kept.move_to_end(guide)
            return guide in self._kept

    def matcher(self, guide: Guide) -> BudgetedMatcher:
        """A new matcher at the beginning of a guide.

        One that is not kept, because another rank had it compiled, is compiled here: it has been proved to be
        possible in bounded time. Raises InvalidArgument as `add`.
        """
        with self._lock:
            kept = self._kept.get(guide)
        if kept is None:
            compiled = self._backend.compile(guide)
            self.add(guide, compiled)
            return BudgetedMatcher(self._backend.load(guide, compiled), self._budget)
        return BudgetedMatcher(kept.fork(), self._budget)

    def fill(self, asked: Sequence[MaskRows], masks: NDArray[np.int32]) -> Mapping[int, InvalidArgument]:
        """Fill the masks of several sequences; `masks` is as of `GuideBackend.fill`.

        What each of many masks takes that are filled together cannot be told. If all of them take long, the next
        are filled and measured one by one, as few masks and those behind draft tokens always are.

        Returns:
            By index, why a sequence's guide cannot be followed on, or that its budget is used up.
        """
        errors: dict[int, InvalidArgument] = {}
        together = [index for index, each in enumerate(asked) if not each.drafts]
        measured: Iterable[int] = range(len(asked))
        if len(together) > _FEW_MASKS and not self._is_to_measure:
            began_s = monotonic()
            jobs = [MaskJob(asked[index].matcher.matcher, asked[index].row) for index in together]
            failed = self._backend.fill(jobs, masks)
            expected_s = self._budget.token_s * (1 + len(together) / self._num_threads / _FEW_MASKS)
            self._is_to_measure = monotonic() - began_s > expected_s
            errors |= {together[index]: error for index, error in failed.items()}
            measured = (index for index, each in enumerate(asked) if each.drafts)
        else:
            self._is_to_measure = False
        for index in measured:
            one = asked[index]
            if error := one.matcher.fill(self._backend, one.row, one.drafts, masks):
                errors[index] = error
        for index, each in enumerate(asked):
            if each.matcher.is_over:
                errors.setdefault(index, over_budget())
        return errors

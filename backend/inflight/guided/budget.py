"""How much work one sequence may ask for with its guide, whichever library follows it.

Every call of a matcher is measured in processor time of the thread that makes it, whatever else the machine does
meanwhile. A sequence that has used up its budget ends with an error, and others keep their pace. Libraries may
have bounds of their own for one call; they need none for many.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import thread_time

import numpy as np
from numpy.typing import NDArray

from inflight.core.request.guide import Guide
from inflight.errors import InvalidArgument
from inflight.guided.backend import DeadEnd, GuideBackend, MaskJob, Matcher, over_budget
from inflight.guided.vocabulary import GuideVocabulary

_AT_ONCE_S = 0.1
_A_TOKEN_S = 0.005
_A_TOKEN_AND_WORD_S = 1e-7
_TRIAL_TOKENS = 8
_ALL = -1
"""Every word of a mask that allows everything."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Processor time that a sequence may take for its guide.

    Attributes:
        token_s: Seconds that every token adds to what is left.
        at_once_s: Seconds that are left at first; never more than that are kept.
    """

    token_s: float
    at_once_s: float = _AT_ONCE_S

    @classmethod
    def of_vocabulary(cls, vocabulary: GuideVocabulary) -> Budget:
        """The budget with a vocabulary: masks of a large one take longer."""
        return cls(_A_TOKEN_S + len(vocabulary.tokens) * _A_TOKEN_AND_WORD_S)


class BudgetedMatcher:
    """A matcher of any library, and the budget of its sequence. Once that is used up every call fails.

    Args:
        matcher: The library's.
        budget: What the sequence may take.
        left_s: Seconds that are left of it.
    """

    def __init__(self, matcher: Matcher, budget: Budget, left_s: float | None = None) -> None:
        self.matcher = matcher
        self._budget = budget
        self._left_s = budget.at_once_s if left_s is None else left_s

    @property
    def is_over(self) -> bool:
        """Whether the budget is used up."""
        return self._left_s < 0

    def consume(self, token_ids: Sequence[int]) -> None:
        """Go on with tokens as `Matcher.consume`, which adds to the budget what they are worth."""
        began_s = thread_time()
        try:
            self.matcher.consume(token_ids)
        finally:
            self._left_s += len(token_ids) * self._budget.token_s - (thread_time() - began_s)
            self._left_s = min(self._left_s, self._budget.at_once_s)
        if self.is_over:
            raise over_budget()

    def fill(
        self, backend: GuideBackend, row: int, drafts: Sequence[int], masks: NDArray[np.int32]
    ) -> InvalidArgument | None:
        """Fill the mask of the next token and those behind draft tokens, as far as these may come.

        A draft token behind which the text comes to a dead end may not come: nobody has chosen it yet.

        Args:
            backend: The library.
            row: Of the first mask; the others go below it, and those behind a token that may not come allow
                everything.
            drafts: The draft tokens.
            masks: As of `GuideBackend.fill`; the rows below the first allow everything.

        Returns:
            Why the guide cannot be followed on, if it cannot. Masks are filled up to there.
        """
        error, place = self._fill_one(backend, row, masks), 0
        while error is None and place < len(drafts) and _has_bit(masks[row + place], drafts[place]):
            error = self._try_draft(backend, drafts[place], row + place + 1, masks)
            if error is None:
                place += 1
            elif isinstance(error, DeadEnd):
                _clear_bit(masks[row + place], drafts[place])
                while place and not masks[row + place].any():
                    masks[row + place] = _ALL
                    place -= 1
                    self.matcher.rollback(1)
                    _clear_bit(masks[row + place], drafts[place])
                if masks[row + place].any():
                    error = None
        if error is None and place:
            self.matcher.rollback(place)
        return error

    def _try_draft(
        self, backend: GuideBackend, token_id: int, row: int, masks: NDArray[np.int32]
    ) -> InvalidArgument | None:
        """Go on with a token that may be taken back, which adds nothing to the budget, and fill the mask behind.

        At a dead end it is taken back at once, and the mask allows everything.
        """
        began_s = thread_time()
        try:
            self.matcher.consume((token_id,))
        except InvalidArgument as failure:
            return failure
        finally:
            self._left_s -= thread_time() - began_s
        error = self._fill_one(backend, row, masks)
        if isinstance(error, DeadEnd):
            self.matcher.rollback(1)
            masks[row] = _ALL
        return error

    def _fill_one(self, backend: GuideBackend, row: int, masks: NDArray[np.int32]) -> InvalidArgument | None:
        began_s = thread_time()
        errors = backend.fill([MaskJob(self.matcher, row)], masks)
        self._left_s -= thread_time() - began_s
        return over_budget() if self.is_over else errors.get(0)

    def fork(self) -> BudgetedMatcher:
        """A matcher of its own that has come as far, with as much left, less what it took to make it."""
        began_s = thread_time()
        forked = self.matcher.fork()
        return BudgetedMatcher(forked, self._budget, self._left_s - (thread_time() - began_s))


def try_out(backend: GuideBackend, vocabulary: GuideVocabulary, guide: Guide, compiled: bytes) -> None:
    """Follow a compiled guide for a few tokens at random, where that disturbs nobody.

    Raises:
        InvalidArgument: That takes more than the budget: so it would in a request.
    """
    matcher = BudgetedMatcher(backend.load(guide, compiled), Budget.of_vocabulary(vocabulary))
    with suppress(DeadEnd):  # a request's text may come to none
        _follow(backend, vocabulary, matcher)


def _follow(backend: GuideBackend, vocabulary: GuideVocabulary, matcher: BudgetedMatcher) -> None:
    rng = random.Random(0)
    masks = np.zeros((1, vocabulary.num_words), dtype=np.int32)
    for _ in range(_TRIAL_TOKENS):
        if error := matcher.fill(backend, 0, (), masks):
            raise error
        bits = np.unpackbits(masks.view(np.uint8)[0], bitorder="little")[: len(vocabulary.tokens)]
        allowed = np.flatnonzero(bits)
        if not len(allowed):
            return
        matcher.consume((int(allowed[rng.randrange(len(allowed))]),))


def _has_bit(words: NDArray[np.int32], index: int) -> bool:
    return bool(int(words[index // 32]) >> (index % 32) & 1)


def _clear_bit(words: NDArray[np.int32], index: int) -> None:
    words.view(np.uint32)[index // 32] &= ~np.uint32(1 << index % 32)

"""A budget of processor time for one sequence's guide, for both grammar libraries.

Every call of a matcher is measured in processor time of its thread, which hardly depends on other load. A garbage
collection during a call is not counted. A sequence that exceeds its budget ends with an error, so that it cannot
slow down other sequences. A library may limit a single call; the budget limits all calls of a sequence together.
"""

from __future__ import annotations

import gc
import random
import threading
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
"""A word of a mask that allows every token."""


class _CollectionTime(threading.local):
    """Processor time of this thread in garbage collections, in seconds."""

    began = 0.0
    total = 0.0


_collections = _CollectionTime()


def _record_collection(phase: str, _: dict[str, int]) -> None:
    """Record the time of a collection, which runs on the thread that happens to start it."""
    if phase == "start":
        _collections.began = thread_time()
    else:
        _collections.total += thread_time() - _collections.began


gc.callbacks.append(_record_collection)


def work_time() -> float:
    """Return the processor time of this thread without garbage collections, in seconds."""
    return thread_time() - _collections.total


@dataclass(frozen=True, slots=True)
class Budget:
    """The processor time that a sequence may use for its guide.

    Attributes:
        token_s: Seconds that every token adds to the remaining budget.
        at_once_s: The initial budget in seconds, which is also its maximum.
    """

    token_s: float
    at_once_s: float = _AT_ONCE_S

    @classmethod
    def of_vocabulary(cls, vocabulary: GuideVocabulary) -> Budget:
        """Return the budget for a vocabulary. It is larger for a large vocabulary, whose masks take longer."""
        return cls(_A_TOKEN_S + len(vocabulary.tokens) * _A_TOKEN_AND_WORD_S)


class BudgetedMatcher:
    """A matcher with a budget. Once the budget is exceeded, every call fails.

    Args:
        matcher: The library's matcher.
        budget: The sequence's budget.
        left_s: Remaining seconds; None: the initial budget.
    """

    def __init__(self, matcher: Matcher, budget: Budget, left_s: float | None = None) -> None:
        self.matcher = matcher
        self._budget = budget
        self._left_s = budget.at_once_s if left_s is None else left_s

    @property
    def is_over(self) -> bool:
        """Whether the budget is exceeded."""
        return self._left_s < 0

    def consume(self, token_ids: Sequence[int]) -> None:
        """Advance by tokens like `Matcher.consume`, and add `token_s` to the budget for each."""
        began_s = work_time()
        try:
            self.matcher.consume(token_ids)
        finally:
            self._left_s += len(token_ids) * self._budget.token_s - (work_time() - began_s)
            self._left_s = min(self._left_s, self._budget.at_once_s)
        if self.is_over:
            raise over_budget()

    def fill(
        self, backend: GuideBackend, row: int, drafts: Sequence[int], masks: NDArray[np.int32]
    ) -> InvalidArgument | None:
        """Fill the masks of the next token and after each draft token, up to a draft token that is not allowed.

        A draft token after which the guide reaches a dead end is banned.

        Args:
            backend: The grammar library.
            row: Row of the first mask; the other masks are in the following rows. Masks after a banned draft
                token allow every token.
            drafts: The draft tokens.
            masks: As in `GuideBackend.fill`. The rows after the first must allow every token.

        Returns:
            The error if the guide no longer works, else None. After an error, the remaining masks are not
            filled.
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
        """Advance by a draft token, which adds nothing to the budget, and fill the mask after it.

        If the guide reaches a dead end, the token is undone at once, and the mask allows every token.
        """
        began_s = work_time()
        try:
            self.matcher.consume((token_id,))
        except InvalidArgument as failure:
            return failure
        finally:
            self._left_s -= work_time() - began_s
        error = self._fill_one(backend, row, masks)
        if isinstance(error, DeadEnd):
            self.matcher.rollback(1)
            masks[row] = _ALL
        return error

    def _fill_one(self, backend: GuideBackend, row: int, masks: NDArray[np.int32]) -> InvalidArgument | None:
        began_s = work_time()
        errors = backend.fill([MaskJob(self.matcher, row)], masks)
        self._left_s -= work_time() - began_s
        return over_budget() if self.is_over else errors.get(0)

    def fork(self) -> BudgetedMatcher:
        """Return an independent matcher in the same state. The time for copying counts against the budget."""
        began_s = work_time()
        forked = self.matcher.fork()
        return BudgetedMatcher(forked, self._budget, self._left_s - (work_time() - began_s))


def try_out(backend: GuideBackend, vocabulary: GuideVocabulary, guide: Guide, compiled: bytes) -> None:
    """Check a compiled guide's cost by generating some random tokens with it, in a process without requests.

    Raises:
        InvalidArgument: The guide exceeds the budget, as it would in a request.
    """
    matcher = BudgetedMatcher(backend.load(guide, compiled), Budget.of_vocabulary(vocabulary))
    with suppress(DeadEnd):  # a random text may reach a dead end
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

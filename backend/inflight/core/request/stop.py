"""The ends of generation: finish reasons, stop signals from outside, and stop words. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any


class FinishReason(IntEnum):
    """TensorRT-LLM's `FinishReason`, same names and numbers."""

    NOT_FINISHED = 0
    END_ID = 1
    STOP_WORDS = 2
    LENGTH = 3
    TIMED_OUT = 4
    CANCELLED = 5


class StopReason(Enum):
    """The reason why a front end asks for a request to end early."""

    CANCELLED = "cancelled"
    STOP_WORDS = "stop_words"
    TIMED_OUT = "timed_out"


CUT_SHORT: frozenset[FinishReason] = frozenset({FinishReason.TIMED_OUT, FinishReason.CANCELLED})
"""Finish reasons that come from outside: the last response carries what was generated until then."""


@dataclass(frozen=True, slots=True)
class StopSignal:
    """End request `request_id`, or one of its sequences, in the next iteration; unknown ids are ignored.

    `requested_ns` is when the front end asked for it, by the clock of `IterationInput.now_ns`; 0: unknown.
    """

    request_id: int
    reason: StopReason = StopReason.CANCELLED
    sequence_index: int | None = None
    requested_ns: int = 0


FINISH_REASON_OF_STOP: dict[StopReason, FinishReason] = {
    StopReason.CANCELLED: FinishReason.CANCELLED,
    StopReason.STOP_WORDS: FinishReason.STOP_WORDS,
    StopReason.TIMED_OUT: FinishReason.TIMED_OUT,
}


_WORD = -1
"""A key of the tree that is no token id; it marks the end of a word."""


class StopWords:
    """The stop words of one request: token sequences that end an output. Immutable.

    A token that ends no word costs one dictionary look-up, and any other token at most one for each token of the
    longest word, however many words there are. Stop strings in text are found by the front ends. Specification:
    Inference Request, `stop_words_list`.

    Args:
        words: Token ids of each word, at least one.
        after: A word that is complete with so many generated tokens, or fewer, ends nothing.
    """

    def __init__(self, words: Iterable[tuple[int, ...]], after: int = 0) -> None:
        self._after = after
        self._tree: dict[int, Any] = {}  # by the last token, then the one before it, and so on
        self.longest = 0
        """Tokens of the longest word; 0 without words."""
        for word in words:
            node = self._tree
            for token_id in reversed(word):
                node = node.setdefault(token_id, {})
            node[_WORD] = True
            self.longest = max(self.longest, len(word))

    def __bool__(self) -> bool:
        return bool(self._tree)

    def may_end_with(self, token_id: int, num_generated: int) -> bool:
        """Whether a word that counts may end with this token, the last of so many generated ones."""
        return num_generated > self._after and token_id in self._tree

    def matches(self, tokens: Sequence[int], num_generated: int) -> bool:
        """Whether `tokens` ends with a word that counts.

        Args:
            tokens: The known tokens of a sequence, at least one; only the last `longest` of them are read.
            num_generated: How many of them, at the end, are generated; a word has to lie wholly within these.
        """
        if num_generated <= self._after:
            return False
        node = self._tree
        for place in range(len(tokens) - 1, len(tokens) - 1 - min(num_generated, len(tokens)), -1):
            node = node.get(tokens[place])
            if node is None:
                return False
            if _WORD in node:
                return True
        return False

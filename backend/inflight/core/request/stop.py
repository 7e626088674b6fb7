"""Reasons for generation to end: finish reasons, stop signals from front ends, and stop words. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any


class FinishReason(IntEnum):
    """TensorRT-LLM's `FinishReason`, with the same names and numbers."""

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
"""Finish reasons that front ends or deadlines cause. The last response has the tokens generated until then."""


@dataclass(frozen=True, slots=True)
class StopSignal:
    """End request `request_id`, or one of its sequences, in the next iteration; unknown ids are ignored.

    `requested_ns` is the time of the front end's call, by the clock of `IterationInput.now_ns`; 0: unknown.
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
"""The key in the tree, not a token id, that marks the end of a word."""


class StopWords:
    """The stop words of one request: token sequences that end an output. Immutable.

    A token that ends no word takes one dictionary look-up, and any other token at most one look-up per token of
    the longest word, for any number of words. Front ends handle stop strings in text. Specification: Inference
    Request, `stop_words_list`.

    Args:
        words: Token ids of each word, at least one.
        after: A word that is complete within this many generated tokens is ignored.
    """

    def __init__(self, words: Iterable[tuple[int, ...]], after: int = 0) -> None:
        self._after = after
        self._tree: dict[int, Any] = {}  # keys are the last token, then the token before it, and so on
        self.longest = 0
        """Number of tokens of the longest word; 0 without words."""
        for word in words:
            node = self._tree
            for token_id in reversed(word):
                node = node.setdefault(token_id, {})
            node[_WORD] = True
            self.longest = max(self.longest, len(word))

    def __bool__(self) -> bool:
        return bool(self._tree)

    def may_end_with(self, token_id: int, num_generated: int) -> bool:
        """Whether a word may end with this token, the `num_generated`-th generated token."""
        return num_generated > self._after and token_id in self._tree

    def matches(self, tokens: Sequence[int], num_generated: int) -> bool:
        """Whether `tokens` ends with a stop word.

        Args:
            tokens: The known tokens of a sequence, at least one. Only the last `longest` of them are read.
            num_generated: Number of generated tokens at the end of `tokens`; a word must lie within them.
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

"""The interface of a grammar library, and the errors for guides that it cannot follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from inflight.core.request.guide import Guide
from inflight.errors import InvalidArgument, Name


class DeadEnd(InvalidArgument):
    """The text has reached a state in which the guide allows no next token, although it allows other texts."""


class Matcher(Protocol):
    """The state of one sequence in its guide. Used by one thread at a time."""

    def consume(self, token_ids: Sequence[int]) -> None:
        """Advance by tokens.

        Raises:
            DeadEnd: The masks allow these tokens, but the guide cannot continue after them. No token was
                consumed.
            InvalidArgument: The guide does not allow these tokens, or no longer works.
        """
        ...

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` tokens, which must have been consumed without an error."""
        ...

    def fork(self) -> Matcher:
        """Return an independent matcher in the same state."""
        ...


@dataclass(frozen=True, slots=True)
class MaskJob:
    """A request for the mask of one sequence's next token.

    Attributes:
        matcher: The sequence's matcher; it must be of the backend that fills the mask.
        row: The row of the mask among `masks`.
    """

    matcher: Matcher
    row: int


class GuideBackend(Protocol):
    """A grammar library with a vocabulary.

    One thread at a time may call `fill`; any thread may call other methods.
    """

    def compile(self, guide: Guide) -> bytes:
        """Check that a guide is supported, and return its compiled form, which `load` can load quickly.

        Time and memory are unlimited, so this must be called in a process that can be killed.

        Raises:
            InvalidArgument: The guide cannot be followed; the message names `guided_decoding_guide` and the
                reason.
        """
        ...

    def load(self, guide: Guide, compiled: bytes) -> Matcher:
        """Return a matcher at the beginning of a guide; `compiled` is the result of `compile`.

        Raises:
            InvalidArgument: See `compile`.
        """
        ...

    def fill(self, jobs: Sequence[MaskJob], masks: NDArray[np.int32]) -> Mapping[int, InvalidArgument]:
        """Fill masks. Several masks are filled in parallel if there are processors; one, on the caller's thread.

        Args:
            jobs: The masks to fill.
            masks: [rows, `GuideVocabulary.num_words`] int32, contiguous; bit i of word w is 1 if token 32 * w + i
                may come next.

        Returns:
            The error of each guide that no longer works, by job index.
        """
        ...


def refusal(reason: str) -> InvalidArgument:
    """Return the error for a guide that cannot be followed, with the beginning of the library's reason."""
    text = " ".join(reason.split())
    return InvalidArgument(Name("guided_decoding_guide"), " cannot be used: ", text[:_LONGEST_REASON])


def over_budget() -> InvalidArgument:
    """Return the error for a guide that takes more work than one request may use."""
    return refusal(
        "its masks take more work than one request may use. Send a simpler guide: one whose rules cannot "
        "match the same text in many ways, and with fewer expressions that may come at one place. Masks behind "
        "draft tokens count too"
    )


_LONGEST_REASON = 400

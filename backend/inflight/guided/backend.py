"""The interface of a grammar library, and the libraries that there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from inflight.core.request.guide import Guide
from inflight.errors import ConfigError, InvalidArgument, Name
from inflight.guided.vocabulary import GuideVocabulary

BACKENDS = ("llguidance", "xgrammar")


class DeadEnd(InvalidArgument):
    """One text cannot be continued by its guide; other texts of the guide can."""


class Matcher(Protocol):
    """How far one sequence has come in its guide. One thread at a time."""

    def consume(self, token_ids: Sequence[int]) -> None:
        """Go on with tokens.

        Raises:
            DeadEnd: The masks allow them, and the guide does not all the same; none of them was consumed.
            InvalidArgument: The guide does not allow them, or cannot be followed any further.
        """
        ...

    def rollback(self, num_tokens: int) -> None:
        """Take back the latest tokens, which were consumed without an error."""
        ...

    def fork(self) -> Matcher:
        """A matcher of its own that has come as far."""
        ...


@dataclass(frozen=True, slots=True)
class MaskJob:
    """The mask of the next token, which is wanted.

    Attributes:
        matcher: Of the backend that is asked.
        row: Where the mask goes.
    """

    matcher: Matcher
    row: int


class GuideBackend(Protocol):
    """A library with a vocabulary. `fill` is for one thread at a time; the rest may be called by any."""

    def compile(self, guide: Guide) -> bytes:
        """Prove that a guide can be followed, and return what `load` needs to do so with little work.

        Takes as long as the guide wants, and as much memory: to be called in a process that can be killed.

        Raises:
            InvalidArgument: It cannot; the message names `guided_decoding_guide` and says why.
        """
        ...

    def load(self, guide: Guide, compiled: bytes) -> Matcher:
        """A matcher at the beginning of a guide that `compile` has returned `compiled` for.

        Raises:
            InvalidArgument: As `compile`.
        """
        ...

    def fill(self, jobs: Sequence[MaskJob], masks: NDArray[np.int32]) -> Mapping[int, InvalidArgument]:
        """Fill masks: several in parallel where there are processors, a single one on the caller's thread.

        Args:
            jobs: Whose masks.
            masks: [rows, `GuideVocabulary.num_words`], contiguous; bit i of word w is 1 if token 32 * w + i may
                come next.

        Returns:
            By the index of a job, why its guide cannot be followed on.
        """
        ...


def make_backend(name: str, vocabulary: GuideVocabulary) -> GuideBackend:
    """One of BACKENDS.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        if name == "xgrammar":
            from inflight.guided.xgrammar_backend import XGrammarBackend

            return XGrammarBackend(vocabulary)
        from inflight.guided.llguidance_backend import LLGuidanceBackend

        return LLGuidanceBackend(vocabulary)
    except ImportError as error:
        remedy = ": pip install -e '.[guided-xgrammar]' in the checkout" if name == "xgrammar" else ""
        raise ConfigError(
            f"guided_decoding_backend is {name}, which is not installed{remedy} ({error})"
        ) from None


def refusal(reason: str) -> InvalidArgument:
    """The error for a guide that cannot be followed; the first lines of a library's reason are enough."""
    text = " ".join(reason.split())
    return InvalidArgument(Name("guided_decoding_guide"), " cannot be used: ", text[:_LONGEST_REASON])


def over_budget() -> InvalidArgument:
    """The error for a guide that takes more work than one request may ask for."""
    return refusal(
        "its tokens take more work than one request may ask for. Send a simpler guide: one whose rules cannot "
        "match the same text in many ways, and with fewer expressions that may come at one place. Masks behind "
        "draft tokens count too"
    )


_LONGEST_REASON = 400

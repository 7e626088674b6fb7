"""What comes back: deltas of a stream, and what they add up to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

NOT_FINISHED = "NOT_FINISHED"


@dataclass(frozen=True)
class Delta:
    """What one response of the server adds. A prompt as text brings text, a prompt as ids brings ids.

    Attributes:
        text: The new text.
        token_ids: The new ids.
        finish_reason: NOT_FINISHED up to the last delta; then why generation ended: END_ID, STOP_WORDS, LENGTH,
            TIMED_OUT or CANCELLED.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: str = NOT_FINISHED


@dataclass(frozen=True)
class Completion:
    """A whole answer, without the prompt. Attributes as in Delta."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str


def completion(deltas: Iterable[Delta]) -> Completion:
    """What `deltas` add up to."""
    deltas = list(deltas)
    return Completion(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        finish_reason=deltas[-1].finish_reason if deltas else NOT_FINISHED,
    )
